"""The charts of a report as plain data: columns of metrics, expert load maps, and what each chart shows."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llm_pretrain.runs.record import RunRecord
from llm_pretrain.runs.rows import Row, expert_summary, finite_number

POINTS = 2000
"""Largest number of points of a curve; more rows are averaged in bins of consecutive rows."""
MAX_SKIPPED = 500
"""Largest number of skipped steps that a chart marks."""
MAP_CELLS = 400_000
"""Largest number of cells of the expert maps (layers x experts x columns): about 1.5 MB of the page."""
MAP_COLUMNS = (24, 200)
"""Smallest and largest number of columns of an expert map."""

Column = list[float | None]

_SHOWN_BY_MAXIMUM = {"train/grad_norm", "perf/memory_bytes", "experts/load_max", "experts/dead"}
"""Metrics of which a bin shows the maximum, because a mean would hide spikes."""


@dataclass(frozen=True)
class RunSeries:
    """The data that charts show of one run.

    Args:
        name: Shown in legends.
        train: Columns of the training rows: `step`, `tokens`, `hours`, then metrics by key.
        evaluation: Columns of the rows with an evaluation: `step`, `tokens`, `hours`, then metrics by key.
        restarts: `{step, tokens, hours, label}` of each attempt after the first that has added a row.
        skipped: `{step, tokens, hours, label, value}` of each skipped step; `value` is the loss before it.
        rows_per_point: Largest number of rows that one point of `train` covers.
    """

    name: str
    train: dict[str, Column]
    evaluation: dict[str, Column]
    restarts: list[dict[str, Any]]
    skipped: list[dict[str, Any]]
    rows_per_point: int


def run_series(run: RunRecord, name: str) -> RunSeries:
    """The columns and marks of one run; `name` is its name in legends."""
    training = [row | expert_summary(row) for row in run.rows if any(key.startswith("train/") for key in row)]
    evaluated = [row for row in run.rows if any(key.startswith("eval/") for key in row)]
    axes, last = Axes(run), run.rows[-1]["step"] if run.rows else 0
    return RunSeries(
        name=name,
        train=_columns(training, ("train/", "perf/", "experts/"), axes),
        evaluation=_columns(evaluated, ("eval/",), axes),
        restarts=[
            axes.at(attempt["step"]) | {"label": f"{attempt.get('launcher')} × {attempt.get('world_size')}"}
            for attempt in run.attempts[1:]
            if (step := finite_number(attempt.get("step"))) is not None and step < last
        ],
        skipped=_skipped(training, axes),
        rows_per_point=-(-len(training) // POINTS) if training else 1,
    )


def training_seconds(run: RunRecord) -> float | None:
    """Time that the run has trained, without pauses between attempts and without repeated steps."""
    _, hours = _clock(run)
    return hours[-1] * 3600 if hours else None


class Axes:
    """Interpolates tokens and hours at any step; extrapolates tokens after the last row that has them."""

    def __init__(self, run: RunRecord):
        tokens = [
            (row["step"], row["train/tokens"])
            for row in run.rows
            if finite_number(row.get("train/tokens")) is not None
        ]
        # arrays, because np.interp would convert a list for every point
        self._token_steps, self._token_counts = np.array([(0, 0), *tokens], dtype=float).T
        self._hour_steps, self._hours = (np.array(axis) for axis in _clock(run))
        self._has_tokens = bool(tokens)

    def at(self, step: float) -> dict[str, float | None]:
        """`{step, tokens, hours}`; None where the run does not record it."""
        tokens = self._tokens(step) if self._has_tokens else None
        hours = float(np.interp(step, self._hour_steps, self._hours)) if self._hours.size else None
        return {"step": step, "tokens": tokens, "hours": _rounded(hours)}

    def _tokens(self, step: float) -> float:
        steps, counts = self._token_steps, self._token_counts
        if step <= steps[-1] or steps[-1] == steps[-2]:
            return float(np.interp(step, steps, counts))
        slope = (counts[-1] - counts[-2]) / (steps[-1] - steps[-2])
        return float(counts[-1] + (step - steps[-1]) * slope)


def _rounded(value: float | None) -> float | None:
    """A number with 6 digits, as many as a chart can show."""
    return value if value is None or isinstance(value, int) else float(f"{value:.6g}")


_SECONDS_OF_A_DAY = 86_400
"""A longer time between two rows means that the clock was changed."""


def _clock(run: RunRecord) -> tuple[list[float], list[float]]:
    """(steps, hours of training after which each step was done), both ascending.

    The hours come from the rows' times, without the pauses between attempts. They come from the step times
    if the clock was changed.
    """
    timed = [row for row in run.rows if finite_number(row.get("time")) is not None]
    times = (finite_number(attempt.get("time")) for attempt in run.attempts)
    starts = sorted(time for time in times if time is not None)
    steps, hours = [], []
    attempt, before, last, total = None, 0.0, 0, 0.0
    for row in timed:
        index = bisect_right(starts, row["time"]) - 1
        if index != attempt:
            attempt, before = index, starts[index] if index >= 0 else row["time"]
        elapsed = row["time"] - before
        if not 0 <= elapsed < _SECONDS_OF_A_DAY:
            elapsed = (finite_number(row.get("perf/step_seconds")) or 0.0) * (row["step"] - last)
        total += elapsed
        before, last = row["time"], row["step"]
        steps.append(float(last))
        hours.append(total / 3600)
    return steps, hours


def _columns(rows: Sequence[Row], prefixes: tuple[str, ...], axes: Axes) -> dict[str, Column]:
    """`step`, `tokens`, `hours` and every metric with one of the prefixes that has any number."""
    if not rows:
        return {}
    bins = np.array_split(np.arange(len(rows)), min(len(rows), POINTS))
    keys = dict.fromkeys(key for row in rows for key in row if key.startswith(prefixes))
    steps = np.array([row["step"] for row in rows], dtype=float)
    means = (float(steps[each].mean()) for each in bins)
    points = [axes.at(int(mean) if mean.is_integer() else mean) for mean in means]
    columns: dict[str, Column] = {axis: [point[axis] for point in points] for axis in points[0]}
    for key in keys:
        numbers = (finite_number(row.get(key)) for row in rows)
        values = np.array([math.nan if each is None else float(each) for each in numbers])
        if not np.isnan(values).all():
            reduce = np.max if key in _SHOWN_BY_MAXIMUM else np.mean
            known = (values[each][~np.isnan(values[each])] for each in bins)
            columns[key] = [_rounded(float(reduce(each))) if each.size else None for each in known]
    return columns


def _skipped(rows: Sequence[Row], axes: Axes) -> list[dict[str, Any]]:
    marks, loss = [], None
    for row in rows:
        if label := row.get("train/skipped") or (row.get("train/spike") and "spike, logged"):
            marks.append(axes.at(row["step"]) | {"label": str(label), "value": _rounded(loss)})
        loss = loss if (new := finite_number(row.get("train/loss"))) is None else new
    return marks[-MAX_SKIPPED:]


def expert_maps(rows: Iterable[Row]) -> dict[str, Any] | None:
    """Expert loads over a run for heat maps, as integers in hundredths of an even load.

    A load is an expert's share of its layer's tokens times the number of experts, so 1 is even. With more
    layers and experts, a column covers more steps, so that the maps' size stays bounded.

    Returns:
        None for a run without mixture-of-experts layers, else `steps` [C], the mean step of each column;
        `layers` [L], their numbers; `experts` E; `load` [L][E][C]; `peak` [L][C], the largest load;
        `last` [L][E], of the last row alone; `last_step`.
    """
    loaded = [(row["step"], row["moe/load"], row) for row in rows if row.get("moe/load") is not None]
    if not loaded:
        return None
    shape = loaded[-1][1].shape  # if the number of experts has changed, only the last rows are shown
    loaded = [entry for entry in loaded if entry[1].shape == shape]
    layers, experts = shape
    fewest, most = MAP_COLUMNS
    columns = min(len(loaded), max(fewest, min(most, MAP_CELLS // (layers * experts))))
    bins = np.array_split(np.arange(len(loaded)), columns)
    steps = np.array([step for step, _, _ in loaded], dtype=float)
    load = np.stack([_mean_load([loaded[index][1] for index in each]) for each in bins], axis=-1)
    return {
        "steps": [round(float(steps[each].mean()), 1) for each in bins],
        "layers": _layer_numbers(loaded[-1][2], layers),
        "experts": experts,
        "load": _hundredths(load),
        "peak": _hundredths(load.max(axis=1)),
        "last": _hundredths(_mean_load([loaded[-1][1]])),
        "last_step": loaded[-1][0],
    }


def _mean_load(tables: list[np.ndarray]) -> np.ndarray:
    """Mean of the tables [L, E] in units of an even load; values that are not finite count as 0."""
    mean = np.nan_to_num(np.stack(tables), posinf=0.0, neginf=0.0).mean(axis=0, dtype=np.float64)
    total = mean.sum(axis=1, keepdims=True)
    return mean * mean.shape[1] / np.where(total > 0, total, 1.0)


def _hundredths(values: np.ndarray) -> list[Any]:
    return np.rint(values * 100).astype(int).tolist()


def _layer_numbers(row: Row, count: int) -> list[int]:
    """Numbers of the layers with experts, from the keys `moe/layer_N/…`."""
    names = {key.split("/")[1].removeprefix("layer_") for key in row if key.startswith("moe/layer_")}
    numbers = sorted(int(name) for name in names if name.isdecimal())
    return numbers if len(numbers) == count else list(range(count))


@dataclass(frozen=True)
class Chart:
    """One chart.

    Args:
        id: Id of its element in the page.
        title: What it shows.
        unit: Unit of the vertical axis.
        columns: Key of a metric -> label of its curve. `*` in a key matches any text, which becomes the
            label. A curve with an empty label is not in the legend.
        scale: Factor on the values.
        log: Logarithmic vertical axis from the start.
        smooth: Whether the page's smoothing applies.
        skipped: Whether skipped steps are marked.
        nonzero: Whether a column of zeros is left out.
        wide: Whether the chart takes the page's whole width.
    """

    id: str
    title: str
    unit: str
    columns: Mapping[str, str]
    scale: float = 1.0
    log: bool = False
    smooth: bool = False
    skipped: bool = False
    nonzero: bool = False
    wide: bool = False


_SECTIONS = {
    "loss": ("Loss", ""),
    "evaluation": ("Evaluation", ""),
    "sources": ("Sources", "Loss of each source of the mixture."),
    "optimisation": ("Optimisation", ""),
    "speed": ("Speed and memory", ""),
    "experts": ("Experts", "A load of 1 is even: the expert gets as many tokens as the mean of its layer."),
}
"""Title and note of each section of charts by its id, in the page's order."""

