"""metrics.jsonl: append-only rows of metrics, one JSON object per line, in full precision."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import accumulate
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from llm_pretrain.errors import CheckpointError, OutputError
from llm_pretrain.files import fsync_folder, make_folder, plain_json, read_plain
from llm_pretrain.text import reason_of

Row = dict[str, Any]

MAX_METRICS_BYTES = 1 << 32
"""Largest metrics file that is read as a whole."""
_EVERY_ROW = {"step", "time"}
"""Keys that every row has and that are no metrics."""


class MetricsWriter:
    """Appends rows to a metrics file; only one process of a run (rank 0) may do so.

    Opening the file cuts a torn end: a last line without its newline, or last lines that are no JSON object,
    as a killed process or a lost disk cache leaves them.

    Args:
        path: The file; created if missing.
        resume_step: Step of the checkpoint from which the run resumes, None for a run from the start.
            Rows of later steps that an earlier attempt wrote stay in the file; the new rows replace them
            when the file is read (`starts` of `read_metrics`).

    Raises:
        OutputError: the file cannot be opened or written.
    """

    def __init__(self, path: Path, *, resume_step: int | None = None):
        self.path = Path(path)
        self.resume_step = resume_step
        try:
            make_folder(self.path.parent)
            self.path.touch()
            fsync_folder(self.path.parent)
            _cut_torn_end(self.path)
            self._file = self.path.open("ab")
        except OSError as error:
            raise OutputError(f"{self.path}: cannot be written: {reason_of(error)}") from error

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row and flush it to the operating system; NaN and infinities become null.

        Args:
            row: `step` and metrics: numbers, text, null, lists, arrays and tensors (as nested lists).

        Raises:
            OutputError: the disk is full or gone.
            ValueError: no `step`, or a step before the checkpoint from which the run resumes.
        """
        step = row.get("step")
        if not isinstance(step, int) or step < (self.resume_step or 0):
            raise ValueError(f"a row's step must be an integer from {self.resume_step or 0} on, got {step!r}")
        line = json.dumps(plain_json(row), allow_nan=False) + "\n"
        try:
            self._file.write(line.encode())
            self._file.flush()
        except OSError as error:
            raise OutputError(f"{self.path}: cannot write step {step}: {error.strerror}") from error

    def sync(self) -> None:
        """Make the rows survive a power cut; called before the next checkpoint is committed.

        Raises:
            OutputError: the disk is full or gone, or the file was moved or deleted.
        """
        try:
            os.fsync(self._file.fileno())
            is_there = os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.path))
        except FileNotFoundError:
            is_there = False
        except OSError as error:
            raise OutputError(f"{self.path}: cannot be completed: {error.strerror}") from error
        if not is_there:
            raise OutputError(
                f"{self.path}: expected the rows of this run, found no file of it: it, or its folder, was "
                "moved, deleted or replaced; bring it back and start the same command again"
            )

    def close(self) -> None:
        """Sync and close the file."""
        if self._file.closed:
            return
        try:
            self.sync()
        finally:
            with suppress(OSError):  # closing retries the write that failed
                self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(
    path: Path,
    *,
    convert: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    starts: Iterable[tuple[int, int]] = (),
) -> list[dict[str, Any]]:
    """The rows of a metrics file, one per step, by step.

    A row with evaluation metrics only (`eval/…`) is merged into the row of its step. So are consecutive rows
    of one step that share no metric. Any other second row of a step replaces the first: the run was repeated
    from a checkpoint.
    A torn last line, which a running process may be writing, is left out.

    Args:
        path: The file.
        convert: Applied to each row as it is read, so that large values can be kept in less memory.
        starts: (size of the file in bytes, number of steps done) at the beginning of each attempt. Rows of
            later steps that precede this place in the file are lost work, which is left out.

    Raises:
        CheckpointError: the file is missing, or a line before the last is damaged.
    """
    rows: dict[int, dict[str, Any]] = {}
    last = None
    for found in without_lost_work(_placed_rows(Path(path)), starts):
        row = convert(found)
        step = row["step"]
        before = rows.get(step, {})
        is_evaluation = all(key in _EVERY_ROW or key.startswith("eval/") for key in row)
        joins = is_evaluation or (step == last and before.keys() & row.keys() <= _EVERY_ROW)
        rows[step] = before | row if joins else row
        last = step
    return [rows[step] for step in sorted(rows)]


