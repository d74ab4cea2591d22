"""What a ladder's runs have measured: from their metrics.jsonl to points and speeds."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

from llm_pretrain.config import Config
from llm_pretrain.ladder.family import member
from llm_pretrain.ladder.points import RUNS_FOLDER, Ladder, Point, Rung
from llm_pretrain.model import count_parameters, flops_per_token
from llm_pretrain.tracking import read_metrics


def stable_run(hidden_size: int, factor: float) -> str:
    """Name of a size's run at a constant rate, `factor` times the base's."""
    return f"h{hidden_size}-x{factor:g}"


def decay_run(hidden_size: int, factor: float, steps: int) -> str:
    """Name of the decay that ends a training of `steps` steps."""
    return f"{stable_run(hidden_size, factor)}-{steps}"


def tokens_per_step(config: Config) -> int:
    """Positions of a step's batch, padding included."""
    return config.training.global_batch_size * config.training.sequence_length


def read_losses(folder: Path) -> dict[int, tuple[float | None, float | None]]:
    """Step -> (loss in nats per token, bits per byte) of a run's evaluations; a loss that is not finite is
    None. Empty before the first row.

    Raises:
        CheckpointError: a line of metrics.jsonl is damaged.
    """
    file = folder / "metrics.jsonl"
    rows = read_metrics(file) if file.exists() else []
    return {
        row["step"]: (row["eval/loss"], row.get("eval/bits_per_byte")) for row in rows if "eval/loss" in row
    }


def measured_points(ladder: Ladder) -> list[Point]:
    """The points of all evaluations that the ladder's runs, at the chosen rate, have made so far."""
    if ladder.rate_factor is None:
        return []
    return [
        _point(ladder, rung, step, losses, decayed=decayed)
        for rung in ladder.rungs
        for step, losses, decayed in _evaluations(ladder, rung)
        if losses[0] is not None
    ]


def _evaluations(ladder: Ladder, rung: Rung) -> Iterator[tuple[int, tuple[float | None, float | None], bool]]:
    """(step, losses, whether after the decay) of a size's finished evaluations."""
    factor, runs = ladder.rate_factor, ladder.folder / RUNS_FOLDER
    assert factor is not None
    for step, losses in read_losses(runs / stable_run(rung.hidden_size, factor)).items():
        if 0 < step <= rung.branches[-1]:
            yield step, losses, False
    for steps in rung.steps:
        losses = read_losses(runs / decay_run(rung.hidden_size, factor, steps))
        if steps in losses:
            yield steps, losses[steps], True


def _point(
    ladder: Ladder, rung: Rung, step: int, losses: tuple[float | None, float | None], *, decayed: bool
) -> Point:
    config = member(ladder.base, rung.hidden_size)
    model, tokens, active = (
        config.model,
        step * tokens_per_step(config),
        count_parameters(config.model).active,
    )
    embedding = (model.vocab_size or 0) * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    assert losses[0] is not None
    return Point(
        hidden_size=rung.hidden_size,
        parameters=active - embedding,
        parameters_with_embedding=active,
        tokens=tokens,
        unique_tokens=ladder.unique_tokens,
        flops=flops_per_token(model, config.training.sequence_length) * tokens,
        loss=losses[0],
        bits_per_byte=losses[1],
        decayed=decayed,
    )


def read_speeds(ladder: Ladder) -> dict[int, float]:
    """Hidden size -> median seconds per token of its stable run, without start-up, evaluations and saves."""
    speeds: dict[int, float] = {}
    if ladder.rate_factor is None:
        return speeds
    for rung in ladder.rungs:
        folder = ladder.folder / RUNS_FOLDER / stable_run(rung.hidden_size, ladder.rate_factor)
        file = folder / "metrics.jsonl"
        rows = read_metrics(file) if file.exists() else []
        if seconds := [row["perf/step_seconds"] for row in rows if row.get("perf/step_seconds")]:
            speeds[rung.hidden_size] = statistics.median(seconds) / tokens_per_step(ladder.base)
    return speeds
