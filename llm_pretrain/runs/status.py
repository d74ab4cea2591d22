"""status.json: how a run stands or how it ended, replaced atomically."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from llm_pretrain.config.schema import matches_type
from llm_pretrain.errors import (
    EXIT_PREEMPTED,
    CheckpointError,
    ConfigError,
    DataError,
    DivergedError,
    MismatchError,
    OutputError,
    PretrainError,
    ResourceError,
    StuckError,
    printable,
)
from llm_pretrain.files import object_or_empty, replace_text
from llm_pretrain.launch.out_of_memory import is_out_of_memory
from llm_pretrain.launch.watchdog import heartbeat
from llm_pretrain.runs.record import REPLAYS_FILE, difference_lines, read_replays, replay_status, this_host


def read_status(path: Path) -> dict[str, Any]:
    """The content of a status file; empty if there is none or it cannot be read."""
    return object_or_empty(path)


def _is_fault(fault: object) -> bool:
    """Whether `fault`, read from the status file, has the entries that this module reads."""
    return isinstance(fault, dict) and matches_type(int, fault.get("step")) and "transient" in fault


def exit_code_of(error: BaseException) -> int:
    """The process's exit code for an error; 1 for a bug."""
    if isinstance(error, PretrainError):
        return error.exit_code
    if is_out_of_memory(error):
        return ResourceError.exit_code
    return CheckpointError.exit_code if isinstance(error, OSError) else 1


class Status:
    """Writes a run's `status.json`: rank 0 for the run, any rank for its own failure.

    Args:
        path: The file.
        rank, world_size, launcher: How this process was launched.
        check: Called before every write; raises OutputError if the folder is no longer this run's.
    """

    def __init__(
        self,
        path: Path,
        *,
        rank: int,
        world_size: int,
        launcher: str,
        check: Callable[[], None] = lambda: None,
    ):
        self.path, self.rank, self._check = path, rank, check
        self._launch: dict[str, object] = {"launcher": launcher, "world_size": world_size}
        self._launch |= {"pid": os.getpid(), "host": this_host()}
        self._before = before = read_status(path)
        self.unfinished = before.get("state") == "running"
        """Whether the previous attempt ended without recording how, for example because it was killed."""
        self._progress: dict[str, object] = {
            "step": before.get("step", 0),
            "checkpoint": before.get("checkpoint"),
        }
        checked, faults = before.get("checked"), before.get("faults")
        self.checked = checked if isinstance(checked, int) else None
        """The last step that passed `training.check_every`'s check; None before the first."""
        self.faults: list[dict[str, Any]] = [*filter(_is_fault, faults)] if isinstance(faults, list) else []
        """What the checks of all attempts have found, oldest first; see `resumed` for `undone` ones."""

    @property
    def checkpoint(self) -> object:
        """Path of the newest checkpoint, or None; the previous attempt's until `resumed` is called."""
        return self._progress["checkpoint"]

    def started(self) -> None:
        """Record that an attempt begins, at the previous attempt's step."""
        self._write_running()

    def resumed(self, step: int, checkpoint: Path | None) -> None:
        """Record that this attempt computes all steps after `step`, even if an earlier attempt has done so.

        These steps no longer count as checked. Faults in these steps that ended an attempt become `undone`.
        """
        if self.checked is not None:
            self.checked = min(self.checked, step) or None
        for fault in self.faults:
            if fault["step"] > step and not fault["transient"]:
                fault["undone"] = True
        self.running(step, checkpoint)

    def running(self, step: int, checkpoint: Path | None) -> None:
        """Record that the run is at `step`, with `checkpoint` as its newest."""
        self._progress = {"step": step, "checkpoint": str(checkpoint) if checkpoint else None}
        self._write_running()

    def ended(self, step: int, exit_code: int, reason: str | None, loss: float | None = None) -> None:
        """Record that the run finished, or was preempted after a clean save; `loss` is the last step's."""
        self._progress |= {"step": step, "loss": loss}
        if self.rank == 0:
            self._replace("preempted" if exit_code == EXIT_PREEMPTED else "finished", exit_code, reason)

    def add_fault(self, fault: dict[str, Any]) -> None:
        """Record what a check has found; called on all ranks."""
        self.faults.append(fault)
        with suppress(OutputError, OSError):  # the next write has the fault too
            self._write_running()

    def findings(self) -> list[str]:
        """Problems that checks and replays have found so far; a run that finishes gives them as `reason`."""
        found = []
        if faults := [fault for fault in self.faults if not fault.get("undone")]:
            number, last = len(faults), faults[-1]["step"]
            found.append(f"silent data corruption was found in {number} of its checks, last at step {last}")
        if lines := difference_lines(read_replays(self.path.parent)):
            found.append(f"a replay does not give what it trained: {lines[-1]}")
        return found

    def failed(self, error: BaseException) -> None:
        """Record a failure.

        Rank 0 records an error that all ranks raise; a rank records a `PretrainError` that it alone raises.
        A lost or hanging peer (StuckError) and a bug are recorded only if no rank has recorded a failure yet.
        A finished run that refuses to start again, for its settings or data, stays finished.
        """
        if isinstance(error, PretrainError) and not isinstance(error, StuckError):
            if error.shared and self.rank != 0:
                return
        elif read_status(self.path).get("state") != "running":
            return
        state = "diverged" if isinstance(error, DivergedError) else "failed"
        lines = error.lines() if isinstance(error, PretrainError) else str(error).splitlines()
        before = self._before.get("state"), self._before.get("step")
        is_refusal = isinstance(error, ConfigError | DataError | MismatchError)
        with suppress(OutputError):  # another run's folder: its status is not ours
            if is_refusal and before == ("finished", self._progress["step"]):
                self._check()
                return replace_text(self.path, json.dumps(self._before, indent=1) + "\n")
            self._replace(state, exit_code_of(error), printable(next(iter(lines), type(error).__name__)))

    def _write_running(self) -> None:
        if self.rank == 0:
            self._replace("running", None, None)

    def _replace(self, state: str, exit_code: int | None, reason: str | None) -> None:
        """Replace the file atomically."""
        heartbeat()  # does not return once the watchdog has recorded how this process ends
        self._check()
        fields = {"state": state, "exit_code": exit_code, "reason": reason} | self._progress | self._launch
        if self.checked is not None or self.faults:
            fields |= {"checked": self.checked, "faults": self.faults}
        fields |= replay_status(read_replays(self.path.parent))
        replace_text(self.path, json.dumps(fields, indent=1) + "\n")


def record_replay(folder: Path, replay: Mapping[str, Any]) -> None:
    """Append a replay to a run's `replays.jsonl`, and update `status.json` if the run has ended.

    A run that has not ended updates `status.json` at its next write.

    Raises:
        OSError: the folder cannot be written.
    """
    file = folder / REPLAYS_FILE
    line = json.dumps(replay, default=str) + "\n"
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    with open(os.open(file, flags, 0o666), "ab", buffering=0) as stream:
        stream.write(line.encode())  # in one write, or lines of two calls may mix
        os.fsync(stream.fileno())
    status = folder / "status.json"
    with suppress(Timeout), FileLock(folder / ".lock", blocking=False):
        content = read_status(status)
        if content.get("state") not in (None, "running"):
            replace_text(status, json.dumps(content | replay_status(read_replays(folder)), indent=1) + "\n")
