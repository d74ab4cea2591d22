"""`status.json`: what became of a run, because launchers themselves only say zero or non-zero."""

from __future__ import annotations

import json
import os
from pathlib import Path

from llm_pretrain.errors import (
    EXIT_PREEMPTED,
    CheckpointError,
    DivergedError,
    PretrainError,
    ResourceError,
    StuckError,
)
from llm_pretrain.files import replace_text
from llm_pretrain.training.out_of_memory import is_out_of_memory


def read_status(path: Path) -> dict:
    """The status file's content; empty when there is none or it cannot be read."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def exit_code_of(error: BaseException) -> int:
    """The worker's exit code for an error; 1 for a bug of ours."""
    if isinstance(error, PretrainError):
        return error.exit_code
    if is_out_of_memory(error):
        return ResourceError.exit_code
    return CheckpointError.exit_code if isinstance(error, OSError) else 1


class Status:
    """Writes a run's status file; rank 0 for the run, any rank for its own failure.

    Args:
        path: The file.
        rank, world_size, launcher: Who runs it.
    """

    def __init__(self, path: Path, *, rank: int, world_size: int, launcher: str):
        self.path, self.rank = path, rank
        self._launch = {"launcher": launcher, "world_size": world_size, "pid": os.getpid()}
        before = read_status(path)
        self._progress: dict[str, object] = {
            "step": before.get("step", 0),
            "checkpoint": before.get("checkpoint"),
        }

    @property
    def checkpoint(self) -> object:
        """The newest checkpoint, as the attempt before left it until this one knows better; None without."""
        return self._progress["checkpoint"]

    def started(self) -> None:
        """The attempt begins; until it knows better, the run is where the attempt before left it."""
        if self.rank == 0:
            self._replace("running", None, None)

    def running(self, step: int, checkpoint: Path | None) -> None:
        """The run goes on from `step`; `checkpoint` is its newest."""
        self._progress = {"step": step, "checkpoint": str(checkpoint) if checkpoint else None}
        self.started()

    def ended(self, step: int, exit_code: int, reason: str | None) -> None:
        """The run finished, or was preempted after a clean save."""
        self._progress["step"] = step
        if self.rank == 0:
            self._replace("preempted" if exit_code == EXIT_PREEMPTED else "finished", exit_code, reason)

    def failed(self, error: BaseException) -> None:
        """The run failed. A user-level error of one rank outranks what its loss does to the others."""
        if isinstance(error, PretrainError) and not isinstance(error, StuckError):
            if error.shared and self.rank != 0:
                return
        elif read_status(self.path).get("state") != "running":
            return
        state = "diverged" if isinstance(error, DivergedError) else "failed"
        reason = str(error) or type(error).__name__
        self._replace(state, exit_code_of(error), reason.splitlines()[0])

    def _replace(self, state: str, exit_code: int | None, reason: str | None) -> None:
        """Replace the file atomically, so that a reader sees the old or the new, never half."""
        fields = {"state": state, "exit_code": exit_code, "reason": reason} | self._progress | self._launch
        replace_text(self.path, json.dumps(fields, indent=1) + "\n")
