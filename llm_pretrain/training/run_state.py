"""State of a run besides model and optimizer: its counters, its folder and its status file."""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from llm_pretrain.checkpoints.manifest import newest_manifest
from llm_pretrain.config.schema import matches_type
from llm_pretrain.errors import (
    EXIT_PREEMPTED,
    CheckpointError,
    DivergedError,
    OutputError,
    PretrainError,
    ResourceError,
    StuckError,
    printable,
)
from llm_pretrain.files import (
    MARKER,
    fsync_folder,
    make_folder,
    read_json,
    read_marker,
    remove_leftovers,
    replace_text,
    write_marker,
)
from llm_pretrain.launch.out_of_memory import is_out_of_memory
from llm_pretrain.launch.watchdog import heartbeat
from llm_pretrain.runs.replays import REPLAYS_FILE, difference_lines, read_replays, replay_status
from llm_pretrain.training.anomaly import SpikeDetector
from llm_pretrain.training.step import DIGEST_WORDS, StepMetrics


@dataclass(frozen=True)
class Best:
    """The lowest evaluation loss so far.

    Args:
        step: Optimizer steps done when it was found.
        loss: `eval/loss`.
        max_batches: `evaluation.max_batches` then; losses over other batches cannot be compared.
    """

    step: int
    loss: float
    max_batches: int | None


@dataclass
class Progress:
    """Counters of a run, the same on every rank.

    Args:
        step: Optimizer steps done, skipped ones included.
        tokens_seen: Loss tokens of all steps so far.
        skipped_in_a_row: Skipped steps since the last one that moved the parameters.
        digest: Sums of the sample digests' eight words since the last row.
        wandb_id: Id of the run at Weights & Biases, which a resumed run continues.
        pending_evaluation: Whether a stop signal ended this step's evaluation; the resumed run repeats it.
        evaluation: Metrics `eval/…` of the last evaluation, for the model card.
        evaluation_step: Its step; None before the first.
        best: The evaluation of the weights in `weights/best`; None without any.
        spikes: The detector, with the history that later steps are compared with.
    """

    step: int = 0
    tokens_seen: int = 0
    skipped_in_a_row: int = 0
    digest: list[int] = field(default_factory=lambda: [0] * DIGEST_WORDS)
    wandb_id: str | None = None
    pending_evaluation: bool = False
    evaluation: dict[str, float] = field(default_factory=dict)
    evaluation_step: int | None = None
    best: Best | None = None
    spikes: SpikeDetector = field(default_factory=SpikeDetector)

    def advance(self, num_loss_tokens: int) -> None:
        """Count one finished step."""
        self.step += 1
        self.tokens_seen += num_loss_tokens

    def update(self, step: StepMetrics) -> None:
        """Add a finished step whose metrics are on the host; called in the order of the steps."""
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if step.skipped else 0
        self.digest = [a + b for a, b in zip(self.digest, step.digest, strict=True)]
        if step.loss is not None:
            assert isinstance(step.grad_norm, float)
            self.spikes.record(step.loss, step.grad_norm, step.num_loss_tokens, step.spike)

    def evaluated(self, metrics: Mapping[str, float | None]) -> None:
        """Keep this step's evaluation, for the model card."""
        self.evaluation = {
            name: value
            for name, value in metrics.items()
            if isinstance(value, float) and math.isfinite(value)
        }
        self.evaluation_step = self.step

    def take_digest(self) -> list[int]:
        """The digest since the last call, which is then reset."""
        digest, self.digest = self.digest, [0] * DIGEST_WORDS
        return digest

    def extra(self) -> dict[str, object]:
        """The fields for `RunFacts.extra` in a checkpoint's manifest, as plain JSON."""
        return {
            "skipped_in_a_row": self.skipped_in_a_row,
            "digest": self.digest,
            "evaluation_owed": self.pending_evaluation,
            "best": asdict(self.best) if self.best else None,
            "evaluation": self.evaluation,
            "evaluation_step": self.evaluation_step,
            "spikes": self.spikes.state_dict(),
        }

    @staticmethod
    def wrong_extra(extra: Mapping[str, object]) -> str | None:
        """A line about the first value in a manifest's `extra` that no run saves; None if there is none."""
        for name, (kind, is_sound) in _EXTRA.items():
            if name not in extra:
                return f"run.extra.{name}: expected what a run saves, found none"
            value = extra[name]
            if not matches_type(kind, value) or (value is not None and not is_sound(value)):
                return f"run.extra.{name}: expected what a run saves, found {value!r:.60}"
        return None

    @classmethod
    def resumed(cls, step: int, tokens_seen: int, wandb_id: str | None, extra: dict) -> Progress:
        """The progress of a checkpoint with this `extra()`."""
        return cls(
            step=step,
            tokens_seen=tokens_seen,
            skipped_in_a_row=extra["skipped_in_a_row"],
            digest=extra["digest"],
            wandb_id=wandb_id,
            pending_evaluation=extra["evaluation_owed"],
            best=Best(**extra["best"]) if extra["best"] else None,
            evaluation=extra["evaluation"],
            evaluation_step=extra["evaluation_step"],
            spikes=SpikeDetector.from_state_dict(extra["spikes"]),
        )


