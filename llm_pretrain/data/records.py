"""A raw record as readers cut it out of a file, and what is said of one that is no document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EMPTY = "empty document"
"""The one cause that is never an error: there is nothing to learn from no text."""

BROKEN = "truncated or damaged file"
UNREADABLE = "unreadable file"
CHANGED = "file changed while it was read"
REPEATED = "file named twice"
TOO_LARGE = "record too large"
NUL = "NUL byte"
NO_TARGET = "no loss token"

RECORD_BYTES = 1 << 27
"""A longer line, element or text file is bad: to tokenise a byte takes 25 bytes of memory, or up to 100."""

_DETAIL = 300
"""Characters of a detail that are shown; a record may bring one of its own size."""


@dataclass(frozen=True, slots=True)
class RawRecord:
    """A record as it lies in a file.

    `data` is a JSON object (`json`), the document's text (`text`), or what is wrong with it (`bad`: the cause
    and, on the next line, the detail). `line` counts lines, rows or elements from 1 and rises within a file;
    it is 0 where the whole file is the record. `source` is the index of the file among all that are read.
    """

    name: str
    line: int
    data: bytes
    kind: Literal["json", "text", "bad"] = "json"
    source: int = 0

    @property
    def location(self) -> str:
        """`file:line`, for messages."""
        return f"{self.name}:{self.line}" if self.line else self.name


class RecordError(Exception):
    """A record that cannot be trained on: `cause` is the kind that is counted, the text says it in full."""

    def __init__(self, cause: str, location: str, detail: str):
        self.cause = cause
        detail = " ".join(detail[: 4 * _DETAIL].split())
        shown = detail if len(detail) <= _DETAIL else f"{detail[:_DETAIL]}…"
        super().__init__(f"{location}: {cause}: {shown}")


def bad_record(name: str, line: int, cause: str, detail: str, source: int = 0) -> RawRecord:
    """A record that stands for what could not be read; `detail` is brought onto one line."""
    text = f"{cause}\n{' '.join(detail.split())}"
    return RawRecord(name, line, text.encode("utf-8", "replace"), "bad", source)
