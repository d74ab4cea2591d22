"""What became of a run's saves, and how many failures in a row training goes on after. It saves nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llm_pretrain.errors import CheckpointError
from llm_pretrain.training.run_folder import RunFolder
from llm_pretrain.training.status import Status

logger = logging.getLogger(__name__)

MAX_FAILED_SAVES = 3
"""Failed saves in a row that end a run; it goes on after fewer, from whose steps nothing can be resumed."""


@dataclass(frozen=True)
class Saved:
    """What became of a save, the same on every rank.

    Args:
        step: The step saved.
        checkpoint: The committed checkpoint; None where there is none.
        failure: Why the checkpoint, or the weights after it, could not be written.
        missing: What there is not because of the failure, for the warning.
    """

    step: int
    checkpoint: Path | None = None
    failure: CheckpointError | None = None
    missing: str = ""


def failed(step: int, error: CheckpointError, missing: str, checkpoint: Path | None = None) -> Saved:
    """A save that failed alike on every rank; what only this one met is raised, and ends the run."""
    if not error.shared:
        raise error
    return Saved(step, checkpoint, error, missing)


class SaveOutcomes:
    """Counts failed saves, warns of them, and lets status.json name what was committed.

    Args:
        folder, status: The run's.
        rank: This process's number; the first one warns.
    """

    def __init__(self, folder: RunFolder, status: Status, *, rank: int):
        self.warn: Callable[[str], None] = logger.warning
        self._folder, self._status, self._rank = folder, status, rank
        self._failures = 0
        self._told = 0

    def take(self, saved: Saved, *, last: bool = False, tried_again: bool = False) -> None:
        """Judge a save; all ranks together.

        Args:
            saved: What became of it.
            last: The run ends with it.
            tried_again: It is followed at once by the run's last save, whose failure would be the error.

        Raises:
            CheckpointError: on every rank, when the last save failed, or too many in a row.
        """
        self.tell(saved)
        if saved.failure is None:
            self._failures = 0
            return
        self._failures += 1
        count = f"failed saves in a row: {self._failures} of {MAX_FAILED_SAVES}"
        if not tried_again and (last or self._failures >= MAX_FAILED_SAVES):
            reason = "training has ended, and its last save must not fail" if last else count
            error = CheckpointError(
                f"{saved.failure}; {reason}; start the same command again once it can be written"
            )
            error.shared = True
            raise error
        if self._rank == 0:
            self.warn(f"not saved, {saved.missing}: {saved.failure}; training goes on ({count})")

    def tell(self, saved: Saved) -> None:
        """Let status.json name a committed checkpoint, once."""
        if saved.checkpoint is None or self._told == saved.step:
            return
        self._told = saved.step
        try:
            self._status.running(saved.step, saved.checkpoint)
        except OSError as error:
            self.warn(f"{self._folder.status} could not be written: {error}")