def _is_history(spikes: dict) -> bool:
    """Whether this is a state of `SpikeDetector`, with three numbers for each step."""
    steps: Any = spikes.get("steps")
    return (
        matches_type(int, spikes.get("in_a_row"))
        and matches_type(list[list[float]], steps)
        and all(len(step) == 3 for step in steps)
    )


def _is_best(best: dict) -> bool:
    """Whether these are the fields of `Best`."""
    return best.keys() == {"step", "loss", "max_batches"} and None not in (best["step"], best["loss"])


_EXTRA: dict[str, tuple[Any, Callable[[Any], bool]]] = {
    "skipped_in_a_row": (int, lambda count: count >= 0),
    "digest": (list[int], lambda words: len(words) == DIGEST_WORDS),
    "evaluation_owed": (bool, lambda _: True),
    "best": (dict[str, float | None] | None, _is_best),
    "evaluation": (dict[str, float], lambda _: True),
    "evaluation_step": (int | None, lambda _: True),
    "spikes": (dict, _is_history),
}
"""Key of `RunFacts.extra` -> its type and a check of its value."""


def read_status(path: Path) -> dict:
    """The content of a status file; empty if there is none or it cannot be read."""
    try:
        content = read_json(path)
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _is_fault(fault: object) -> bool:
    """Whether it has what is read of a fault of an earlier attempt."""
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
        rank, world_size, launcher: Of this process.
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
        self._launch = {"launcher": launcher, "world_size": world_size, "pid": os.getpid()}
        before = read_status(path)
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
        """The newest checkpoint, of the previous attempt until `resumed` is called; None without one."""
        return self._progress["checkpoint"]

    def started(self) -> None:
        """Record that an attempt begins, at the previous attempt's step."""
        self._write_running()

    def resumed(self, step: int, checkpoint: Path | None) -> None:
        """Record that this attempt computes the steps after `step`, also those that were computed before.

        Those are no longer checked, and faults of theirs that ended an attempt are undone.
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

    def ended(self, step: int, exit_code: int, reason: str | None) -> None:
        """Record that the run finished, or was preempted after a clean save."""
        self._progress["step"] = step
        if self.rank == 0:
            self._replace("preempted" if exit_code == EXIT_PREEMPTED else "finished", exit_code, reason)

    def add_fault(self, fault: dict[str, Any]) -> None:
        """Record what a check has found; called on all ranks."""
        self.faults.append(fault)
        with suppress(OutputError, OSError):  # the next write has it too
            self._write_running()

    def findings(self) -> list[str]:
        """What checks and replays have found wrong with the run so far; a run that finishes says so."""
        found = []
        if faults := [fault for fault in self.faults if not fault.get("undone")]:
            number, last = len(faults), faults[-1]["step"]
            found.append(f"silent data corruption was found in {number} of its checks, last at step {last}")
        if lines := difference_lines(read_replays(self.path.parent)):
            found.append(f"a replay does not give what it trained: {lines[-1]}")
        return found

    def failed(self, error: BaseException) -> None:
        """Record a failure.

        An error that all ranks raise is recorded by rank 0, and one rank's own `PretrainError` by that rank.
        A lost or hanging peer (StuckError) and a bug are recorded only if no rank has recorded a failure yet.
        """
        if isinstance(error, PretrainError) and not isinstance(error, StuckError):
            if error.shared and self.rank != 0:
                return
        elif read_status(self.path).get("state") != "running":
            return
        state = "diverged" if isinstance(error, DivergedError) else "failed"
        lines = error.lines() if isinstance(error, PretrainError) else str(error).splitlines()
        with suppress(OutputError):  # another run's folder: its status is not ours
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
    """Append to a run's `replays.jsonl`, and take it into `status.json` once the run has ended.

    A run that has not ended takes it in at its next write.

    Raises:
        OSError: the folder cannot be written.
    """
    file = folder / REPLAYS_FILE
    line = json.dumps(replay, default=str) + "\n"
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    with open(os.open(file, flags, 0o666), "ab", buffering=0) as stream:
        stream.write(line.encode())  # at once, or lines of two calls may mix
        os.fsync(stream.fileno())
    status = folder / "status.json"
    with suppress(Timeout), FileLock(folder / ".lock", blocking=False):
        content = read_status(status)
        if content.get("state") not in (None, "running"):
            replace_text(status, json.dumps(content | replay_status(read_replays(folder)), indent=1) + "\n")


RUN_FILES = ("config.yaml", "metrics.jsonl", "samples.jsonl", "status.json", "attempts.jsonl", "report.html")
"""Files that a run writes and replaces in its folder."""
RUN_FOLDERS = ("checkpoints", "weights")
"""Folders in which a run writes steps and deletes old ones."""
TRACKER_FOLDERS = ("tensorboard", "wandb")


class RunFolder:
    """Paths in the folder of a run, the lock against a second run in it, and the run's id in its marker.

    The folder may be moved, and another run may start in its place. So `check` is called before every write.
    """

    def __init__(self, path: Path):
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples.jsonl"
        self.status = path / "status.json"
        self.attempts = path / "attempts.jsonl"
        self.report = path / "report.html"
        self.checkpoints = path / "checkpoints"
        self.weights = path / "weights"
        self.run_id: str | None = None
        self._lock = FileLock(path / ".lock")

    def stacks(self, rank: int) -> Path:
        """The file for the thread stacks of a rank that hangs."""
        return self.path / f"stacks-rank{rank}.txt"

    def acquire(self) -> str:
        """Create the folder, lock it, and return the run's id: that in its marker, or a new one.

        Raises:
            OutputError: it cannot be written, another run has locked it, or a file in it that the run would
                replace was not written by a run.
        """
        try:
            make_folder(self.path)
            self._refuse_links_and_pipes()
            self._lock.acquire(blocking=False)
            self.run_id = self._own_id()
            remove_leftovers(self.path, (*RUN_FILES, MARKER))
        except Timeout:
            pid = read_status(self.status).get("pid", "unknown")
            raise OutputError(
                f"{self.path}: expected a folder no other run uses, found it locked by a running one "
                f"(process {pid}); wait for it or choose another run.name"
            ) from None
        except OSError as error:
            raise OutputError(
                f"{self.path}: expected a writable folder, found: {error.strerror or error}; "
                "set run.output_dir"
            ) from None
        return self.run_id

    def check(self) -> None:
        """Check that the folder is still this run's; does nothing before `run_id` is known.

        Raises:
            OutputError: it was moved or deleted, or belongs to another run now.
            OSError: its marker cannot be read.
        """
        if self.run_id is None:
            return
        marker = read_marker(self.path, "run")
        if marker is None or marker.get("id") != self.run_id:
            raise OutputError(
                f"{self.path}: expected this run's folder, found {'another run' if marker else 'none'}: it "
                "was moved, deleted or replaced; bring it back and start the same command again"
            )

    def release(self) -> None:
        """Release the lock."""
        self._lock.release()

    def _refuse_links_and_pipes(self) -> None:
        """Refuse pipes, a foreign `.lock`, and links, through which the run would write elsewhere."""
        for name in (MARKER, ".lock", *RUN_FILES, *RUN_FOLDERS, *TRACKER_FOLDERS):
            path = self.path / name
            if path.is_symlink():
                raise OutputError(
                    f"{path}: expected a file or folder of the run, found a link, which a run "
                    "does not follow; replace it by what it leads to, or set run.output_dir"
                )
            if path.exists() and not path.is_file() and not path.is_dir():
                raise OutputError(
                    f"{path}: expected a file or folder of the run, found a pipe, a socket or a device; "
                    "delete it, or set run.output_dir"
                )
        lock = self.path / ".lock"
        if lock.exists() and not (lock.is_file() and lock.stat().st_size == 0):
            raise OutputError(
                f"{lock}: expected a run's lock, an empty file, found another; choose another run.name"
            )

    def _own_id(self) -> str:
        """The run's id: that in the marker, else the newest checkpoint's, else a new one.

        Raises:
            OutputError: there is no marker, and a file that the run would replace was not written by a run.
        """
        marker = read_marker(self.path, "run")
        if marker is not None and isinstance(marker.get("id"), str):
            return marker["id"]
        files = (MARKER, *RUN_FILES)
        found = [name for name in files if (self.path / name).exists() and not (self.path / name).is_dir()]
        found += [name for name in RUN_FOLDERS if _has_entries(self.path / name)]
        checkpoint = newest_manifest(self.checkpoints)
        if found and checkpoint is None:
            raise OutputError(
                f"{self.path / found[0]}: expected nothing, or a file that a run wrote, found another file; "
                "choose another run.name or run.output_dir"
            )
        run_id = (checkpoint.run.run_id if checkpoint else None) or uuid.uuid4().hex
        write_marker(self.path, "run", id=run_id)
        fsync_folder(self.path)  # before the run writes any other file
        return run_id


def _has_entries(path: Path) -> bool:
    """Whether there is a file, a link or a folder that is not empty at `path`."""
    return any(path.iterdir()) if path.is_dir() else os.path.lexists(path)
