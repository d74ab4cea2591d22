"""What a ladder's runs have measured: from the files of their folders to points, speeds and compute used."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from llm_pretrain.config import Config
from llm_pretrain.files import read_json
from llm_pretrain.ladder.budget import RATE_FACTORS, RATE_LIMITS, Sizes
from llm_pretrain.ladder.family import member
from llm_pretrain.ladder.points import RUNS_FOLDER, Ladder, Point, Rung
from llm_pretrain.ladder.runs import Run, check_runs, size_runs, tokens_per_step
from llm_pretrain.model import count_parameters, flops_per_token
from llm_pretrain.tracking import read_metrics, read_rows


class Losses(NamedTuple):
    """An evaluation; None where a value is not finite, or bytes are unknown."""

    loss: float | None
    bits_per_byte: float | None


def run_folder(ladder: Ladder, run: Run) -> Path:
    """Folder of a run."""
    return ladder.folder.absolute() / RUNS_FOLDER / run.name


def read_losses(folder: Path) -> dict[int, Losses]:
    """Step -> evaluation of a run; empty before the first row.

    Raises:
        CheckpointError: a line of metrics.jsonl is damaged.
    """
    evaluated = (row for row in _rows(folder) if "eval/loss" in row)
    return {row["step"]: Losses(row["eval/loss"], row.get("eval/bits_per_byte")) for row in evaluated}


def _rows(folder: Path) -> list[dict[str, Any]]:
    file = folder / "metrics.jsonl"
    return read_metrics(file) if file.exists() else []


def has_diverged(folder: Path) -> bool:
    """Whether a run ended as diverged, or an evaluation of it was not finite."""
    return _status(folder).get("state") == "diverged" or any(
        each.loss is None for each in read_losses(folder).values()
    )


def has_ended(folder: Path, end: int) -> bool:
    """Whether a run finished at step `end` or later with its evaluation, or has diverged."""
    status = _status(folder)
    if status.get("state") == "finished" and status.get("step", 0) >= end:
        return end in read_losses(folder)
    return status.get("state") == "diverged"


def _status(folder: Path) -> dict[str, Any]:
    try:
        status = read_json(folder / "status.json")
    except (OSError, ValueError, RecursionError):
        return {}
    return status if isinstance(status, dict) else {}


def diverged_sizes(ladder: Ladder) -> list[int]:
    """Hidden sizes of which a run at the chosen rate has diverged: their points are left out."""
    if ladder.rate_factor is None:
        return []
    return [
        rung.hidden_size
        for rung in ladder.rungs
        if any(has_diverged(run_folder(ladder, run)) for run in size_runs(rung, ladder.rate_factor))
    ]


def tried_factors(ladder: Ladder) -> list[float]:
    """The factors on the learning rates at which the smallest size has a run, ascending."""
    return [
        factor
        for factor in sorted({*RATE_FACTORS, *RATE_LIMITS})
        if run_folder(ladder, check_runs(ladder.rungs[0], [factor])[0]).is_dir()
    ]


def rate_loss(ladder: Ladder, factor: float) -> float:
    """Loss of the smallest size's shortest training at a rate; infinite if it diverged or has not ended."""
    end = ladder.rungs[0].steps[0]
    folder = run_folder(ladder, check_runs(ladder.rungs[0], [factor])[1])
    losses = read_losses(folder).get(end)
    return math.inf if losses is None or losses.loss is None or has_diverged(folder) else losses.loss


def measured_points(ladder: Ladder) -> list[Point]:
    """The points of all evaluations that the ladder's runs, at the chosen rate, have made so far."""
    left_out = diverged_sizes(ladder)
    return [
        point for rung in ladder.rungs if rung.hidden_size not in left_out for point in _points(ladder, rung)
    ]


def _points(ladder: Ladder, rung: Rung) -> Iterator[Point]:
    """Those of one size: the stable run's after its start, and that at the end of each decay."""
    if ladder.rate_factor is None:
        return
    config = member(ladder.base, rung.hidden_size)
    for run in size_runs(rung, ladder.rate_factor):
        for step, losses in read_losses(run_folder(ladder, run)).items():
            if losses.loss is None or not 0 < step <= run.end or (run.begin and step < run.end):
                continue
            trained = unmeasured_point(config, step, ladder.unique_tokens, decayed=run.begin > 0)
            yield dataclasses.replace(trained, loss=losses.loss, bits_per_byte=losses.bits_per_byte)


def unmeasured_point(config: Config, steps: int, unique_tokens: int, *, decayed: bool) -> Point:
    """A training of `steps` steps as a point, its loss not a number."""
    model, active = config.model, count_parameters(config.model).active
    embedding = (model.vocab_size or 0) * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    tokens = steps * tokens_per_step(config)
    return Point(
        hidden_size=model.hidden_size,
        parameters=active - embedding,
        parameters_with_embedding=active,
        tokens=tokens,
        unique_tokens=unique_tokens,
        flops=flops_per_token(model, config.training.sequence_length) * tokens,
        loss=math.nan,
        bits_per_byte=None,
        decayed=decayed,
    )


def read_speeds(ladder: Ladder) -> dict[int, float]:
    """Hidden size -> median seconds per token of its stable run, without start-up, evaluations and saves."""
    if ladder.rate_factor is None:
        return {}
    stable = [size_runs(rung, ladder.rate_factor)[0] for rung in ladder.rungs]
    speeds = {run.hidden_size: step_seconds(run_folder(ladder, run)) for run in stable}
    return {size: seconds / tokens_per_step(ladder.base) for size, seconds in speeds.items() if seconds}


def step_seconds(folder: Path) -> float | None:
    """Median seconds of a run's step; None before the first row."""
    seconds = [row["perf/step_seconds"] for row in _rows(folder) if row.get("perf/step_seconds")]
    return statistics.median(seconds) if seconds else None


class Used(NamedTuple):
    """What a run has used; steps that were repeated after a kill count once."""

    step: int
    """The last one that has a row."""
    seconds: float
    """From the start of training to the last row of each attempt, without work that was lost."""


def used_by(ladder: Ladder, runs: Iterable[Run]) -> tuple[float, float]:
    """(FLOPs, seconds) that a ladder's runs have used so far; of two with one name the later counts."""
    sizes, found = Sizes(ladder.base), {run.name: (run, read_used(run_folder(ladder, run))) for run in runs}
    flops = sum(
        max(0, used.step - run.begin) * sizes.step_flops(run.hidden_size) for run, used in found.values()
    )
    return flops, math.fsum(used.seconds for _, used in found.values())


def read_used(folder: Path) -> Used:
    """What a run has used so far; nothing before its first row."""
    rows = _rows(folder)
    file = folder / "attempts.jsonl"
    attempts = list(read_rows(file)) if file.exists() else []
    seconds, kept, end = 0.0, math.inf, math.inf
    for attempt in reversed(attempts):
        begin = attempt["time"]
        times = [row["time"] for row in rows if row["step"] <= kept and begin <= row["time"] < end]
        seconds += max(times, default=begin) - begin
        kept, end = min(kept, attempt["step"]), begin
    return Used(rows[-1]["step"] if rows else 0, seconds)
