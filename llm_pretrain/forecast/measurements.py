"""Reads from the folders of a ladder's runs what they measured: points, speeds and used compute."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from llm_pretrain.errors import ConfigError
from llm_pretrain.forecast.family import Sizes
from llm_pretrain.forecast.ladder_runs import ladder_runs, run_folder, rung_runs
from llm_pretrain.forecast.points import (
    LADDER_FILE,
    Ladder,
    Point,
    Rung,
    Training,
    read_points,
    read_unmeasured,
)
from llm_pretrain.runs.record import attempt_starts, metric_values
from llm_pretrain.runs.rows import finite_number, read_metrics, read_rows
from llm_pretrain.runs.status import read_status


class Evaluation(NamedTuple):
    """Results of an evaluation; a value is None if it is not finite, or if the bytes are unknown."""

    loss: float | None
    bits_per_byte: float | None


@dataclass(frozen=True)
class LadderProgress:
    """The content of a run's files at one moment; a field is empty while its file does not exist.

    Args:
        status: Content of status.json.
        rows: Rows of metrics.jsonl, without lost work.
    """

    status: dict[str, Any]
    rows: list[dict[str, Any]]

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
        """Whether the run ended as diverged, or had an evaluation whose loss is not finite."""
        is_finite = all(each.loss is not None for each in self.evaluations.values())
        return self.status.get("state") == "diverged" or not is_finite

    def has_ended(self, end: int) -> bool:
        """Whether the run finished at step `end` or later, with an evaluation of `end`, or has diverged."""
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


def read_progress(folder: Path) -> LadderProgress:
    """Read the folder of a run; the folder need not exist.

    Raises:
        CheckpointError: a line of metrics.jsonl is damaged.
    """
    metrics, file = folder / "metrics.jsonl", folder / "attempts.jsonl"
    starts = attempt_starts(read_rows(file) if file.exists() else [], "metrics_bytes")
    rows = read_metrics(metrics, starts=starts) if metrics.exists() else []
    return LadderProgress(read_status(folder / "status.json"), rows)


def diverged_sizes(ladder: Ladder) -> list[int]:
    """Hidden sizes with a diverged run; points of these sizes are left out."""
    return [
        rung.hidden_size
        for rung in ladder.rungs
        if any(read_progress(run_folder(ladder, run)).has_diverged for run in rung_runs(rung))
    ]


def shortcomings(ladder: Ladder) -> list[str]:
    """What a ladder lacks, and why; one line for each size."""
    found, diverged = list[str](), diverged_sizes(ladder)
    for size, wanted in ((rung.hidden_size, len(rung.steps)) for rung in ladder.rungs):
        missing = wanted - sum(point.hidden_size == size and point.decayed for point in ladder.points)
        if size in diverged:
            found.append(f"hidden size {size}: a run has diverged; its points are left out")
        elif missing > 0:
            found.append(f"hidden size {size}: {missing} of {wanted} decayed points are missing")
    return found


def measured_points(ladder: Ladder) -> list[Point]:
    """The points of all evaluations that the ladder's runs have made so far."""
    return [point for rung in ladder.rungs for point in _points(ladder, rung)]


def _points(ladder: Ladder, rung: Rung) -> Iterator[Point]:
    """The points of one size: the stable run's from the first branch on, and the last of each decay. Before
    the first branch, losses show the start of a training more than its size. None if a run has diverged."""
    size, runs = Sizes(ladder.base).of(rung.hidden_size), rung_runs(rung)
    found = [read_progress(run_folder(ladder, run)) for run in runs]
    if any(progress.has_diverged for progress in found):
        return
    for run, progress in zip(runs, found, strict=True):
        for step, evaluation in progress.evaluations.items():
            if evaluation.loss is None or not (run.end if run.begin else rung.branches[0]) <= step <= run.end:
                continue
            trained = dataclasses.asdict(Training.of(size, step, ladder.unique_tokens))
            yield Point(
                **trained, loss=evaluation.loss, bits_per_byte=evaluation.bits_per_byte, decayed=run.begin > 0
            )


def read_ladder(folder: str | Path) -> Ladder:
    """A ladder with the points that it has measured so far.

    Raises:
        ConfigError: the folder has no ladder.
        DataError: a file of the ladder is damaged.
    """
    ladder = read_unmeasured(folder)
    if ladder is None:
        raise ConfigError(
            f"{folder}: expected a ladder's folder, with {LADDER_FILE}, found none; make one with "
            "`llm-pretrain ladder`"
        )
    return dataclasses.replace(ladder, points=read_points(ladder.folder))


def flops_per_second(ladder: Ladder) -> float | None:
    """Measured speed of the largest size's stable run, while other runs train; None before its first row."""
    sizes, (stable, *_) = Sizes(ladder.base), rung_runs(ladder.rungs[-1])
    seconds = read_progress(run_folder(ladder, stable)).step_seconds
    return sizes.of(stable.hidden_size).step_flops / seconds if seconds else None


def used_flops(ladder: Ladder) -> float:
    """FLOPs of the steps that a ladder's runs have trained so far."""
    sizes, used = Sizes(ladder.base), 0.0
    for run in ladder_runs(ladder.rungs):
        steps = read_progress(run_folder(ladder, run)).last_step - run.begin
        used += max(0, steps) * sizes.of(run.hidden_size).step_flops
    return used
