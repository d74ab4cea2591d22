"""Sees from outside how far a run is: its rows, and the temporary folders that mean that it saves.

Reads only, and often; what follows from it is decided elsewhere.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDERS = ("checkpoints", "weights")
"""Where a run commits folders, inside of its own."""
_WRITTEN = re.compile(r"\.step-(\d+)\.tmp-.*")
_LEFT = re.compile(r"\.(?:step-\d+|best)\.(?:tmp|old|replaced)-.*")


@dataclass
class Timing:
    """Seconds that things take, for delays and limits; from the reference run, then from attempts.

    Args:
        start_up: Launcher to seconds from its start to the first row; the shortest seen.
        step, save, evaluation: Of one each.
        longest_gap: Between two rows, whatever was done meanwhile.
    """

    start_up: dict[str, float] = field(default_factory=dict)
    step: float = 0.05
    save: float = 0.05
    evaluation: float = 0.0
    longest_gap: float = 0.0

    def started(self, path: str, seconds: float) -> None:
        """An attempt's first row was there after so many seconds."""
        self.start_up[path] = min(seconds, self.start_up.get(path, seconds))

    def of_start_up(self, path: str) -> float:
        """Seconds that a start-up takes, at least; for a launcher not seen yet, another's."""
        return self.start_up.get(path) or min(self.start_up.values(), default=4.0)


def timing_of(rows: Mapping[int, Mapping[str, Any]], save_steps: int, eval_steps: int) -> Timing:
    """What a run's rows tell by the times at which they were written."""
    times = {step: row["time"] for step, row in rows.items() if step >= 1 and "time" in row}
    gaps = {step: times[step] - times[step - 1] for step in times if step - 1 in times}
    after_save = {step for step in gaps if save_steps and (step - 1) % save_steps == 0}
    evaluated = {step for step in gaps if eval_steps and step % eval_steps == 0}
    plain = [gap for step, gap in gaps.items() if step not in after_save | evaluated]
    timing = Timing()
    if plain:
        timing.step = statistics.median(plain)
    if seconds := [gaps[step] - timing.step for step in after_save - evaluated]:
        timing.save = max(0.01, statistics.median(seconds))
    if seconds := [gaps[step] - timing.step for step in evaluated - after_save]:
        timing.evaluation = max(0.0, statistics.median(seconds))
    timing.longest_gap = max(gaps.values(), default=0.0)
    return timing


class Watch:
    """What one attempt has done so far.

    Args:
        folder: The run's own folder; need not exist.
    """

    def __init__(self, folder: Path):
        self.folder, self.started = folder, time.monotonic()
        self.last_step: int | None = None
        self.first_row_after: float | None = None
        self._metrics = folder / "metrics.jsonl"
        self._offset = self._metrics.stat().st_size if self._metrics.exists() else 0
        self._before = set(leftovers(folder))
        self._partial = b""

    def look(self) -> None:
        """Take in rows that were written since the last look."""
        try:
            size = self._metrics.stat().st_size
        except FileNotFoundError:
            return
        if size < self._offset:  # a torn end was cut
            self._offset, self._partial = size, b""
        if size == self._offset:
            return
        with self._metrics.open("rb") as file:
            file.seek(self._offset)
            written = file.read()
        self._offset += len(written)
        *lines, self._partial = (self._partial + written).split(b"\n")
        for step in filter(None, map(_trained_step, lines)):
            self.last_step = step
            if self.first_row_after is None:
                self.first_row_after = time.monotonic() - self.started

    def saving(self) -> int | None:
        """Step of what this attempt is writing right now; None where nothing is."""
        steps = [
            int(match[1])
            for name in leftovers(self.folder)
            if name not in self._before and (match := _WRITTEN.fullmatch(os.path.basename(name)))
        ]
        return max(steps, default=None)

    def left(self) -> list[str]:
        """Temporary folders of this attempt."""
        return [name for name in leftovers(self.folder) if name not in self._before]


def leftovers(folder: Path) -> list[str]:
    """Folders of a run that are being written, or were when it died: `checkpoints/.step-…` and the like."""
    found = []
    for parent in FOLDERS:
        try:
            names = os.listdir(folder / parent)
        except OSError:
            continue
        found += [f"{parent}/{name}" for name in names if _LEFT.fullmatch(name)]
    return sorted(found)


def _trained_step(line: bytes) -> int | None:
    """Step of a row of training; None for evaluation alone, and for what is no row."""
    row = parse_row(line)
    return row["step"] if row and is_training(row) else None


def parse_row(line: bytes) -> dict[str, Any] | None:
    """A line as a row; None where it is none."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def is_training(row: Mapping[str, Any]) -> bool:
    """Whether a row is of an optimizer step, and not of an evaluation alone."""
    return "train/loss_tokens" in row


def training_steps(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Steps of the rows of training, in the order in which they were written."""
    return [row["step"] for row in rows if is_training(row)]
