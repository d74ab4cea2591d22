"""Packs documents into sequences of S inputs and S labels, and stores the packing index of large splits.

A document of L tokens has L - 1 targets. A piece with t targets takes t positions: its inputs are tokens
[start, start + t) and its labels tokens [start + 1, start + t + 1). Pieces of a split document thus overlap
by one token. Every token is a target exactly once per epoch, except the first token of a document.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from filelock import FileLock, Timeout

from llm_pretrain.data.store import TokenStore, sample_digest
from llm_pretrain.text import reason_of


@dataclass(frozen=True)
class PackedIndex:
    """The pieces of each of N sequences.

    `piece_start` int64 [P]: first input token of each piece, counted in the split; `piece_length` int32 [P]:
    its number of targets; `sequence_offsets` int64 [N + 1]: sequence n has pieces [offsets[n], offsets[n +
    1]). Index files use the smallest types that fit: widen the arrays before computing.
    """

    piece_start: np.ndarray
    piece_length: np.ndarray
    sequence_offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.sequence_offsets) - 1


def pack(offsets: np.ndarray, sequence_length: int, packing: str) -> PackedIndex:
    """Packs the documents whose tokens are [offsets[d], offsets[d + 1]) into sequences of `sequence_length`.

    `best_fit` splits only documents longer than a sequence and wastes almost nothing; `concat` fills
    sequences in turn and splits documents where a sequence ends; `pad` gives each piece its own sequence.
    """
    starts = np.asarray(offsets[:-1], dtype=np.int64)
    targets = np.diff(np.asarray(offsets, dtype=np.int64))
    targets -= 1
    kept = targets > 0
    if not kept.all():
        starts, targets = starts[kept], targets[kept]
    del kept  # arrays of a large store have millions of entries
    if packing == "concat":
        return _concat(starts, targets, sequence_length)
    piece_start, piece_length = _split_long(starts, targets, sequence_length)
    if packing == "pad":
        return PackedIndex(piece_start, piece_length, np.arange(len(piece_start) + 1))
    if packing == "best_fit":
        sequence = best_fit_decreasing(piece_length, sequence_length)
        order = np.argsort(sequence, kind="stable")  # within a sequence: corpus order
        return PackedIndex(piece_start[order], piece_length[order], _cumulative(np.bincount(sequence)))
    raise ValueError(f"unknown packing {packing!r}")


def _cumulative(counts: np.ndarray) -> np.ndarray:
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def _split_long(starts: np.ndarray, targets: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts every document into pieces of `length` targets and a shorter last one."""
    pieces = -(-targets // length)
    first = _cumulative(pieces)[:-1]
    first *= length
    done = np.arange(0, int(pieces.sum()) * length, length)
    done -= np.repeat(first, pieces)  # targets of the document in its earlier pieces
    del first
    piece_length = np.repeat(targets, pieces)
    piece_length -= done
    np.minimum(piece_length, length, out=piece_length)
    piece_length = piece_length.astype(np.int32)
    done += np.repeat(starts, pieces)
    return done, piece_length


def _concat(starts: np.ndarray, targets: np.ndarray, length: int) -> PackedIndex:
    """Cuts the targets of all documents, as one stream, at the ends of documents and of sequences."""
    edges = _cumulative(targets)
    total = int(edges[-1])
    cuts = np.sort(np.concatenate([edges, np.arange(0, total, length)]), kind="stable")  # merges two runs
    cuts = cuts[np.concatenate([[True], cuts[1:] > cuts[:-1]])]
    begin = cuts[:-1]
    document = np.searchsorted(edges, begin, side="right") - 1
    piece_start = starts[document] + begin - edges[document]
    counts = np.bincount(begin // length, minlength=-(-total // length))
    return PackedIndex(piece_start, np.diff(cuts).astype(np.int32), _cumulative(counts))


def best_fit_decreasing(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Puts pieces into bins by best-fit decreasing: largest first, each into the fullest bin with room.

    Pieces of one size are placed together, and bins of equal free room are filled together: O(P + distinct
    sizes · distinct rooms). `sizes` [P] are in 1..capacity. Returns the bin of each piece, integers [P]; bins
    are numbered in the order in which they are opened.
    """
    small = np.uint16 if capacity < 1 << 16 else np.int64  # uint16 sorts faster, in less memory
    order = np.argsort((capacity - sizes).astype(small), kind="stable")
    number = np.int32 if len(sizes) < 1 << 31 else np.int64
    bins = np.empty(len(sizes), dtype=number)
    distinct, counts = np.unique(sizes, return_counts=True)
    rooms = _Rooms(capacity)
    placed = opened = 0
    for size, total in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        count = total
        while count:
            room = rooms.tightest(size)
            if room is None:
                room, per_bin = capacity, capacity // size
                fresh = -(-count // per_bin)
                candidates = np.arange(opened, opened + fresh, dtype=number)
                opened += fresh
            else:
                candidates, per_bin = rooms.pop(room), room // size
            full = min(len(candidates), count // per_bin)
            rest = count - full * per_bin if full < len(candidates) else 0
            chosen = np.repeat(candidates[:full], per_bin)
            if rest:
                chosen = np.append(chosen, np.full(rest, candidates[full]))
                rooms.put(room - rest * size, candidates[full : full + 1])
            rooms.put(room - per_bin * size, candidates[:full])
            rooms.put(room, candidates[full + bool(rest) :])
            bins[order[placed : placed + len(chosen)]] = chosen
            placed += len(chosen)
            count -= len(chosen)
    return bins


class _Rooms:
    """Open bins, grouped by free room; bit r of `_occurring` says whether some bin has free room r."""

    def __init__(self, capacity: int):
        self._bins: list[list[np.ndarray]] = [[] for _ in range(capacity + 1)]
        self._occurring = 0

    def tightest(self, size: int) -> int | None:
        fitting = self._occurring >> size
        return size + (fitting & -fitting).bit_length() - 1 if fitting else None

    def pop(self, room: int) -> np.ndarray:
        self._occurring &= ~(1 << room)
        groups, self._bins[room] = self._bins[room], []
        return groups[0] if len(groups) == 1 else np.concatenate(groups)

    def put(self, room: int, bins: np.ndarray) -> None:
        if room and len(bins):
            self._bins[room].append(bins)
            self._occurring |= 1 << room


FOLDER = "index"
"""Subfolder of a store with its index files; they can be deleted at any time."""

IN_MEMORY = 1 << 17
"""Splits of fewer documents are packed in memory (in hundredths of a second) and have no index file."""

_FORMAT = "llm_pretrain packing index 2"
"""Must change with the file layout and with every change of the result of `pack`."""
_HEADER_BYTES = 4096
_WHOLE = 256 << 20
"""Opening hashes files up to this many bytes completely, and sampled blocks of larger files."""
_LOCK_SECONDS = 600.0

_log = logging.getLogger("llm_pretrain")
_verified: set[tuple[Any, ...]] = set()


class _BrokenError(Exception):
    """An index file is damaged or belongs to another store."""


class StoredIndex(PackedIndex):
    """An index in a file. Pickling keeps only its arguments; the receiving process opens the file again."""

    def __init__(self, arguments: tuple[TokenStore, str, int, str], arrays: tuple[np.ndarray, ...]):
        super().__init__(*arrays)
        object.__setattr__(self, "_arguments", arguments)

    def __reduce__(self):
        return packed_index, self._arguments  # type: ignore[attr-defined]


def packed_index(store: TokenStore, split: str, sequence_length: int, packing: str) -> PackedIndex:
    """The packing of a split (see `pack`). Large splits have an index file, built once and memory-mapped.

    The file is in the store's `index` folder, or in the user's cache folder if the store is read-only; if
    neither is writable, the split is packed in memory. The content is a pure function of the store, so ranks
    that build it concurrently agree.
    """
    documents = store.split(split)
    if documents.documents < IN_MEMORY:
        return pack(documents.offsets, sequence_length, packing)
    arguments = (store, split, sequence_length, packing)
    name = f"{split}-{packing}-{sequence_length}.bin"
    reason = ""
    cache = _cache_folder()
    for folder in (store.path / FOLDER, *([cache / store.hash] if cache else [])):
        try:
            return _opened_or_built(folder / name, arguments)
        except OSError as error:
            reason = reason or reason_of(error)
    _log.warning("%s: packed in memory, as its index cannot be written: %s", store.path / FOLDER, reason)
    return pack(documents.offsets, sequence_length, packing)


def _cache_folder() -> Path | None:
    """The user's cache folder; None for a user without a home folder, as in some containers."""
    base = Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"))
    return base / "llm_pretrain" / FOLDER if base.is_absolute() else None


def _opened_or_built(file: Path, arguments: tuple[TokenStore, str, int, str]) -> PackedIndex:
    if file.is_file():
        with suppress(_BrokenError):
            return _opened(file, arguments)
    file.parent.mkdir(parents=True, exist_ok=True)
    with _locked(file):
        if file.is_file():  # built meanwhile by another process, or damaged
            try:
                return _opened(file, arguments)
            except _BrokenError as error:
                _log.warning("%s: built anew: %s", file, error)
        _build(file, arguments)
        try:
            return _opened(file, arguments)
        except _BrokenError as error:
            raise OSError(f"{file}: {error}") from error


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """One process builds while the others wait; on file systems without locks, every process builds."""
    lock = FileLock(file.parent / f".{file.name}.lock")
    try:
        lock.acquire(timeout=_LOCK_SECONDS)
    except (Timeout, NotImplementedError):
        yield
        return
    try:
        yield
    finally:
        lock.release()


def _facts(arguments: tuple[TokenStore, str, int, str]) -> dict[str, Any]:
    """Identifies what the index was built from."""
    store, split, sequence_length, packing = arguments
    return {
        "format": _FORMAT,
        "store": store.hash,
        "split": split,
        "sequence_length": sequence_length,
        "packing": packing,
    }


def _build(file: Path, arguments: tuple[TokenStore, str, int, str]) -> None:
    store, split, sequence_length, packing = arguments
    for left in file.parent.glob(f".{file.name}.tmp-*"):  # left by a killed process
        left.unlink(missing_ok=True)
    index = pack(store.split(split).offsets, sequence_length, packing)
    counts = {"pieces": len(index.piece_start), "sequences": len(index)}
    temporary = file.parent / f".{file.name}.tmp-{uuid.uuid4().hex[:8]}"
    try:
        with temporary.open("w+b") as stream:
            stream.write(bytes(_HEADER_BYTES))
            columns = index.piece_start, index.sequence_offsets, index.piece_length
            for column, (dtype, _) in zip(columns, _layout(arguments, **counts), strict=True):
                stream.write(np.ascontiguousarray(column, dtype=dtype).data)
            stream.flush()
            header = _facts(arguments) | counts | {"digest": _digest(stream)}
            stream.seek(0)
            stream.write(json.dumps(header).encode())
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def _layout(
    arguments: tuple[TokenStore, str, int, str], pieces: int, sequences: int
) -> list[tuple[str, int]]:
    """Types and lengths of piece_start, sequence_offsets and piece_length, in file order after the header.

    These are the smallest types that fit: short sequences cut 10^9 tokens into tens of millions of pieces.
    """
    store, split, sequence_length, _ = arguments
    start = "<u4" if store.split(split).tokens < 1 << 32 else "<i8"
    offset = "<u4" if pieces < 1 << 32 else "<i8"
    length = "<u2" if sequence_length < 1 << 16 else "<i4"
    return [(start, pieces), (offset, sequences + 1), (length, pieces)]


def _digest(stream: BinaryIO) -> str:
    """SHA-256 of the content after the header, or of sampled blocks of it."""
    size = stream.seek(0, os.SEEK_END)
    if size > _WHOLE:
        return sample_digest(stream, size - _HEADER_BYTES, start=_HEADER_BYTES)
    stream.seek(_HEADER_BYTES)
    digest = hashlib.sha256()
    while block := stream.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def _opened(file: Path, arguments: tuple[TokenStore, str, int, str]) -> PackedIndex:
    """Opens and verifies an index file. Raises _BrokenError."""
    with file.open("rb") as stream:
        try:
            header = json.loads(stream.read(_HEADER_BYTES).rstrip(b"\0"))
            found = {name: header[name] for name in _facts(arguments)}
            pieces, sequences = int(header["pieces"]), int(header["sequences"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise _BrokenError("its header is damaged") from error
        if found != _facts(arguments):
            raise _BrokenError("it belongs to another store or version")
        layout = _layout(arguments, pieces, sequences)
        status = os.fstat(stream.fileno())
        expected = _HEADER_BYTES + sum(np.dtype(dtype).itemsize * count for dtype, count in layout)
        if min(pieces, sequences) < 0 or status.st_size != expected:
            raise _BrokenError(f"expected {expected} bytes, found {status.st_size}")
        key = (str(file.resolve()), status.st_ino, status.st_size, status.st_mtime_ns, header.get("digest"))
        if key not in _verified:
            if _digest(stream) != header.get("digest"):
                raise _BrokenError("its contents are altered")
            _verified.add(key)
        arrays, offset = [], _HEADER_BYTES
        for dtype, count in layout:
            mapped = np.memmap(stream, dtype=dtype, mode="r", offset=offset, shape=(count,)) if count else []
            arrays.append(np.asarray(mapped, dtype=dtype))
            offset += arrays[-1].nbytes
    starts, offsets, lengths = arrays
    return StoredIndex(arguments, (starts, lengths, offsets))