_LOSSES = {"train/loss": "training", "eval/loss": "evaluation"}
_OTHER_LOSSES = {
    "train/aux_loss": "load balance",
    "train/router_z_loss": "router z",
    "train/z_loss": "output z",
}
_ENTROPY = {"experts/entropy_mean": "mean of the layers", "experts/entropy_lowest": "lowest layer"}
_PREDICTED = {
    "eval/predicted_loss": "predicted",
    "eval/predicted_low": "",
    "eval/predicted_high": "predicted interval",
}
"""The page fills the area between the lower end and the next entry, the upper end."""
_NATS, _BITS = "nats per token", "bits per byte"
CHARTS = {
    "loss": (
        Chart("loss-chart", "Cross-entropy", _NATS, _LOSSES, smooth=True, skipped=True, wide=True),
        Chart(
            "other-losses",
            "Auxiliary and z losses, with their coefficients",
            "per token",
            _OTHER_LOSSES,
            log=True,
            smooth=True,
            nonzero=True,
            wide=True,
        ),
    ),
    "evaluation": (
        Chart("eval-loss", "Evaluation loss", _NATS, {"eval/loss": "evaluation"} | _PREDICTED),
        Chart(
            "bits-per-byte", "Bits per byte of the validation text", _BITS, {"eval/bits_per_byte": "model"}
        ),
    ),
    "sources": (
        Chart("source-loss", "Training loss by source", _NATS, {"train/source/*/loss": ""}, smooth=True),
        Chart("source-eval", "Evaluation loss by source", _NATS, {"eval/source/*/loss": ""}),
        Chart("source-bits", "Bits per byte by source", _BITS, {"eval/source/*/bits_per_byte": ""}),
        Chart(
            "source-tokens",
            "Loss tokens by source",
            "tokens per step",
            {"train/source/*/loss_tokens": ""},
            smooth=True,
        ),
    ),
    "optimisation": (
        Chart("learning-rate", "Learning rate", "per step", {"train/learning_rate": "learning rate"}),
        Chart(
            "grad-norm",
            "Gradient norm, before clipping",
            "norm",
            {"train/grad_norm": "gradient norm"},
            smooth=True,
            skipped=True,
        ),
        Chart(
            "loss-scale", "Loss scale", "factor", {"train/loss_scale": "loss scale"}, log=True, skipped=True
        ),
    ),
    "speed": (
        Chart(
            "speed-chart",
            "Loss tokens per second",
            "tokens / s",
            {"perf/tokens_per_second": "loss tokens"},
            smooth=True,
        ),
        Chart("mfu", "Model FLOPs utilisation", "%", {"perf/mfu": "MFU"}, scale=100.0, smooth=True),
        Chart(
            "memory", "Memory of the first process", "GiB", {"perf/memory_bytes": "memory"}, scale=1 / 2**30
        ),
        Chart("step-seconds", "Time of a step", "seconds", {"perf/step_seconds": "step"}, smooth=True),
    ),
    "experts": (
        Chart(
            "expert-peak",
            "Most loaded expert of any layer",
            "times an even load",
            {"experts/load_max": "largest load"},
            smooth=True,
        ),
        Chart("router-entropy", "Router entropy", "nats", _ENTROPY, smooth=True),
        Chart(
            "dead-experts",
            "Experts without a token, over all layers",
            "experts",
            {"experts/dead": "dead experts"},
        ),
    ),
}
"""The charts of each section."""


