"""metrics.jsonl: one JSON row per line, in full precision, the truth that all else draws from.

Append-only. Whether this process is the one that writes is the caller's business (rank 0 alone does).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from llm_pretrain.errors import CheckpointError, OutputError
from llm_pretrain.files import fsync_folder, make_folder

_EVERY_ROW = {"step", "time"}
"""What stands in every row and measures nothing."""


class MetricsWriter:
    """Appends rows to a metrics file.

    Opening cuts a torn end: a last line without its newline, or last lines that are no JSON object, as
    a killed process or a lost disk cache leaves them.

    Args:
        path: The file; it is made when missing.
        resume_step: Step of the checkpoint that the run goes on from, None for a run from the start.
            Rows of later steps that an earlier attempt left stay in the file; the new rows count.

    Raises:
        OutputError: the file cannot be opened or written.
    """

    def __init__(self, path: Path, *, resume_step: int | None = None):
        self.path = Path(path)
        self.resume_step = resume_step
        try:
            make_folder(self.path.parent)
            is_new = not self.path.exists()
            self.path.touch()
            if is_new:
                fsync_folder(self.path.parent)
            _cut_torn_end(self.path)
            self._file = self.path.open("ab")
        except OSError as error:
            raise OutputError(f"{self.path}: cannot be written: {error.strerror}") from error

    def append(self, row: Mapping[str, Any]) -> None:
        """Writes one row and hands it to the operating system; NaN and infinities become null.

        Args:
            row: `step` and metrics: numbers, text, null, lists, arrays and tensors (as nested lists).

        Raises:
            OutputError: the disk is full or gone.
            ValueError: no `step`, or one before the checkpoint that the run goes on from.
        """
        step = row.get("step")
        if not isinstance(step, int) or step < (self.resume_step or 0):
            raise ValueError(f"a row's step must be an integer from {self.resume_step or 0} on, got {step!r}")
        line = json.dumps(_plain(row), allow_nan=False) + "\n"
        try:
            self._file.write(line.encode())
            self._file.flush()
        except OSError as error:
            raise OutputError(f"{self.path}: cannot write step {step}: {error.strerror}") from error

    def sync(self) -> None:
        """Lets the rows outlive a power cut: before a checkpoint that goes on after them is committed.

        Raises:
            OutputError: the disk is full or gone, or so is the file's name, and nobody will find the rows.
        """
        try:
            os.fsync(self._file.fileno())
            os.stat(self.path)
        except FileNotFoundError:
            raise OutputError(
                f"{self.path}: expected the rows of this run, found no file: it, or its folder, was moved or "
                "deleted; bring it back and start the same command again"
            ) from None
        except OSError as error:
            raise OutputError(f"{self.path}: cannot be completed: {error.strerror}") from error

    def close(self) -> None:
        """Closes the file, its rows on the disk."""
        if self._file.closed:
            return
        try:
            self._file.flush()
            self.sync()
        except OSError as error:
            raise OutputError(f"{self.path}: cannot be completed: {error.strerror}") from error
        finally:
            with suppress(OSError):  # it tries once more to write what could not be written
                self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(
    path: Path, *, convert: Callable[[dict[str, Any]], dict[str, Any]] = dict
) -> list[dict[str, Any]]:
    """The rows of a metrics file, one per step, by step.

    A row of evaluation alone (`eval/…`) joins the row of its step, as do rows of one step that follow
    each other and share no metric. Otherwise, where a step stands twice because a run was repeated from
    a checkpoint, the later row counts.
    A torn last line, which a running process may be writing, is left out.

    Args:
        path: The file.
        convert: Applied to each row as it is read, to keep less of it.

    Raises:
        CheckpointError: the file is missing or a line in its midst is damaged.
    """
    rows: dict[int, dict[str, Any]] = {}
    last = None
    for row in map(convert, read_rows(Path(path))):
        step = row["step"]
        before = rows.get(step, {})
        is_evaluation = all(key in _EVERY_ROW or key.startswith("eval/") for key in row)
        joins = is_evaluation or (step == last and before.keys() & row.keys() <= _EVERY_ROW)
        rows[step] = before | row if joins else row
        last = step
    return [rows[step] for step in sorted(rows)]


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Every row of a file of rows as it was appended, all attempts', without a torn end.

    Raises:
        CheckpointError: the file is missing or a line in its midst is damaged.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    lines = data.split(b"\n")[:-1]  # what follows the last newline is being written, or torn
    while lines and _parse(lines[-1]) is None:
        lines.pop()
    for number, line in enumerate(lines, start=1):
        row = _parse(line)
        if row is None:
            raise CheckpointError(f"{path}:{number}: expected a JSON object with a step, found {line[:40]!r}")
        yield row


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return row if isinstance(step, int) and abs(step) < 1 << 63 else None


def _cut_torn_end(path: Path) -> None:
    """Cuts the file after its last line that is whole; a file without any becomes empty."""
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start, line = _last_line(file, end)
            if line.endswith(b"\n") and _parse(line) is not None:
                break
            end = start
        file.truncate(end)


def _last_line(file: Any, end: int, chunk: int = 1 << 16) -> tuple[int, bytes]:
    """Start and bytes, newline included, of the last line of a file's first `end` bytes."""
    tail = b""
    start = end
    while start:
        size = min(chunk, start)
        start -= size
        file.seek(start)
        tail = file.read(size) + tail
        newline = tail.rfind(b"\n", 0, len(tail) - 1)
        if newline >= 0:
            return start + newline + 1, tail[newline + 1 :]
    return 0, tail


def _plain(value: Any) -> Any:
    """JSON's own types; numbers that JSON does not have become null."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
