"""A run's rows as the columns that the report draws: at most `POINTS` points, over steps, tokens and hours.

Numbers only; what a chart looks like is in `report_plots.py`, expert loads are in `report_experts.py`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llm_pretrain.tracking.run_files import Row, RunRecord, number

POINTS = 2000
"""Points of a curve; more rows are drawn as bins of consecutive rows."""
MARKS = 500
"""Marks of skipped steps."""

Column = list[float | None]

_LARGEST = ("train/grad_norm", "perf/memory_bytes", "experts/load_max", "experts/dead")
"""Columns of which a bin shows the largest value, since a mean would hide what one looks for."""


@dataclass(frozen=True)
class RunSeries:
    """What the charts draw of one run.

    Args:
        name: Shown in legends.
        train: Columns of the training rows: `step`, `tokens`, `hours`, then metrics by key.
        evaluation: The same of the rows with an evaluation.
        restarts: `{step, tokens, hours, label}` of each attempt after the first.
        skipped: `{step, tokens, hours, label, value}`; `value` is the last loss before.
        rows_per_point: Rows that a point of `train` stands for.
    """

    name: str
    train: dict[str, Column]
    evaluation: dict[str, Column]
    restarts: list[dict[str, Any]]
    skipped: list[dict[str, Any]]
    rows_per_point: int


def run_series(run: RunRecord, name: str) -> RunSeries:
    """The columns of one run."""
    training = [_with_experts(row) for row in run.rows if any(key.startswith("train/") for key in row)]
    evaluated = [row for row in run.rows if any(key.startswith("eval/") for key in row)]
    axes = _Axes(run)
    return RunSeries(
        name=name,
        train=_columns(training, ("train/", "perf/", "experts/"), axes),
        evaluation=_columns(evaluated, ("eval/",), axes),
        restarts=[
            axes.at(attempt["step"]) | {"label": f"{attempt.get('launcher')} × {attempt.get('world_size')}"}
            for attempt in run.attempts[1:]
            if number(attempt.get("step")) is not None
        ],
        skipped=_skipped(training, axes),
        rows_per_point=-(-len(training) // POINTS) if training else 1,
    )


def training_seconds(run: RunRecord) -> float | None:
    """Time that the run's attempts have worked, without the pauses between them and without lost work."""
    _, hours = _clock(run)
    return hours[-1] * 3600 if hours else None


class _Axes:
    """Tokens and hours at any step, between the rows by interpolation."""

    def __init__(self, run: RunRecord):
        tokens = [
            (row["step"], row["train/tokens"])
            for row in run.rows
            if number(row.get("train/tokens")) is not None
        ]
        # as arrays, since a list would be converted for every point
        self._token_steps, self._token_counts = np.array([(0, 0), *tokens], dtype=float).T
        self._hour_steps, self._hours = (np.array(axis) for axis in _clock(run))
        self._has_tokens = bool(tokens)

    def at(self, step: float) -> dict[str, float | None]:
        """`{step, tokens, hours}`; None where the run does not say."""
        tokens = float(np.interp(step, self._token_steps, self._token_counts)) if self._has_tokens else None
        hours = float(np.interp(step, self._hour_steps, self._hours)) if self._hours.size else None
        return {"step": step, "tokens": tokens, "hours": short(hours)}


def short(value: float | None, digits: int = 6) -> float | None:
    """A number with as many digits as a chart can show."""
    return value if value is None or isinstance(value, int) else float(f"{value:.{digits}g}")


def _clock(run: RunRecord) -> tuple[list[float], list[float]]:
    """Steps and the hours of work after which they were done, both ascending.

    By the rows' times less the pauses between attempts; for rows without a time, by the step times.
    """
    timed = [(row["step"], row["time"]) for row in run.rows if number(row.get("time")) is not None]
    if not timed:
        return _clock_of_step_times(run.rows)
    starts = sorted(time for attempt in run.attempts if (time := number(attempt.get("time"))) is not None)
    steps, hours = [], []
    attempt, origin, before, total = None, 0.0, 0.0, 0.0
    for step, time in timed:
        index = bisect_right(starts, time) - 1
        if index != attempt:
            attempt, before = index, total
            origin = starts[index] if index >= 0 else time
        total = max(total, before + time - origin)  # a clock that was set back does not turn time
        steps.append(float(step))
        hours.append(total / 3600)
    return steps, hours


def _clock_of_step_times(rows: Iterable[Row]) -> tuple[list[float], list[float]]:
    steps, hours, last, total = [], [], 0, 0.0
    for row in rows:
        seconds = number(row.get("perf/step_seconds"))
        if seconds is not None:
            total += seconds * (row["step"] - last)
            last = row["step"]
            steps.append(float(last))
            hours.append(total / 3600)
    return steps, hours


def _columns(rows: Sequence[Row], prefixes: tuple[str, ...], axes: _Axes) -> dict[str, Column]:
    """`step`, `tokens`, `hours` and every metric with one of the prefixes that has a number anywhere."""
    if not rows:
        return {}
    bins = np.array_split(np.arange(len(rows)), min(len(rows), POINTS))
    keys = dict.fromkeys(key for row in rows for key in row if key.startswith(prefixes))
    steps = np.array([row["step"] for row in rows], dtype=float)
    points = [axes.at(_plain(steps[each].mean())) for each in bins]
    columns: dict[str, Column] = {axis: [point[axis] for point in points] for axis in points[0]}
    for key in keys:
        values = np.array([_or_nan(row.get(key)) for row in rows])
        if not np.isnan(values).all():
            largest = key in _LARGEST
            columns[key] = [_reduced(values[each], largest) for each in bins]
    return columns


def _reduced(values: np.ndarray, largest: bool) -> float | None:
    known = values[~np.isnan(values)]
    if not known.size:
        return None
    return short(float(known.max() if largest else known.mean()))


def _or_nan(value: object) -> float:
    known = number(value)
    return math.nan if known is None else float(known)


def _plain(value: float) -> float:
    return int(value) if float(value).is_integer() else float(value)


def _with_experts(row: Row) -> Row:
    """A row with its layers' `moe/layer_N/…` summed up under `experts/…`."""
    found: dict[str, list[float]] = {}
    for key, value in row.items():
        if key.startswith("moe/layer_") and number(value) is not None:
            found.setdefault(key.rpartition("/")[2], []).append(value)
    summary: Row = {}
    if loads := found.get("load_max"):
        summary["experts/load_max"] = max(loads)
    if dead := found.get("dead_experts"):
        summary["experts/dead"] = sum(dead)
    if entropy := found.get("router_entropy"):
        summary["experts/entropy_mean"] = sum(entropy) / len(entropy)
        summary["experts/entropy_lowest"] = min(entropy)
    return row | summary if summary else row


def _skipped(rows: Sequence[Row], axes: _Axes) -> list[dict[str, Any]]:
    marks, loss = [], None
    for row in rows:
        if label := row.get("train/skipped") or (row.get("train/spike") and "spike, logged"):
            marks.append(axes.at(row["step"]) | {"label": str(label), "value": short(loss)})
        loss = loss if (new := number(row.get("train/loss"))) is None else new
    return marks[-MARKS:]
