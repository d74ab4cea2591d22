"""Documents of token ids in a file of any format, and the files of nanoGPT, llm.c and modded-nanogpt.

Megatron's files are in `megatron_files.py`; turning one into another is in `conversion.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llm_pretrain.errors import DataError

BATCH_TOKENS = 1 << 20
"""Documents are handed on in groups of about this many tokens."""

_HEADER_BYTES = 1024
_HEADERS = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}
"""(magic, version) of a header of 256 int32, whose third number counts the tokens -> their dtype."""


@dataclass(frozen=True)
class DocumentFile:
    """Documents in a file: document d is tokens [offsets[d], offsets[d + 1]) of `tokens`.

    `tokens` is an array that the system reads on demand, of any whole-number dtype; `loss_mask` is bool or
    uint8 of the same length, or None where every token is a target. `name` is for messages.
    """

    name: str
    tokens: np.ndarray
    offsets: np.ndarray
    loss_mask: np.ndarray | None = None

    def batches(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """(ids, lengths, bool loss mask) of groups of documents, in order; no document is empty."""
        offsets = self.offsets
        first = 0
        while first < len(offsets) - 1:
            limit = int(offsets[first]) + BATCH_TOKENS
            last = max(first + 1, int(np.searchsorted(offsets, limit, side="right")) - 1)
            start, stop = int(offsets[first]), int(offsets[last])
            ids = np.asarray(self.tokens[start:stop])
            mask = np.ones(len(ids), dtype=np.bool_)
            if self.loss_mask is not None:
                mask = np.asarray(self.loss_mask[start:stop]).astype(np.bool_)
            lengths = np.diff(offsets[first : last + 1])
            yield ids, lengths[lengths > 0], mask
            first = last


def check_ids(ids: np.ndarray, vocab_size: int, name: str, position: int) -> None:
    """Raises DataError for the first of `ids`, which begin at `position`, outside [0, vocab_size)."""
    if not len(ids) or (int(ids.min()) >= 0 and int(ids.max()) < vocab_size):
        return
    bad = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
    raise DataError(
        f"{name}: expected token ids below {vocab_size}, found {int(ids[bad])} at position "
        f"{position + bad}; were they written with another tokenizer?"
    )


def open_nanogpt(path: Path, end_of_document: int) -> DocumentFile:
    """A `.bin` of uint16 ids, or one with llm.c's header; a document ends with each `end_of_document`.

    What follows the last one is a document too. Raises DataError for a file that is not such a file.
    """
    tokens = _nanogpt_tokens(path)
    ends = [np.zeros(1, dtype=np.int64)]
    for start in range(0, len(tokens), BATCH_TOKENS):
        found = np.flatnonzero(tokens[start : start + BATCH_TOKENS] == end_of_document)
        ends.append(found.astype(np.int64) + start + 1)
    if int(ends[-1][-1] if len(ends[-1]) else -1) != len(tokens):
        ends.append(np.array([len(tokens)], dtype=np.int64))
    return DocumentFile(str(path), tokens, np.concatenate(ends))


def _nanogpt_tokens(path: Path) -> np.ndarray:
    size = _size(path)
    with path.open("rb") as file:
        head = file.read(12)
    header = struct.unpack("<3i", head) if len(head) == 12 else (0, 0, 0)
    magics = {magic for magic, _ in _HEADERS}
    if header[0] not in magics:
        if size == 0 or size % 2:
            raise DataError(f"{path}: expected uint16 token ids, an even number of bytes, found {size} bytes")
        return map_numbers(path, np.dtype("<u2"), 0, size // 2)
    dtype = _HEADERS.get((header[0], header[1]))
    if dtype is None:
        raise DataError(f"{path}: expected llm.c's version 1 or 7 in its header, found version {header[1]}")
    expected = _HEADER_BYTES + header[2] * dtype.itemsize
    if header[2] < 1 or size != expected:
        raise DataError(
            f"{path}: expected {header[2]} tokens as its header says, {expected} bytes, found {size} bytes"
        )
    return map_numbers(path, dtype, _HEADER_BYTES, header[2])


def map_numbers(path: Path, dtype: np.dtype, start: int, count: int) -> np.ndarray:
    """`count` numbers from byte `start` of a file, read on demand."""
    if count == 0:
        return np.zeros(0, dtype=dtype)
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=start, shape=(count,)))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: expected a readable file, found: {error.strerror}") from error


class NanogptWriter:
    """Writes documents as nanoGPT's raw uint16 ids, one after the other. A loss mask has no place in it."""

    def __init__(self, path: Path, vocab_size: int):
        if vocab_size > 1 << 16:
            raise DataError(f"{path}: expected a vocabulary of at most 65536 for uint16, found {vocab_size}")
        self._file = path.open("wb")

    def append(self, ids: np.ndarray, lengths: np.ndarray, loss_mask: np.ndarray) -> None:
        """Adds documents, joined."""
        self._file.write(ids.astype("<u2").tobytes())

    def close(self) -> None:
        """Completes the file."""
        self._file.close()

    abandon = close
