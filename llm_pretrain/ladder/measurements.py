"""What a ladder's runs have measured: from the files of their folders to points, speeds and compute used."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from llm_pretrain.errors import ConfigError, DataError
from llm_pretrain.files import read_json
from llm_pretrain.ladder.budget import RATE_FACTORS, RATE_LIMITS
from llm_pretrain.ladder.family import Sizes, tokens_per_step
from llm_pretrain.ladder.points import (
    LADDER_FILE,
    POINTS_FILE,
    Ladder,
    Point,
    Rung,
    Training,
    read_points,
    read_unmeasured,
)
from llm_pretrain.ladder.runs import Run, check_runs, ladder_runs, run_folder, rung_runs
from llm_pretrain.tracking import attempt_starts, finite_number, metric_values, read_metrics, read_rows


class Evaluation(NamedTuple):
    """An evaluation; None where a value is not finite, or bytes are unknown."""

    loss: float | None
    bits_per_byte: float | None


@dataclass(frozen=True)
class Progress:
    """What the files of a run's folder hold at one moment; each empty while there is no such file.

    Args:
        status: Of status.json.
        rows: Of metrics.jsonl, without lost work.
        attempts: Of attempts.jsonl.
    """

    status: dict[str, Any]
    rows: list[dict[str, Any]]
    attempts: list[dict[str, Any]]

    @property
    def evaluations(self) -> dict[int, Evaluation]:
        """Step -> evaluation."""
        evaluated = (row for row in self.rows if "eval/loss" in row)
        return {
            row["step"]: Evaluation(
                finite_number(row["eval/loss"]), finite_number(row.get("eval/bits_per_byte"))
            )
            for row in evaluated
        }

    @property
    def has_diverged(self) -> bool:
        """Whether the run ended as diverged, or an evaluation of it was not finite."""
        is_finite = all(each.loss is not None for each in self.evaluations.values())
        return self.status.get("state") == "diverged" or not is_finite

    def has_ended(self, end: int) -> bool:
        """Whether the run finished at step `end` or later with its evaluation, or stopped as diverged."""
        step = self.status.get("step")
        if self.status.get("state") == "finished" and isinstance(step, int) and step >= end:
            return end in self.evaluations
        return self.status.get("state") == "diverged"

    @property
    def step_seconds(self) -> float | None:
        """Median seconds of a step, without start-up, evaluations and saves; None before the first row."""
        seconds = [each for each in metric_values(self.rows, "perf/step_seconds") if each > 0]
        return statistics.median(seconds) if seconds else None

    @property
    def last_step(self) -> int:
        """The last step that has a row."""
        return self.rows[-1]["step"] if self.rows else 0

    @property
    def seconds(self) -> float:
        """From the start of training to the last row of each attempt, without work that was lost."""
        times = metric_values(self.rows, "time")
        begins = [*metric_values(self.attempts, "time"), math.inf]
        last = [
            max((each for each in times if begin <= each < end), default=begin)
            for begin, end in itertools.pairwise(begins)
        ]
        return math.fsum(last) - math.fsum(begins[:-1])


def read_progress(folder: Path) -> Progress:
    """Read the folder of a run, which need not exist.

    Raises:
        CheckpointError: a line of metrics.jsonl is damaged.
    """
    try:
        status = read_json(folder / "status.json")
    except (OSError, ValueError, RecursionError):
        status = {}
    metrics, file = folder / "metrics.jsonl", folder / "attempts.jsonl"
    attempts = list(read_rows(file)) if file.exists() else []
    starts = attempt_starts(attempts, "metrics_bytes")
    rows = read_metrics(metrics, starts=starts) if metrics.exists() else []
    return Progress(status if isinstance(status, dict) else {}, rows, attempts)


def diverged_sizes(ladder: Ladder) -> list[int]:
    """Hidden sizes of which a run at the chosen rate has diverged: their points are left out."""
    if ladder.rate_factor is None:
        return []
    return [
        rung.hidden_size
        for rung in ladder.rungs
        if any(
            read_progress(run_folder(ladder, run)).has_diverged for run in rung_runs(rung, ladder.rate_factor)
        )
    ]


def shortcomings(ladder: Ladder) -> list[str]:
    """What a ladder lacks, and why: its rate, a better one within reach, points of a size; one line each."""
    if ladder.rate_factor is None:
        return ["the learning rate is not chosen yet; the same `llm-pretrain ladder` command continues"]
    found, diverged = list[str](), diverged_sizes(ladder)
    if ladder.rate_factor in RATE_LIMITS:
        found.append(
            f"the best learning rates are the last that are tried, {ladder.rate_factor:g} times the base's; "
            "make a ladder of a base with such rates"
        )
    for size, wanted in ((rung.hidden_size, len(rung.steps)) for rung in ladder.rungs):
        missing = wanted - sum(point.hidden_size == size and point.decayed for point in ladder.points)
        if size in diverged:
            found.append(f"hidden size {size}: a run has diverged; its points are left out")
        elif missing > 0:
            found.append(f"hidden size {size}: {missing} of {wanted} decayed points are missing")
    return found


def tried_factors(ladder: Ladder) -> list[float]:
    """The factors on the learning rates at which the smallest size has a run, ascending."""
    return [
        factor
        for factor in sorted({*RATE_FACTORS, *RATE_LIMITS})
        if run_folder(ladder, check_runs(ladder.rungs[0], [factor])[0]).is_dir()
    ]


def all_runs(ladder: Ladder) -> list[Run]:
    """The runs of a ladder, as far as they are known: other rates than `RATE_FACTORS` may be tried."""
    tried = tried_factors(ladder)
    if ladder.rate_factor is None:
        return ladder_runs(ladder.rungs, 1.0, sorted({*RATE_FACTORS, *tried}))
    return ladder_runs(ladder.rungs, ladder.rate_factor, tried)


def rate_loss(ladder: Ladder, factor: float) -> float:
    """Loss of the smallest size's shortest training at a rate; infinite if it diverged or has not ended."""
    decay = check_runs(ladder.rungs[0], [factor])[1]
    progress = read_progress(run_folder(ladder, decay))
    evaluation = progress.evaluations.get(decay.end)
    if evaluation is None or evaluation.loss is None or progress.has_diverged:
        return math.inf
    return evaluation.loss