def chart_sections(runs: Sequence[RunRecord], series: Sequence[RunSeries]) -> list[dict[str, Any]]:
    """The charts with a number in any run, as plain data by section: `{id, title, note, charts}`."""
    lines = _reference_lines(runs)
    sections = []
    for section, (title, note) in _SECTIONS.items():
        charts = [
            vars(chart) | {"curves": curves, "lines": lines.get(chart.id, [])}
            for chart in CHARTS[section]
            if (curves := list(_curves(chart, series)))
        ]
        narrow = [chart for chart in charts if not chart["wide"]]
        if len(narrow) % 2:
            narrow[-1]["wide"] = True  # it is alone in its row
        if charts:
            sections.append({"id": section, "title": title, "note": note, "charts": charts})
    return sections


def _curves(chart: Chart, series: Sequence[RunSeries]) -> Iterator[dict[str, Any]]:
    """Run, table, key and label of each column that a chart shows."""
    for index, each in enumerate(series):
        for pattern, label in chart.columns.items():
            table = "evaluation" if pattern.startswith("eval/") else "train"
            columns: dict[str, Column] = getattr(each, table)
            prefix, star, suffix = pattern.partition("*")
            matches = [key for key in columns if key.startswith(prefix) and key.endswith(suffix)]
            for key in matches if star else [pattern]:
                if any(value is not None and (value or not chart.nonzero) for value in columns.get(key, [])):
                    name = key.removeprefix(prefix).removesuffix(suffix) if star else label
                    yield {"run": index, "table": table, "key": key, "label": name}


def _reference_lines(runs: Sequence[RunRecord]) -> dict[str, list[dict[str, Any]]]:
    """Horizontal reference lines `{value, label}` by chart, at most three each."""
    zlib_bits = {bits for run in runs if (bits := _zlib_bits(run)) is not None}
    max_norms = {norm for run in runs if (norm := run.setting("training", "max_grad_norm"))}
    experts = {count for run in runs if (count := run.setting("model", "num_experts"))}
    return {
        "bits-per-byte": [{"value": bits, "label": f"zlib -9: {bits:.3f}"} for bits in sorted(zlib_bits)[:3]],
        "grad-norm": [{"value": norm, "label": f"clipped to {norm:g}"} for norm in sorted(max_norms)[:3]],
        "expert-peak": [{"value": 1.0, "label": "even"}],
        "router-entropy": [
            {"value": math.log(count), "label": f"even over {count:g}"} for count in sorted(experts)[:3]
        ],
    }


def _zlib_bits(run: RunRecord) -> float | None:
    """Bits per byte of `zlib -9` on the validation text, from the last attempt that recorded it."""
    for attempt in reversed(run.attempts):
        if (bits := finite_number(attempt.get("zlib_bits_per_byte"))) is not None:
            return bits
    return None
