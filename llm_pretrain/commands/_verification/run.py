"""All checks of a run's folder, in the order in which one rests on another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llm_pretrain.checkpoints import Manifest
from llm_pretrain.commands._verification.checkpoints import check_checkpoints, check_data, read_manifests
from llm_pretrain.commands._verification.checks import Checks
from llm_pretrain.commands._verification.history import (
    Attempt,
    assign_rows,
    check_settings,
    last_possible_step,
    read_attempts,
    read_config,
)
from llm_pretrain.commands._verification.rows import check_rows
from llm_pretrain.commands._verification.samples import check_samples
from llm_pretrain.commands._verification.status import check_status, ended_at, read_status_file
from llm_pretrain.commands._verification.weights import check_weights
from llm_pretrain.config import Config
from llm_pretrain.errors import CheckpointError, ConfigError
from llm_pretrain.tracking import read_rows

_MARKS = ("config.yaml", "metrics.jsonl", "status.json", "attempts.jsonl", "checkpoints")


def verify_run(checks: Checks, folder: Path, samples: str | int | None) -> None:
    """Checks a finished, stopped or running run from its files; nothing is written.

    Args:
        checks: Takes the outcomes.
        folder: The run's.
        samples: Rows whose samples are assembled again: `all`, a number, or None for some seconds' worth.

    Raises:
        ConfigError: there is no such folder, or it is no run's.
    """
    if not folder.is_dir() or not any((folder / name).exists() for name in _MARKS):
        found = "another folder" if folder.is_dir() else "none"
        raise ConfigError(f"{folder}: expected a run's folder, such as runs/NAME, found {found}")
    status: dict[str, Any] = {}
    with checks.check("status.json") as check:
        status = read_status_file(folder / "status.json")
        check.looked_at = f"state {status['state']}"
    config: Config | None = None
    with checks.check("config.yaml") as check:
        size = status.get("world_size")
        world_size = size if isinstance(size, int) and size > 0 else 1  # `status` names what is none
        config = read_config(folder / "config.yaml", world_size)
        check.looked_at = "every setting is known and none contradicts another"
    manifests = read_manifests(folder / "checkpoints")
    attempts = _read_history(checks, folder, status, config, manifests)
    expected = None
    if config is None:
        with checks.check("everything else") as check:
            check.skip("it rests on config.yaml")
    else:
        expected = check_data(checks, config, manifests)
        if attempts:
            check_settings(checks, folder, config, attempts)
            check_rows(checks, attempts, config, ended=ended_at(status, config))
        if attempts and expected is not None:
            check_samples(checks, attempts, config, samples)
        else:
            with checks.check("samples") as check:
                check.skip("the rows or the stores cannot be read")
        needed = status.get("state") in ("finished", "preempted")
        place = folder / "checkpoints"
        sound = check_checkpoints(checks, place, config, expected, attempts, needed=needed)
        tokenizer = expected["tokenizer"] if expected else None
        check_weights(checks, folder / "weights", config, attempts, manifests, sound, tokenizer)
    if status:
        check_status(checks, folder, _newest_status(folder, status), config, attempts)


def _read_history(
    checks: Checks,
    folder: Path,
    status: dict[str, Any],
    config: Config | None,
    manifests: dict[int, Manifest],
) -> list[Attempt]:
    """The attempts with their rows; empty where the files cannot be read, or are not there yet."""
    attempts: list[Attempt] = []
    with checks.check("rows") as check:
        file = folder / "metrics.jsonl"
        if not file.exists() and status.get("state") not in ("finished", "preempted") and not manifests:
            check.skip("the run has not come to its first row yet")
            return []
        # Before the attempts: the attempt of each row is then among them. Tables of experts are large.
        rows = [
            {key: value for key, value in row.items() if not isinstance(value, list)}
            for row in read_rows(file)
        ]
        attempts = read_attempts(folder / "attempts.jsonl")
        if strange := [row["step"] for row in rows if row["step"] < 0 or isinstance(row["step"], bool)]:
            raise CheckpointError(f"{file}: expected steps from 0 on, found {strange[0]}")
        last = last_possible_step(attempts, config)
        if late := [
            step for step in [*(r["step"] for r in rows), *(a.start for a in attempts)] if step > last
        ]:
            raise CheckpointError(f"{file}: expected steps up to training.max_steps {last}, found {late[0]}")
        assign_rows(attempts, rows, folder / "checkpoints")
        check.looked_at = f"{len(rows)} rows by {len(attempts)} attempts, all JSON"
    return attempts if not check.problems else []


def _newest_status(folder: Path, before: dict[str, Any]) -> dict[str, Any]:
    """A running run has gone on while it was read."""
    if before["state"] != "running":
        return before
    try:
        return read_status_file(folder / "status.json")
    except CheckpointError:
        return before
