"""Reads attempts.jsonl: each start and resume of a run, and which of these attempts trained a step."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llm_pretrain.config.loading import from_dict
from llm_pretrain.config.tree import Config
from llm_pretrain.errors import CheckpointError, ConfigError, PretrainError
from llm_pretrain.launch.jobs import RESUMABLE_PATHS
from llm_pretrain.runs.rows import Row, read_rows


@dataclass(frozen=True)
class Attempt:
    """One start or resume of the run, by its row of attempts.jsonl.

    Args:
        number: From 1.
        start: Number of steps done before the attempt.
        path: Launcher, a key of `SCRIPTS`.
        world_size: Number of processes.
        config: Settings of the attempt; None if they are not on record.
        environment: Versions, hardware and variables, as in a checkpoint's manifest.
        first_byte: Size of metrics.jsonl when the attempt began.
    """

    number: int
    start: int
    path: str
    world_size: int
    config: Config | None
    environment: Mapping[str, str | None] = field(repr=False)
    first_byte: int


def read_attempts(run: Path) -> list[Attempt]:
    """The run's attempts since it last began, from its initial values or from another run's checkpoint.

    Raises:
        ConfigError: `run` is not a run's folder.
        CheckpointError: attempts.jsonl is damaged.
    """
    file = run / "attempts.jsonl"
    if not file.is_file() or not (run / "metrics.jsonl").is_file():
        found = "another folder" if run.is_dir() else "none"
        raise ConfigError(
            f"{run}: expected a run's folder with attempts.jsonl and metrics.jsonl, found {found}"
        )
    attempts: list[Attempt] = []
    for number, row in enumerate(read_rows(file), start=1):
        attempt = _attempt(number, row)
        if attempt is None:
            raise CheckpointError(
                f"{file}:{number}: expected an attempt with step, launcher, world_size and metrics_bytes, "
                f"found {row!s:.60}"
            )
        if attempts and (attempt.start < attempts[0].start or _began_elsewhere(attempt, run, attempts)):
            attempts.clear()  # what was trained before does not lead to the run's end
        attempts.append(attempt)
    if not attempts:
        raise CheckpointError(f"{file}: expected a row for each start of the run, found none")
    return attempts


def _attempt(number: int, row: Row) -> Attempt | None:
    """The attempt that a row of attempts.jsonl describes; None if it describes none."""
    path, size, versions, first = map(row.get, ("launcher", "world_size", "versions", "metrics_bytes"))
    if path not in RESUMABLE_PATHS or not isinstance(versions, dict) or row["step"] < 0:
        return None
    if not isinstance(size, int) or size < 1 or not isinstance(first, int):
        return None
    try:
        config = from_dict(row["config"]) if isinstance(row.get("config"), dict) else None
    except PretrainError:
        config = None  # written by another version
    facts = versions | {"device": row.get("device")}
    return Attempt(number, row["step"], path, size, config, facts, first)


def _began_elsewhere(attempt: Attempt, run: Path, before: Sequence[Attempt]) -> bool:
    """Whether a later attempt began from another run's checkpoint, since the run had none of its own."""
    if attempt.config is None or attempt.config.checkpoint.resume in ("auto", "never"):
        return False
    resume = attempt.config.checkpoint.resume
    if re.fullmatch(r"step-\d+", Path(resume).name) and Path(resume).name != f"step-{attempt.start:08d}":
        return False  # `resume` was not used: the run had checkpoints of its own
    names = {attempt.config.run.folder.name, run.resolve().name}  # the folder may have been moved
    is_own = Path(resume).parent.name == "checkpoints" and Path(resume).parent.parent.name in names
    return not is_own and attempt.start > 0 and all(each.start in (0, attempt.start) for each in before)


def row_starts(attempts: Sequence[Attempt]) -> list[tuple[int, int]]:
    """The attempts as the argument `starts` of `read_metrics`."""
    return [(each.first_byte, each.start) for each in attempts]


def owner_of(step: int, attempts: Sequence[Attempt]) -> Attempt:
    """The attempt that trained a step: the last attempt that began before the step."""
    return next(attempt for attempt in reversed(attempts) if attempt.start < step)
