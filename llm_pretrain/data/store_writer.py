"""Writes a token store, streaming: no more than one batch of documents is held in memory.

A store appears under its name only when it is complete. Reading is in `token_store.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from pathlib import Path
from typing import Any

import numpy as np

from llm_pretrain import __version__
from llm_pretrain.data.token_store import FORMAT, FORMAT_VERSION
from llm_pretrain.data.tokenizers import TOKENIZER_FILES, Tokenizer

SHARD_BYTES = 1 << 30
"""A shard is closed at the first document that would make it larger."""


class _HashedFile:
    """A file that is hashed while it is written."""

    def __init__(self, path: Path):
        self.path = path
        self._file = path.open("wb")
        self._hash = hashlib.sha256()
        self.bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self.bytes += len(data)

    def abandon(self) -> None:
        self._file.close()

    def close(self) -> dict[str, Any]:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return {"bytes": self.bytes, "sha256": self._hash.hexdigest()}


class SplitWriter:
    """Appends documents to one split's shards, offsets and loss mask."""

    def __init__(self, folder: Path, dtype: str, shard_bytes: int = SHARD_BYTES):
        folder.mkdir(parents=True)
        self._folder = folder
        self._dtype = np.dtype(dtype)
        self._shard_tokens = max(1, shard_bytes // self._dtype.itemsize)
        self._offsets = _HashedFile(folder / "offsets.bin")
        self._offsets.write(np.zeros(1, dtype="<i8").tobytes())
        self._shard: _HashedFile | None = None
        self._mask: _HashedFile | None = None
        self._mask_carry = np.zeros(0, dtype=np.bool_)
        self._shard_counts: list[int] = []
        self._files: dict[str, dict[str, Any]] = {}
        self.documents = self.tokens = self.targets = self.text_bytes = 0
        self.max_token_id = -1

    def append(self, ids: np.ndarray, lengths: np.ndarray, loss_mask: np.ndarray, text_bytes: int) -> None:
        """Adds documents: `ids` and bool `loss_mask` of all of them joined, `lengths` [documents]."""
        if not len(lengths):
            return
        self._append_mask(loss_mask)
        ends = np.cumsum(lengths, dtype=np.int64)
        self._offsets.write((self.tokens + ends).astype("<i8").tobytes())
        data = np.ascontiguousarray(ids, dtype=self._dtype)
        start = document = 0
        while document < len(ends):
            room = self._shard_tokens - (self._shard_counts[-1] if self._shard else 0)
            fitting = int(np.searchsorted(ends, start + room, side="right"))
            if fitting <= document:
                if self._shard and self._shard_counts[-1]:
                    self._close_shard()
                    continue
                fitting = document + 1  # one document larger than a shard makes a larger shard
            stop = int(ends[fitting - 1])
            self._write_tokens(data[start:stop])
            start, document = stop, fitting
        self.documents += len(lengths)
        self.tokens += len(ids)
        self.targets += int(loss_mask.sum()) - int(loss_mask[np.concatenate([[0], ends[:-1]])].sum())
        self.text_bytes += text_bytes
        self.max_token_id = max(self.max_token_id, int(ids.max()))

    def close(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Closes all files; returns the split's entry of store.json and its files' sizes and hashes."""
        if self._shard:
            self._close_shard()
        self._files["offsets.bin"] = self._offsets.close()
        if self._mask:
            self._mask.write(np.packbits(self._mask_carry, bitorder="little").tobytes())
            self._files["loss_mask.bin"] = self._mask.close()
        shards = [{"file": _shard_name(k), "tokens": count} for k, count in enumerate(self._shard_counts)]
        counts = ("documents", "tokens", "targets", "text_bytes", "max_token_id")
        entry = {name: getattr(self, name) for name in counts} | {
            "shards": shards,
            "masked": self._mask is not None,
        }
        return entry, {f"{self._folder.name}/{name}": facts for name, facts in self._files.items()}

    def abandon(self) -> None:
        """Closes what is still open of a split that is not wanted."""
        for file in (self._offsets, self._shard, self._mask):
            if file:
                file.abandon()

    def _write_tokens(self, tokens: np.ndarray) -> None:
        if self._shard is None:
            self._shard = _HashedFile(self._folder / _shard_name(len(self._shard_counts)))
            self._shard_counts.append(0)
        self._shard.write(tokens.tobytes())
        self._shard_counts[-1] += len(tokens)

    def _close_shard(self) -> None:
        assert self._shard is not None
        self._files[self._shard.path.name] = self._shard.close()
        self._shard = None

    def _append_mask(self, loss_mask: np.ndarray) -> None:
        """Bits are written from the first masked token on; all tokens before it are targets."""
        if self._mask is None:
            if loss_mask.all():
                return
            self._mask = _HashedFile(self._folder / "loss_mask.bin")
            block = b"\xff" * (1 << 20)
            whole = self.tokens // 8
            for start in range(0, whole, len(block)):
                self._mask.write(block[: whole - start])
            self._mask_carry = np.ones(self.tokens % 8, dtype=np.bool_)
        bits = np.concatenate([self._mask_carry, loss_mask])
        whole = len(bits) // 8 * 8
        self._mask.write(np.packbits(bits[:whole], bitorder="little").tobytes())
        self._mask_carry = bits[whole:]


def _shard_name(index: int) -> str:
    return f"tokens-{index:05d}.bin"


class StoreWriter:
    """A store in the making, in a temporary folder beside its place; `commit` puts it there.

    Use as a context manager: whatever is not committed is removed.
    """

    def __init__(self, path: Path, tokenizer: Tokenizer, *, shard_bytes: int = SHARD_BYTES):
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.folder = path.parent / f".{path.name}.tmp-{uuid.uuid4().hex[:8]}"
        self.folder.mkdir()
        self._tokenizer = tokenizer
        self._dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
        self.splits = {
            name: SplitWriter(self.folder / name, self._dtype, shard_bytes)
            for name in ("train", "validation")
        }

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self.splits.values():
            writer.abandon()
        shutil.rmtree(self.folder, ignore_errors=True)

    def commit(self, facts: dict[str, Any]) -> None:
        """Writes the tokenizer and store.json with `facts` added, and puts the folder in its place.

        A store that is already there is replaced; `facts` adds to the entries of store.json.
        """
        entries: dict[str, Any] = {}
        files: dict[str, dict[str, Any]] = {}
        for name, writer in self.splits.items():
            entries[name], written = writer.close()
            files |= written
        files |= self._copy_tokenizer()
        tokenizer = self._tokenizer
        content = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "package_version": __version__,
            "dtype": self._dtype,
            "vocab_size": tokenizer.vocab_size,
            "tokenizer_hash": tokenizer.hash,
            "special_ids": sorted(tokenizer.special_ids),
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "splits": entries,
            "files": files,
        }
        index = _HashedFile(self.folder / "store.json")
        index.write((json.dumps(content | facts, indent=1, sort_keys=True) + "\n").encode())
        index.close()
        self._replace()

    def _copy_tokenizer(self) -> dict[str, dict[str, Any]]:
        (self.folder / "tokenizer").mkdir()
        files = {}
        for name in TOKENIZER_FILES:
            source = self._tokenizer.folder / name
            if source.is_file():
                copy = _HashedFile(self.folder / "tokenizer" / name)
                copy.write(source.read_bytes())
                files[f"tokenizer/{name}"] = copy.close()
        return files

    def _replace(self) -> None:
        old = self.folder.with_name(self.folder.name + "-old")
        if self._path.exists():
            self._path.rename(old)
        self.folder.rename(self._path)
        shutil.rmtree(old, ignore_errors=True)
