"""The packing index of a large split: built once, kept beside the store, read by memory map from then on.

A split of few documents is packed in memory, in less time than a file takes. What a file says is a pure
function of the store: whoever builds it builds the same, so that ranks agree and a race costs only work.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from filelock import FileLock, Timeout

from llm_pretrain.data.packing import PackedIndex, pack, pack_in_parts
from llm_pretrain.data.store_contents import sample_digest
from llm_pretrain.data.token_store import TokenStore

FOLDER = "index"
"""Of a store; what is in it can be removed at any time."""

IN_MEMORY = 1 << 17
"""Splits of fewer documents are packed in some hundredths of a second, and have no file."""

_FORMAT = "llm_pretrain packing index 2"
"""To be changed with the layout below and with every change of what `pack` returns."""
_HEADER_BYTES = 4096
_WHOLE = 256 << 20
"""Files of at most so many bytes are hashed whole when they are opened; larger ones at sampled places."""
_LOCK_SECONDS = 600.0

_log = logging.getLogger("llm_pretrain")
_verified: set[tuple[Any, ...]] = set()


class _BrokenError(Exception):
    """The file is damaged, or that of another store; the text says how."""


class StoredIndex(PackedIndex):
    """An index in a file; another process opens the file instead of being sent what is in it."""

    def __init__(self, arguments: tuple[TokenStore, str, int, str], arrays: tuple[np.ndarray, ...]):
        super().__init__(*arrays)
        object.__setattr__(self, "_arguments", arguments)

    def __reduce__(self):
        return packed_index, self._arguments  # type: ignore[attr-defined]


def packed_index(store: TokenStore, split: str, sequence_length: int, packing: str) -> PackedIndex:
    """The packing of a split, see `pack`: from the store's `index` folder, and put there by who comes first.

    Where the store cannot be written to, the file goes to the user's cache folder, or nowhere at all.
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
            reason = reason or f"{error.strerror or error}"
    _log.warning("%s: packed in memory, as its index cannot be written: %s", store.path / FOLDER, reason)
    return pack(documents.offsets, sequence_length, packing)


def stored_indexes(store: TokenStore) -> list[dict[str, Any]]:
    """Names and sizes of the files in the store's `index` folder, whether or not they can be used."""
    files = sorted((store.path / FOLDER).glob("*.bin"))
    return [{"file": file.name, "bytes": file.stat().st_size} for file in files]


def _cache_folder() -> Path | None:
    """The user's; None where there is no home, as for a user whom a container has never heard of."""
    base = Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"))
    return base / "llm_pretrain" / FOLDER if base.is_absolute() else None


def _opened_or_built(file: Path, arguments: tuple[TokenStore, str, int, str]) -> PackedIndex:
    if file.is_file():
        with suppress(_BrokenError):
            return _opened(file, arguments)
    file.parent.mkdir(parents=True, exist_ok=True)
    with _locked(file):
        if file.is_file():  # another process was faster, or it is damaged
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
    """One process builds, the others wait for it; without locks on the file system, each builds."""
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
    """What an index is of."""
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
    for left in file.parent.glob(f".{file.name}.tmp-*"):  # of a process that was killed
        left.unlink(missing_ok=True)
    index = pack_in_parts(store.split(split).offsets, sequence_length, packing)
    temporary = file.parent / f".{file.name}.tmp-{uuid.uuid4().hex[:8]}"
    try:
        with temporary.open("w+b") as stream:
            stream.write(bytes(_HEADER_BYTES))
            columns = index.piece_start(), index.sequence_offsets(), index.piece_length()
            for column, (dtype, _) in zip(columns, _layout(arguments, **index.counts), strict=True):
                for array in column:
                    stream.write(np.ascontiguousarray(array, dtype=dtype).data)
            stream.flush()
            header = _facts(arguments) | index.counts | {"digest": _digest(stream)}
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
    """Types and lengths of piece_start, sequence_offsets and piece_length, as they follow the header.

    The smallest that hold them: short sequences make tens of millions of pieces out of 10^9 tokens.
    """
    store, split, sequence_length, _ = arguments
    start = "<u4" if store.split(split).tokens < 1 << 32 else "<i8"
    offset = "<u4" if pieces < 1 << 32 else "<i8"
    length = "<u2" if sequence_length < 1 << 16 else "<i4"
    return [(start, pieces), (offset, sequences + 1), (length, pieces)]


def _digest(stream: BinaryIO) -> str:
    """SHA-256 of what follows the header, or of samples of it."""
    size = stream.seek(0, os.SEEK_END)
    if size > _WHOLE:
        return sample_digest(stream, size - _HEADER_BYTES, start=_HEADER_BYTES)
    stream.seek(_HEADER_BYTES)
    digest = hashlib.sha256()
    while block := stream.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def _opened(file: Path, arguments: tuple[TokenStore, str, int, str]) -> PackedIndex:
    """Raises _BrokenError for a file that is not this index, whole and unaltered."""
    with file.open("rb") as stream:
        try:
            header = json.loads(stream.read(_HEADER_BYTES).rstrip(b"\0"))
            found = {name: header[name] for name in _facts(arguments)}
            pieces, sequences = int(header["pieces"]), int(header["sequences"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise _BrokenError("its header is damaged") from error
        if found != _facts(arguments):
            raise _BrokenError("it is that of another store or version")
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
