"""Megatron's indexed dataset, read and written: a `.bin` of token ids and an `.idx` that says where they lie.

The layout is that of `megatron.core.datasets.indexed_dataset`. All numbers are little-endian:
`.idx` = magic (9 bytes), version 1 (uint64), dtype code (uint8), number of sequences S (uint64), length D of
the document index (uint64), S lengths (int32), S offsets in bytes into the `.bin` (int64), and D sequence
numbers (int64): 0, and the end of every document. It knows no loss mask; ours lies beside it as a dataset of
its own, `NAME-loss_mask`, of uint8.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from llm_pretrain.data.document_files import DocumentFile, map_numbers
from llm_pretrain.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
MASK_SUFFIX = "-loss_mask"

_VERSION = 1
_FIXED_BYTES = 34
_LEGACY_MAGIC = b"TNTIDX\x00\x00"
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_SMALL_VOCABULARY = 65500
"""Megatron itself writes uint16 below this size, int32 from it on."""


def open_megatron(prefix: Path) -> DocumentFile:
    """`PREFIX.bin` and `PREFIX.idx`, and the loss mask beside them. Raises DataError."""
    data = _open(prefix)
    mask_prefix = prefix.with_name(prefix.name + MASK_SUFFIX)
    if not _file(mask_prefix, ".idx").is_file():
        return data
    mask = _open(mask_prefix)
    if not np.array_equal(mask.offsets, data.offsets):
        raise DataError(
            f"{_file(mask_prefix, '.idx')}: expected the documents of {_file(prefix, '.idx')}, found others"
        )
    return DocumentFile(data.name, data.tokens, data.offsets, mask.tokens)


def _open(prefix: Path) -> DocumentFile:
    index, content = _file(prefix, ".idx"), _file(prefix, ".bin")
    for file, partner in ((index, content), (content, index)):
        if not file.is_file():
            raise DataError(f"{file}: expected it beside {partner.name}, found no such file")
    dtype, lengths, pointers, documents = _read_index(index)
    size = content.stat().st_size
    bounds = np.minimum(pointers, 1 << 62)  # a sum must not overflow
    ends = bounds + lengths.astype(np.int64) * dtype.itemsize
    if len(ends) and (int(pointers.min()) < 0 or int(ends.max()) > size or np.any(pointers % dtype.itemsize)):
        raise DataError(
            f"{content}: expected {int(ends.max())} bytes as {index.name} says, found {size} bytes"
        )
    if int(lengths.sum(dtype=np.int64)) * dtype.itemsize > size:
        raise DataError(
            f"{index}: expected sequences that lie apart in {content.name}, found some that overlap"
        )
    tokens = map_numbers(content, dtype, 0, size // dtype.itemsize)
    edges = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if not np.array_equal(pointers, edges[:-1] * dtype.itemsize):  # sequences in another order than they lie
        starts = pointers // dtype.itemsize
        parts = [tokens[a : a + n] for a, n in zip(starts.tolist(), lengths.tolist(), strict=True)]
        tokens = np.concatenate(parts)
    return DocumentFile(str(content), tokens, edges[documents])


def _read_index(path: Path) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    """(dtype of the tokens, lengths int32, byte offsets int64, document ends int64)."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_FIXED_BYTES)
    if head.startswith(_LEGACY_MAGIC):
        raise DataError(f"{path}: expected Megatron's mmap index, found its older format")
    if not head.startswith(MAGIC) or len(head) < _FIXED_BYTES:
        raise DataError(f"{path}: expected Megatron's index ({MAGIC[:7].decode()}), found another file")
    version, code, sequences, documents = struct.unpack("<QBQQ", head[len(MAGIC) :])
    if version != _VERSION:
        raise DataError(f"{path}: expected version {_VERSION}, found {version}")
    dtype = np.dtype(_DTYPES.get(code, "V1"))
    if dtype.kind not in "iu":
        found = dtype.name if code in _DTYPES else f"code {code}"
        raise DataError(f"{path}: expected token ids of a whole-number dtype, found {found}")
    expected = _FIXED_BYTES + sequences * 12 + documents * 8
    if size not in (expected, expected + sequences):
        raise DataError(
            f"{path}: expected {expected} bytes for {sequences} sequences and {documents} document ends, "
            f"found {size} bytes"
        )
    if size > expected:
        modes = map_numbers(path, np.dtype("i1"), expected, sequences)
        if np.any(modes):
            raise DataError(f"{path}: expected text alone, found a multimodal dataset")
    lengths = map_numbers(path, np.dtype("<i4"), _FIXED_BYTES, sequences)
    pointers = map_numbers(path, np.dtype("<i8"), _FIXED_BYTES + 4 * sequences, sequences)
    ends = map_numbers(path, np.dtype("<i8"), _FIXED_BYTES + 12 * sequences, documents)
    whole = len(ends) and ends[0] == 0 and ends[-1] == sequences and not np.any(np.diff(ends) < 0)
    if not whole or np.any(np.asarray(lengths) < 0):
        raise DataError(f"{path}: expected document ends rising from 0 to {sequences}, found others")
    return dtype, lengths, pointers, ends


def _file(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)


class MegatronWriter:
    """Writes documents as an indexed dataset, one sequence each; a loss mask goes beside it."""

    def __init__(self, prefix: Path, vocab_size: int):
        code = 8 if vocab_size < _SMALL_VOCABULARY else 4
        self._data = _IndexedWriter(prefix, code)
        self._mask = _IndexedWriter(prefix.with_name(prefix.name + MASK_SUFFIX), 1)
        self._masked = 0

    def append(self, ids: np.ndarray, lengths: np.ndarray, loss_mask: np.ndarray) -> None:
        """Adds documents, joined."""
        self._data.append(ids, lengths)
        self._mask.append(loss_mask, lengths)
        self._masked += int(np.count_nonzero(~loss_mask))

    def close(self) -> None:
        """Writes the index; a mask without a masked token is taken away again."""
        self._data.close()
        self._mask.close()
        if not self._masked:
            self._mask.remove()

    def abandon(self) -> None:
        """Closes the files of a dataset that is not wanted."""
        self._data.abandon()
        self._mask.abandon()


class _IndexedWriter:
    def __init__(self, prefix: Path, code: int):
        self._prefix, self._code = prefix, code
        self._dtype = np.dtype(_DTYPES[code])
        self._file = _file(prefix, ".bin").open("wb")
        self._lengths: list[np.ndarray] = []

    def append(self, numbers: np.ndarray, lengths: np.ndarray) -> None:
        if len(lengths) and int(lengths.max()) >= 1 << 31:
            raise DataError(f"{self._file.name}: expected documents below 2^31 tokens, found a longer one")
        self._file.write(np.ascontiguousarray(numbers, dtype=self._dtype).tobytes())
        self._lengths.append(lengths.astype("<i4"))

    def close(self) -> None:
        self._file.close()
        lengths = np.concatenate([np.zeros(0, dtype="<i4"), *self._lengths])
        edges = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]) * self._dtype.itemsize
        with _file(self._prefix, ".idx").open("wb") as index:
            index.write(MAGIC)
            index.write(struct.pack("<QBQQ", _VERSION, self._code, len(lengths), len(lengths) + 1))
            index.write(lengths.tobytes())
            index.write(edges[:-1].astype("<i8").tobytes())
            index.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())

    def abandon(self) -> None:
        self._file.close()

    def remove(self) -> None:
        for suffix in (".bin", ".idx"):
            _file(self._prefix, suffix).unlink()
