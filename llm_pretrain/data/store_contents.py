"""Checks what the files of a token store hold: digests, offsets, ids. What store.json says is checked before.

A digest of a few sampled blocks tells whether large files are the right ones in the right places, without
reading them: exchanged or half-copied shards are found at once, a single altered byte only by reading all.
"""

from __future__ import annotations

import hashlib
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from llm_pretrain.errors import DataError

SAMPLE_BLOCKS = 4
SAMPLE_BYTES = 1 << 16
"""Of a file, so many blocks of so many bytes are sampled, from its beginning to its end."""

_AT_ONCE = 1 << 20
"""Numbers that are looked at together."""


def sample_digest(file: BinaryIO, size: int, start: int = 0) -> str:
    """SHA-256 of sampled blocks of a file's `size` bytes from `start` on; of all where they are not more."""
    digest = hashlib.sha256()
    last = max(size - SAMPLE_BYTES, 0)
    for place in sorted({last * k // (SAMPLE_BLOCKS - 1) for k in range(SAMPLE_BLOCKS)}):
        file.seek(start + place)
        digest.update(file.read(min(SAMPLE_BYTES, size - place)))
    return digest.hexdigest()


def check_digests(path: Path, files: dict[str, dict[str, Any]]) -> None:
    """Reads every file of the store at `path` and compares its hash. Raises DataError for an altered one."""
    for name, expected in files.items():
        with _open(path / name) as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != expected["sha256"]:
            raise _altered(path, name, "SHA-256", expected["sha256"], found)


def check_samples(path: Path, files: dict[str, dict[str, Any]]) -> None:
    """Compares the samples of every file that has a digest of them. Raises DataError."""
    for name, expected in files.items():
        if "sample" not in expected:  # of a store that was written before there were any
            continue
        with _open(path / name) as file:
            found = sample_digest(file, expected["bytes"])
        if found != expected["sample"]:
            raise _altered(path, name, "sample", expected["sample"], found)


def _open(file: Path) -> BufferedReader:
    try:
        return file.open("rb")
    except OSError as error:
        raise DataError(f"{file}: expected a readable file, found: {error.strerror}") from error


def _altered(path: Path, name: str, kind: str, expected: str, found: str) -> DataError:
    tokenizer = name.startswith("tokenizer/")
    what = "the tokenizer that wrote the store" if tokenizer else "unaltered contents"
    wanted = f"{what} ({kind} {expected[:12]})"
    return DataError(f"{path / name}: expected {wanted}, found {found[:12]}; prepare the store again")


def check_offsets(folder: Path, offsets: np.ndarray, shard_starts: np.ndarray) -> None:
    """Offsets rise from 0, so that no document is empty, and no document crosses from shard to shard."""
    file = folder / "offsets.bin"
    if int(offsets[0]):
        raise DataError(
            f"{file}: expected offsets from 0 on, found {int(offsets[0])}; prepare the store again"
        )
    for start in range(0, len(offsets) - 1, _AT_ONCE):
        part = offsets[start : start + _AT_ONCE + 1]
        rising = part[1:] > part[:-1]  # a difference might overflow
        if not rising.all():
            place = int(np.argmin(rising))
            length = int(part[place + 1]) - int(part[place])
            raise DataError(
                f"{file}: expected rising offsets, found a document of {length} tokens; "
                "prepare the store again"
            )
    places = np.searchsorted(offsets, shard_starts)
    if np.any(offsets[np.minimum(places, len(offsets) - 1)] != shard_starts):
        raise DataError(
            f"{file}: expected every shard to begin with a document, found one that does not; "
            "prepare the store again"
        )


def check_ids_below(file: Path, tokens: np.ndarray, vocab_size: int) -> None:
    """Raises DataError for a token id outside the vocabulary. Reads the whole file."""
    for start in range(0, len(tokens), _AT_ONCE):
        part = tokens[start : start + _AT_ONCE]
        if int(part.max()) >= vocab_size:
            place = int(np.argmax(part >= vocab_size))
            raise DataError(
                f"{file}: expected token ids below vocab_size {vocab_size}, found {int(part[place])} at "
                f"{start + place}; prepare the store again"
            )
