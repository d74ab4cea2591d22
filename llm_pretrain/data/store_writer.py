"""Writes a token store, streaming: no more than one batch of documents is held in memory.

A store appears under its name only when it is complete. A writer can say how far it is, and another go on
from there. Reading is in `token_store.py`.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from llm_pretrain import __version__
from llm_pretrain.data.hashed_file import HashedFile, StaleStateError
from llm_pretrain.data.store_contents import sample_digest
from llm_pretrain.data.store_facts import FORMAT, FORMAT_VERSION
from llm_pretrain.data.tokenizers import TOKENIZER_FILES, Tokenizer

SHARD_BYTES = 1 << 30
"""A shard is closed at the first document that would make it larger."""


_COUNTS = ("documents", "tokens", "targets", "text_bytes", "max_token_id")


class SplitWriter:
    """Appends documents to one split's shards, offsets and loss mask; goes on from another one's `state`."""

    def __init__(
        self, folder: Path, dtype: str, shard_bytes: int = SHARD_BYTES, state: dict[str, Any] | None = None
    ):
        self._folder = folder
        self._dtype = np.dtype(dtype)
        self._shard_tokens = max(1, shard_bytes // self._dtype.itemsize)
        self._shard: HashedFile | None = None
        self._mask: HashedFile | None = None
        if state is not None:
            self._restore(state)
            return
        folder.mkdir(parents=True)
        self._offsets = HashedFile(folder / "offsets.bin")
        self._offsets.write(np.zeros(1, dtype="<i8").tobytes())
        self._mask_carry = np.zeros(0, dtype=np.bool_)
        self._shard_counts: list[int] = []
        self._files: dict[str, dict[str, Any]] = {}
        self.documents = self.tokens = self.targets = self.text_bytes = 0
        self.max_token_id = -1

    def state(self) -> dict[str, Any]:
        """What another writer needs to go on from here; all that was appended is on disk then."""
        kept: dict[str, Any] = {"offsets": self._offsets.sync(), "shard": None, "mask": None}
        for name, file in (("shard", self._shard), ("mask", self._mask)):
            if file is not None:
                kept[name] = file.sync()
        return {
            **{name: getattr(self, name) for name in _COUNTS},
            "files": self._files,
            "shard_counts": self._shard_counts,
            "mask_carry": self._mask_carry.tolist(),
            "kept": kept,
        }

    def _restore(self, state: dict[str, Any]) -> None:
        """Cuts every file back to what it was, and removes those that were not there."""
        for name in _COUNTS:
            setattr(self, name, state[name])
        self._files = dict(state["files"])
        self._shard_counts = list(state["shard_counts"])
        self._mask_carry = np.array(state["mask_carry"], dtype=np.bool_)
        kept = state["kept"]
        known = {"offsets.bin", *self._files, *(["loss_mask.bin"] if kept["mask"] is not None else [])}
        last = _shard_name(len(self._shard_counts) - 1)
        known |= {last} if kept["shard"] is not None else set()
        for name, facts in self._files.items():
            if not (file := self._folder / name).is_file() or file.stat().st_size != facts["bytes"]:
                raise StaleStateError(file)
            with file.open("rb") as closed:
                if sample_digest(closed, facts["bytes"]) != facts["sample"]:
                    raise StaleStateError(file)
        self._offsets = HashedFile(self._folder / "offsets.bin", *kept["offsets"])
        try:
            if kept["shard"] is not None:
                self._shard = HashedFile(self._folder / last, *kept["shard"])
            if kept["mask"] is not None:
                self._mask = HashedFile(self._folder / "loss_mask.bin", *kept["mask"])
        except StaleStateError:
            self.abandon()
            raise
        for file in self._folder.iterdir():
            if file.name not in known:
                file.unlink()

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
        entry = {name: getattr(self, name) for name in _COUNTS} | {
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
            self._shard = HashedFile(self._folder / _shard_name(len(self._shard_counts)))
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
            self._mask = HashedFile(self._folder / "loss_mask.bin")
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
    """A store in the making, in a folder beside its place; `commit` puts it there.

    Use as a context manager: whatever is not committed is removed. A `folder` that is given stays, and a
    writer in it with what `state` returned goes on from there; raises StaleStateError where that cannot be.
    """

    def __init__(
        self,
        path: Path,
        tokenizer: Tokenizer,
        *,
        shard_bytes: int = SHARD_BYTES,
        folder: Path | None = None,
        state: dict[str, Any] | None = None,
    ):
        self._path = path
        self._stays = folder is not None
        path.parent.mkdir(parents=True, exist_ok=True)
        self.folder = folder or path.parent / f".{path.name}.tmp-{uuid.uuid4().hex[:8]}"
        if state is None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir()
        else:
            (self.folder / "store.json").unlink(missing_ok=True)
            shutil.rmtree(self.folder / "tokenizer", ignore_errors=True)
        self._tokenizer = tokenizer
        self._dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
        self.splits: dict[str, SplitWriter] = {}
        for name in ("train", "validation"):
            known = None if state is None else state[name]
            with self._abandoned_on_failure():
                self.splits[name] = SplitWriter(self.folder / name, self._dtype, shard_bytes, known)

    @contextmanager
    def _abandoned_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            for writer in self.splits.values():
                writer.abandon()
            raise

    def state(self) -> dict[str, Any]:
        """What a writer in the same folder needs to go on from here."""
        return {name: writer.state() for name, writer in self.splits.items()}

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self.splits.values():
            writer.abandon()
        if not self._stays:
            shutil.rmtree(self.folder, ignore_errors=True)

    def commit(self, facts: dict[str, Any], announce: Callable[[str], object] = lambda digest: None) -> None:
        """Writes the tokenizer and store.json with `facts` added, and puts the folder in its place.

        A store that is already there is replaced; `facts` adds to the entries of store.json. `announce` is
        called with store.json's SHA-256 just before the store appears.
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
        index = HashedFile(self.folder / "store.json")
        index.write((json.dumps(content | facts, indent=1, sort_keys=True) + "\n").encode())
        announce(index.close()["sha256"])
        self._replace()

    def _copy_tokenizer(self) -> dict[str, dict[str, Any]]:
        (self.folder / "tokenizer").mkdir()
        files = {}
        for name in TOKENIZER_FILES:
            source = self._tokenizer.folder / name
            if source.is_file():
                copy = HashedFile(self.folder / "tokenizer" / name)
                copy.write(source.read_bytes())
                files[f"tokenizer/{name}"] = copy.close()
        return files

    def _replace(self) -> None:
        old = self.folder.with_name(self.folder.name + "-old")
        if self._path.exists():
            shutil.rmtree(old, ignore_errors=True)
            self._path.rename(old)
        self.folder.rename(self._path)
        shutil.rmtree(old, ignore_errors=True)
