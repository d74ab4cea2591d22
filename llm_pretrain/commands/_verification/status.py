"""Checks status.json against the rest of the folder. What became of the run is its own to say."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from llm_pretrain.checkpoints import committed_folders
from llm_pretrain.commands._verification.checks import Check, Checks
from llm_pretrain.commands._verification.history import Attempt
from llm_pretrain.commands._verification.rows import is_integer
from llm_pretrain.config import Config
from llm_pretrain.errors import EXIT_PREEMPTED, CheckpointError, DivergedError

_EXIT_CODES = {"finished": 0, "preempted": EXIT_PREEMPTED, "diverged": DivergedError.exit_code}
_STATES = ("running", *_EXIT_CODES, "failed")


def read_status_file(file: Path) -> dict[str, Any]:
    """The content of status.json.

    Raises:
        CheckpointError: it is missing, or not what a run writes.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{file}: expected the run's status, found: {error.strerror or error}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: expected the run's status as JSON, found: {error}") from error
    if not isinstance(content, dict) or content.get("state") not in _STATES:
        found = content.get("state") if isinstance(content, dict) else content
        raise CheckpointError(f"{file}: expected a state of {', '.join(_STATES)}, found {found!r:.40}")
    return content


def ended_at(status: dict[str, Any], config: Config) -> int | None:
    """Step at which a run says that it ended by itself, so that it has a row up to there; None otherwise."""
    if status.get("state") == "finished":
        return config.training.max_steps
    step = status.get("step")
    is_step = is_integer(step) and 0 <= step <= config.training.max_steps  # type: ignore[operator]  # an integer
    return step if status.get("state") == "preempted" and is_step else None


def check_status(
    checks: Checks, folder: Path, status: dict[str, Any], config: Config | None, attempts: list[Attempt]
) -> None:
    """Whether state, exit code, step and checkpoint agree with each other and with the folder.

    Args:
        checks: Takes the outcome.
        folder: The run's.
        status: Content of its status.json.
        config: The run's; None where it cannot be read.
        attempts: With their rows.
    """
    with checks.check("status") as check:
        state, step, name = status["state"], status.get("step"), status.get("checkpoint")
        code = status.get("exit_code")
        check.looked_at = f"{state}, step {step}, exit code {code}"
        expected = _EXIT_CODES.get(state)
        if state == "running":
            check.looked_at += f"; {_alive(status.get('pid'))}"
        if (state == "failed") != (is_integer(code) and code not in _EXIT_CODES.values()) or (
            state != "failed" and code != expected
        ):
            check.fail(f"exit_code: expected {expected if state != 'failed' else 'an error'}, found {code!r}")
        size = status.get("world_size", 1)
        if not is_integer(size) or size < 1:
            check.fail(f"world_size: expected a number of processes, found {size!r:.40}")
        if not is_integer(step) or step < 0:  # type: ignore[operator]  # an integer by then
            check.fail(f"step: expected a whole number of steps, found {step!r:.40}")
            return
        _check_place(check, folder, state, int(step), name)  # type: ignore[arg-type]  # an integer, by the line above
        if state == "finished" and config is not None and step != config.training.max_steps:
            check.fail(f"step: expected training.max_steps {config.training.max_steps}, found {step}")
        rows = attempts[-1].history if attempts else []
        if rows and state in ("finished", "preempted") and rows[-1]["step"] > step:  # type: ignore[operator]  # an integer
            check.fail(f"step: expected {rows[-1]['step']}, the last row's, or later, found {step}")


def _check_place(check: Check, folder: Path, state: str, step: int, name: object) -> None:
    """The checkpoint that status.json names."""
    if name is None:
        if state in ("finished", "preempted"):
            check.fail(f"checkpoint: expected that of step {step}, found none")
        return
    if not isinstance(name, str):
        check.fail(f"checkpoint: expected a path, found {name!r:.40}")
        return
    ended = state in ("finished", "preempted")
    place = folder / "checkpoints" / Path(name).name
    committed = committed_folders(folder / "checkpoints").values()
    if ended and (place.name != f"step-{step:08d}" or place not in committed):
        check.fail(f"checkpoint: expected step-{step:08d} in {place.parent}, found {name}")
    elif state == "running" and place not in committed:
        check.reason = f"{name}, which is another run's, or which the run has deleted meanwhile"
    elif place not in committed and not Path(name).exists():
        check.fail(f"checkpoint: expected a folder, found none at {name}")
    if place in committed:
        check.looked_at += f", {place.name} is there"


def _alive(pid: object) -> str:
    """Whether a run's process still exists; only this machine's can be seen."""
    if not is_integer(pid) or not 0 < pid < 1 << 31:  # type: ignore[operator]  # an integer by then
        return "its process is not on record"
    try:
        os.kill(pid, 0)  # type: ignore[arg-type]  # an integer, by the line above; signal 0 only asks
    except ProcessLookupError:
        return f"process {pid} is not on this machine: killed, or running elsewhere"
    except OSError:
        pass
    return f"process {pid} is there"
