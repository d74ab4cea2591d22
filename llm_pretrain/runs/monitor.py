"""Reads a run's folder while the run writes to it: the newest row, and the step that is being saved."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from llm_pretrain.runs.folder import RUN_FOLDERS
from llm_pretrain.runs.rows import Row, is_training_row, parse_row

_SAVE_IN_PROGRESS = re.compile(r"\.step-(\d+)\.tmp-.*")
_TEMPORARY_FOLDER = re.compile(r"\.(?:step-\d+|best)\.(?:tmp|old|replaced)-.*")


class RunMonitor:
    """Follows a run from outside: the rows and temporary folders that appear after its construction.

    Args:
        folder: The run's output folder; it may not exist yet.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.last_step: int | None = None
        self._metrics, self._attempts = folder / "metrics.jsonl", folder / "attempts.jsonl"
        self._attempts_size = _size(self._attempts)
        self._offset = _size(self._metrics)
        self._old_folders = set(temporary_folders(folder))

    @property
    def has_begun(self) -> bool:
        """Whether the run has recorded the step at which it begins; its first step follows."""
        return _size(self._attempts) > self._attempts_size

    def update(self) -> list[Row]:
        """Read the rows that were appended since the last call."""
        self._offset = min(self._offset, _size(self._metrics))  # a resumed run removes a torn last line
        if not self._metrics.exists():
            return []
        with self._metrics.open("rb") as file:
            file.seek(self._offset)
            written = file.read().rpartition(b"\n")
        self._offset += len(written[0] + written[1])
        rows = [row for line in written[0].split(b"\n") if (row := parse_row(line)) is not None]
        self.last_step = next((row["step"] for row in reversed(rows) if is_training_row(row)), self.last_step)
        return rows

    def step_being_saved(self) -> int | None:
        """Step of the checkpoint or weights that the run is writing; None while it writes none."""
        matches = (_SAVE_IN_PROGRESS.fullmatch(os.path.basename(name)) for name in self.temporary_folders())
        return max((int(match[1]) for match in matches if match), default=None)

    def temporary_folders(self) -> list[str]:
        """Temporary folders that did not exist when this object was made."""
        return [name for name in temporary_folders(self.folder) if name not in self._old_folders]


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def temporary_folders(folder: Path) -> list[str]:
    """Uncommitted folders of a run, relative to it: `checkpoints/.step-…` and the like."""
    found = []
    for parent in RUN_FOLDERS:
        with suppress(OSError):
            names = os.listdir(folder / parent)
            found += [f"{parent}/{name}" for name in names if _TEMPORARY_FOLDER.fullmatch(name)]
    return sorted(found)