def without_lost_work(
    rows: Iterable[tuple[int, dict[str, Any]]], starts: Iterable[tuple[int, int]]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of (byte offset, row) pairs in file order, without lost work (`read_metrics`)."""
    later = sorted(starts, reverse=True)
    lowest = list(accumulate((start for _, start in later), min))
    for offset, row in rows:
        while later and later[-1][0] <= offset:
            later.pop()
        step = row.get("step")
        if not (later and isinstance(step, int) and step > lowest[len(later) - 1]):
            yield row


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Every row of a metrics file, of all attempts, in the order of writing, without a torn end.

    Raises:
        CheckpointError: the file is missing, or a line before the last is damaged.
    """
    return (row for _, row in _placed_rows(path))


def _placed_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (byte offset, row) for each row, in the order of writing."""
    try:
        data = read_plain(path, MAX_METRICS_BYTES)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    lines = data.split(b"\n")[:-1]  # what follows the last newline is being written, or torn
    while lines and parse_row(lines[-1]) is None:
        lines.pop()
    offset = 0
    for number, line in enumerate(lines, start=1):
        row = parse_row(line)
        if row is None:
            raise CheckpointError(f"{path}:{number}: expected a JSON object with a step, found {line[:40]!r}")
        yield offset, row
        offset += len(line) + 1


def parse_row(line: bytes) -> Row | None:
    """The row in a line; None if the line is no JSON object with a step."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return row if isinstance(step, int) and abs(step) < 1 << 63 else None


def readable_rows(
    path: Path,
    problems: list[str],
    parse: Callable[[bytes], Row | None] = parse_row,
    expected: str = "a JSON object with a step",
) -> list[tuple[int, Row]]:
    """(byte offset, row) of each whole line that `parse` accepts; empty if there is no file.

    Every other line is left out and reported in `problems`. A file that cannot be read is reported there too.
    """
    try:
        lines = read_plain(path, MAX_METRICS_BYTES).split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {reason_of(error)}")
        return []
    rows, offset = [], 0
    for number, line in enumerate(lines, start=1):
        if (row := parse(line)) is not None:
            rows.append((offset, row))
        else:
            problems.append(f"{path.name}: line {number}: expected {expected}, found {line[:40]!r}")
        offset += len(line) + 1
    return rows


def rows_of(folder: Path) -> dict[int, Row]:
    """Rows of a run by step; a repeated step has its last row. Empty without a metrics file.

    Raises:
        CheckpointError: a line of the file is damaged.
    """
    file = folder / "metrics.jsonl"
    return {row["step"]: row for row in read_metrics(file)} if file.exists() else {}


def is_training_row(row: Mapping[str, Any]) -> bool:
    """Whether a row has the metrics of an optimizer step, not only those of an evaluation."""
    return "train/loss_tokens" in row


def expert_summary(row: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a row's layers (`moe/layer_N/…`) summarised under `experts/…`; empty if it has none."""
    found: dict[str, list[float]] = {}
    for key, value in row.items():
        if key.startswith("moe/layer_") and finite_number(value) is not None:
            found.setdefault(key.rpartition("/")[2], []).append(value)
    summary: dict[str, float] = {}
    if loads := found.get("load_max"):
        summary["experts/load_max"] = max(loads)
    if dead := found.get("dead_experts"):
        summary["experts/dead"] = sum(dead)
    if entropy := found.get("router_entropy"):
        summary["experts/entropy_mean"] = sum(entropy) / len(entropy)
        summary["experts/entropy_lowest"] = min(entropy)
    return summary


def finite_number(value: object) -> float | None:
    """`value` if it is a finite number within 64 bits (and no bool), else None."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value if abs(value) < 1 << 63 else None  # JSON allows larger integers, arrays do not
    return value if isinstance(value, float) and math.isfinite(value) else None


def _cut_torn_end(path: Path) -> None:
    """Truncate the file after its last whole row; a file without a whole row becomes empty."""
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        if not end:
            return
        with mmap(file.fileno(), 0, access=ACCESS_READ) as content:
            while end:
                start = content.rfind(b"\n", 0, end - 1) + 1
                line = content[start:end]
                if line.endswith(b"\n") and parse_row(line) is not None:
                    break
                end = start
        file.truncate(end)