def measured_points(ladder: Ladder) -> list[Point]:
    """The points of all evaluations that the ladder's runs, at the chosen rate, have made so far."""
    return [point for rung in ladder.rungs for point in _points(ladder, rung)]


def _points(ladder: Ladder, rung: Rung) -> Iterator[Point]:
    """Those of one size that has not diverged: the stable run's after its start, and each decay's last."""
    if ladder.rate_factor is None:
        return
    size, runs = Sizes(ladder.base).of(rung.hidden_size), rung_runs(rung, ladder.rate_factor)
    found = [read_progress(run_folder(ladder, run)) for run in runs]
    if any(progress.has_diverged for progress in found):
        return
    for run, progress in zip(runs, found, strict=True):
        for step, evaluation in progress.evaluations.items():
            if evaluation.loss is None or not 0 < step <= run.end or (run.begin and step < run.end):
                continue
            trained = dataclasses.asdict(Training.of(size, step, ladder.unique_tokens))
            yield Point(
                **trained, loss=evaluation.loss, bits_per_byte=evaluation.bits_per_byte, decayed=run.begin > 0
            )


def read_ladder(folder: str | Path) -> Ladder:
    """A ladder with the points and the speed that it has measured so far.

    Raises:
        ConfigError: the folder has no ladder.
        DataError: one of its files is damaged, or its points are another ladder's.
        CheckpointError: a run's metrics.jsonl is damaged.
    """
    ladder = read_unmeasured(folder)
    if ladder is None:
        raise ConfigError(
            f"{folder}: expected a ladder's folder, with {LADDER_FILE}, found none; make one with "
            "`llm-pretrain ladder`"
        )
    points, sizes, lines = read_points(ladder.folder), Sizes(ladder.base), dict[tuple[Any, ...], int]()
    for number, point in enumerate(points, start=1):
        place = f"{ladder.folder / POINTS_FILE}:{number}"
        if difference := _foreign(point, ladder, sizes):
            raise DataError(f"{place}: expected a point of this ladder, {difference}")
        if (first := lines.setdefault(point.key, number)) < number:
            raise DataError(f"{place}: expected each training once, found that of line {first} again")
    return dataclasses.replace(ladder, points=points, seconds_per_token=read_seconds_per_token(ladder))


def _foreign(point: Point, ladder: Ladder, sizes: Sizes) -> str | None:
    """What a point would have if it were the ladder's, and what it has; None where it is."""
    widths = [rung.hidden_size for rung in ladder.rungs]
    if point.hidden_size not in widths:
        return f"of hidden size {', '.join(map(str, widths))}, found {point.hidden_size}"
    steps = point.tokens // tokens_per_step(ladder.base)
    own = Training.of(sizes.of(point.hidden_size), steps, ladder.unique_tokens)
    for name, expected in dataclasses.asdict(own).items():
        if (found := getattr(point, name)) != expected:
            return f"with {name} {expected:,}, found {found:,}"
    return None


def read_seconds_per_token(ladder: Ladder) -> dict[int, float]:
    """Hidden size -> median seconds per token of its stable run."""
    if ladder.rate_factor is None:
        return {}
    stable = [rung_runs(rung, ladder.rate_factor)[0] for rung in ladder.rungs]
    speeds = {run.hidden_size: read_progress(run_folder(ladder, run)).step_seconds for run in stable}
    return {size: seconds / tokens_per_step(ladder.base) for size, seconds in speeds.items() if seconds}


class LadderUsed(NamedTuple):
    """What the runs of a ladder have used so far.

    Args:
        flops: Of their steps.
        seconds: Of the runs, one after another.
    """

    flops: float
    seconds: float


def used_by(ladder: Ladder) -> LadderUsed:
    """What a ladder's runs have used."""
    sizes = Sizes(ladder.base)
    trained = [(run, read_progress(run_folder(ladder, run))) for run in all_runs(ladder)]
    flops = sum(
        max(0, progress.last_step - run.begin) * sizes.of(run.hidden_size).step_flops
        for run, progress in trained
    )
    return LadderUsed(flops, math.fsum(progress.seconds for _, progress in trained))
