"""The folder of a run: its paths, its lock, and its id."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from llm_pretrain.errors import OutputError
from llm_pretrain.files import MARKER, fsync_folder, make_folder, read_marker, remove_leftovers, write_marker
from llm_pretrain.runs.status import read_status
from llm_pretrain.text import reason_of

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

    def acquire(self, newest_run_id: Callable[[Path], str | None]) -> str:
        """Create and lock the folder; returns the run's id, which is a new one if the folder has none.

        Args:
            newest_run_id: Returns, for a folder of checkpoints, the id of the run that wrote the newest one:
                empty if that checkpoint has no id, None if there is no checkpoint.

        Raises:
            OutputError: the folder cannot be written, another run has locked it, or the run would replace a
                file in it that no run has written.
        """
        try:
            make_folder(self.path)
            self._refuse_links_and_pipes()
            self._lock.acquire(blocking=False)
            self.run_id = self._own_id(newest_run_id(self.checkpoints))
            remove_leftovers(self.path, (*RUN_FILES, MARKER))
        except Timeout:
            pid = read_status(self.status).get("pid", "unknown")
            raise OutputError(
                f"{self.path}: expected a folder no other run uses, found it locked by a running one "
                f"(process {pid}); wait for it or choose another run.name"
            ) from None
        except OSError as error:
            raise OutputError(
                f"{self.path}: expected a writable folder, found: {reason_of(error)}; set run.output_dir"
            ) from None
        return self.run_id

    def check(self) -> None:
        """Check that the folder is still this run's; does nothing before `run_id` is known.

        Raises:
            OutputError: the folder was moved or deleted, or belongs to another run now.
            OSError: the marker cannot be read.
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
        """Refuse pipes, a foreign `.lock`, and links: through a link the run would write elsewhere."""
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

    def _own_id(self, newest: str | None) -> str:
        """The run's id: from the marker, else `newest` (the newest checkpoint's), else a new one.

        Raises:
            OutputError: there is no marker, and a file that the run would replace was not written by a run.
        """
        marker = read_marker(self.path, "run")
        if marker is not None and isinstance(marker.get("id"), str):
            return marker["id"]
        files = (MARKER, *RUN_FILES)
        found = [name for name in files if (self.path / name).exists() and not (self.path / name).is_dir()]
        found += [name for name in RUN_FOLDERS if _has_entries(self.path / name)]
        if found and newest is None:
            raise OutputError(
                f"{self.path / found[0]}: expected nothing, or a file that a run wrote, found another file; "
                "choose another run.name or run.output_dir"
            )
        run_id = newest or uuid.uuid4().hex
        write_marker(self.path, "run", id=run_id)
        fsync_folder(self.path)  # before the run writes any other file
        return run_id


def _has_entries(path: Path) -> bool:
    """Whether `path` is a file, a link, or a folder that is not empty."""
    return any(path.iterdir()) if path.is_dir() else os.path.lexists(path)
