"""A run's folder: its paths, its lock. Only rank 0 holds the lock."""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock, Timeout

from llm_pretrain.errors import OutputError
from llm_pretrain.files import make_folder, remove_leftovers
from llm_pretrain.training.status import read_status


class RunFolder:
    """Paths of a run, and the lock that keeps a second run out of them."""

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
        self._lock = FileLock(path / ".lock")

    def stacks(self, rank: int) -> Path:
        """Where the watchdog of a rank leaves the stacks of a hang."""
        return self.path / f"stacks-rank{rank}.txt"

    def acquire(self) -> None:
        """Create the folder and lock it.

        Raises:
            OutputError: it cannot be written, or another run holds it.
        """
        try:
            make_folder(self.path)
            self._lock.acquire(blocking=False)
            remove_leftovers(self.path)
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

    def release(self) -> None:
        """Let another run in."""
        self._lock.release()
