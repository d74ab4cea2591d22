"""A run as it goes on: rows of metrics.jsonl as they arrive, and what they say about speed and trouble.

Only what is new is read, and at first only the file's end: a run of a million steps opens at once. Curves
over the whole run are the report's business.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from llm_pretrain.tracking.run_files import Row, RunRecord, is_run_folder, number, read_run

TAIL_BYTES = 4 << 20
"""How much of a file's end is read at first."""
ROWS = 5000
"""Rows that are kept."""
RATE_ROWS = 50
"""Rows over which the rate is measured."""
STALLED_SECONDS = 60.0
"""A running run without a row for longer, and for ten times its usual, is worth a warning."""


class FollowedRun:
    """One run's folder, read again and again; it need not exist yet.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path):
        self.path = path
        self.record = RunRecord(path, path.resolve().name)
        self.rows: list[Row] = []
        self.exists = False
        self._metrics = path / "metrics.jsonl"
        self._offset: int | None = None
        self._damaged = 0

    @property
    def state(self) -> str:
        """The run's state in a word; `waiting` before there is anything."""
        if not self.exists:
            return "waiting"
        return str(self.record.status.get("state") or "unknown")

    @property
    def ended(self) -> bool:
        """Whether nothing more will come of this attempt."""
        return self.state not in ("waiting", "running", "unknown")

    def refresh(self) -> None:
        """Reads what is new; a file that is missing or being written is no matter."""
        self.exists = is_run_folder(self.path)
        if not self.exists:
            return
        self.record = read_run(self.path, metrics=False)
        try:
            self._read_new_rows()
        except OSError as error:
            self.record.problems.append(f"{self._metrics.name} cannot be read: {error.strerror}")
        if self._damaged:
            self.record.problems.append(f"{self._metrics.name}: {self._damaged} damaged lines are left out")

    def last(self, key: str) -> Any:
        """The newest value of a metric that is not null, with its rows searched backwards."""
        return next((row[key] for row in reversed(self.rows) if row.get(key) is not None), None)

    def values(self, key: str) -> list[float]:
        """The numbers of a metric, oldest first."""
        return [value for row in self.rows if (value := number(row.get(key))) is not None]

    def step(self) -> int:
        """Optimizer steps done, as far as is known."""
        told = self.record.status.get("step")
        known = [self.rows[-1]["step"]] if self.rows else []
        return max([*known, told if isinstance(told, int) else 0])

    def seconds_left(self) -> float | None:
        """At the rate of this attempt's last rows; None where there is no rate or no end."""
        most, seconds = self.record.number("training", "max_steps"), self._seconds_per_step()
        return None if most is None or seconds is None else max(0.0, most - self.step()) * seconds

    def warnings(self, now: float | None = None) -> list[str]:
        """What wants attention, newest first."""
        found = []
        if (reason := self.record.status.get("reason")) and self.ended:
            found.append(str(reason))
        age = self.age(now)
        usual = (self._seconds_per_step() or 0.0) * 10 * (self.record.number("logging", "logging_steps") or 1)
        if self.state == "running" and age is not None and age > max(STALLED_SECONDS, usual):
            found.append(f"no row of metrics for {age:.0f} s: it evaluates, saves, hangs or is gone")
        skipped = [row for row in self.rows if row.get("train/skipped")]
        found += [f"step {row['step']} was skipped: {row['train/skipped']}" for row in skipped[:-4:-1]]
        if len(skipped) > 3:
            found.append(f"{len(skipped)} steps were skipped in the last {len(self.rows)} rows")
        return found + self.record.problems

    def age(self, now: float | None = None) -> float | None:
        """Seconds since the newest row."""
        newest = number(self.rows[-1].get("time")) if self.rows else None
        return None if newest is None else max(0.0, (time.time() if now is None else now) - newest)

    def _seconds_per_step(self) -> float | None:
        starts = [number(attempt.get("time")) for attempt in self.record.attempts[-1:]]
        start = starts[0] if starts and starts[0] is not None else 0.0
        timed = [
            (row["step"], when)
            for row in self.rows[-RATE_ROWS:]
            if (when := number(row.get("time"))) is not None and when >= start
        ]
        if len(timed) > 1 and timed[-1][0] > timed[0][0]:
            return (timed[-1][1] - timed[0][1]) / (timed[-1][0] - timed[0][0])
        return number(self.last("perf/step_seconds"))

    def _read_new_rows(self) -> None:
        if not self._metrics.exists():
            return
        size = self._metrics.stat().st_size
        if self._offset is None or size < self._offset:  # a resumed run has cut a torn line
            self.rows, self._damaged = [], 0
            self._offset = max(0, size - TAIL_BYTES)
        with self._metrics.open("rb") as file:
            file.seek(self._offset)
            data = file.read(size - self._offset)
        whole = data.rfind(b"\n") + 1
        lines = data[:whole].split(b"\n")[:-1]
        if self._offset == size - TAIL_BYTES and size > TAIL_BYTES and not self.rows:
            lines = lines[1:]  # it began in the midst of a line
        self._offset += whole
        for line in lines:
            self._add(line)
        del self.rows[:-ROWS]

    def _add(self, line: bytes) -> None:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            self._damaged += 1
            return
        while self.rows and self.rows[-1]["step"] > row["step"]:
            self.rows.pop()  # a resumed run takes these steps again
        if self.rows and self.rows[-1]["step"] == row["step"]:
            row = self.rows.pop() | row
        self.rows.append(row)


def runs_in(path: Path) -> list[Path]:
    """The run folders directly in a folder, by name; empty where there are none."""
    try:
        return sorted(each for each in path.iterdir() if each.is_dir() and is_run_folder(each))
    except OSError:
        return []
