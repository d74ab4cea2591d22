"""Counts over all documents of a preparation, which can be taken up again after a kill.

Files in the work folder hold what is too large for its state: the validation text and, for finding
duplicates, the keys of the documents seen.
"""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llm_pretrain.data.encoding import EncodedBatch
from llm_pretrain.data.hashed_file import StaleStateError

HASHES = 1 << 64
ZLIB_LIMIT = 64 << 20
"""zlib's bits per byte are taken over at most this much of the validation text, from its beginning."""

_COUNTS = ("documents", "altered", "duplicates", "lowest", "highest", "validation_documents")


class Totals:
    """Use as a context manager, which closes the files.

    Attributes: `documents` (stored), `altered` (of these, those whose tokens do not give their text back),
    `duplicates` (left out), `skipped` (records by cause), `entries` (documents per input).
    """

    def __init__(self, folder: Path, inputs: int, state: dict[str, Any] | None = None):
        self.documents = self.altered = self.duplicates = self.validation_documents = 0
        self.lowest, self.highest = HASHES, -1
        self.skipped: Counter[str] = Counter()
        self.entries = [0] * inputs
        if state is not None:
            for name in _COUNTS:
                setattr(self, name, state[name])
            self.skipped.update(state["skipped"])
            self.entries = list(state["entries"])
        self._text = _KeptFile(folder / "validation-text", None if state is None else state["text"])
        try:
            self._keys = _KeptFile(folder / "document-keys", None if state is None else state["keys"])
        except StaleStateError:
            self._text.close()
            raise

    def __enter__(self) -> Totals:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files."""
        self._text.close()
        self._keys.close()

    def add(self, batch: EncodedBatch, entries: np.ndarray, duplicates: int, *, keep_keys: bool) -> None:
        """Counts a batch without its `duplicates`; `entries` [documents] is the input of each document."""
        self.skipped += batch.skipped
        self.duplicates += duplicates
        self.documents += len(batch.lengths)
        self.altered += int(np.count_nonzero(batch.altered))
        self.entries = (self.entries + np.bincount(entries, minlength=len(self.entries))).tolist()
        if len(batch.hashes):
            self.lowest = min(self.lowest, int(batch.hashes.min()))
            self.highest = max(self.highest, int(batch.hashes.max()))
        self.validation_documents += len(batch.texts)
        for text in batch.texts:
            self._text.write(text[: max(0, ZLIB_LIMIT - self._text.bytes)])
        if keep_keys:
            self._keys.write(batch.keys.tobytes())

    def state(self) -> dict[str, Any]:
        """What another one needs to go on from here; the files are on disk then."""
        return {
            **{name: getattr(self, name) for name in _COUNTS},
            "skipped": dict(self.skipped),
            "entries": self.entries,
            "text": self._text.sync(),
            "keys": self._keys.sync(),
        }

    def keys(self) -> np.ndarray:
        """uint64 keys of all documents that were added with theirs."""
        return np.frombuffer(b"".join(self._keys.content()), dtype=np.uint64)

    def other_threshold(self, threshold: int) -> int | None:
        """A threshold that leaves neither split empty, where this one did and another can."""
        if threshold == 0 or self.lowest == self.highest:
            return 0 if threshold and self.validation_documents else None
        if self.validation_documents == 0:
            return self.lowest + 1
        return self.highest if self.validation_documents == self.documents else None

    def zlib_bits_per_byte(self) -> float | None:
        """Of the validation text at level 9; None without any."""
        size, packed = self._text.bytes, 0
        if not size:
            return None
        compressor = zlib.compressobj(9)
        for data in self._text.content():
            packed += len(compressor.compress(data))
        return 8 * (packed + len(compressor.flush())) / size

    def causes(self) -> str:
        """` (left out: 2 invalid JSON)`, or an empty string."""
        if not self.skipped:
            return ""
        parts = (f"{count} {cause}" for cause, count in sorted(self.skipped.items()))
        return f" (left out: {', '.join(parts)})"


class _KeptFile:
    """A file to append to and to read back, with what another one's `sync` returned; it checks that."""

    def __init__(self, path: Path, kept: Sequence[int] | None):
        self.bytes = self._check = 0
        if kept is None:
            self._file = path.open("w+b")
            return
        if not path.is_file():
            raise StaleStateError(path)
        self._file = path.open("r+b")
        self._file.truncate(kept[0])
        for data in self.content():
            self._count(data)
        if [self.bytes, self._check] != list(kept):
            self._file.close()
            raise StaleStateError(path)

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._count(data)

    def _count(self, data: bytes) -> None:
        self.bytes += len(data)
        self._check = zlib.crc32(data, self._check)

    def content(self) -> Iterator[bytes]:
        """All of it; writing goes on behind its end."""
        self._file.seek(0)
        while data := self._file.read(1 << 20):
            yield data

    def sync(self) -> tuple[int, int]:
        """Brings everything onto the disk; returns what tells that it is all there."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self.bytes, self._check

    def close(self) -> None:
        self._file.close()
