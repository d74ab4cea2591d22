"""Writes a token store in one pass, with one batch of documents in memory; a killed writer can be resumed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from llm_pretrain.data.store import FORMAT, FORMAT_VERSION, facts_digest, sample_digest
from llm_pretrain.data.tokenizers import TOKENIZER_FILES, Tokenizer
from llm_pretrain.errors import OutputError
from llm_pretrain.files import foreign_file, read_json
from llm_pretrain.version import __version__


class StaleStateError(Exception):
    """The files on disk do not match the saved state of their writer."""


class HashedFile:
    """A file that is hashed while it is written.

    Args:
        keep: Resume after this many bytes; None starts an empty file.
        sha256: Hash of the kept bytes.

    Raises:
        StaleStateError: the kept bytes are missing or have another hash.
    """

    def __init__(self, path: Path, keep: int | None = None, sha256: str = ""):
        self.path = path
        self._hash = hashlib.sha256()
        self.bytes = 0
        if keep is None:
            self._file = path.open("wb")
            return
        if not path.is_file() or path.stat().st_size < keep:
            raise StaleStateError(path)
        os.truncate(path, keep)
        self._file = path.open("ab")
        for data in self.content():
            self._hash.update(data)
            self.bytes += len(data)
        if self._hash.hexdigest() != sha256:
            self._file.close()
            raise StaleStateError(path)

    def content(self) -> Iterator[bytes]:
        """The whole file in blocks."""
        self._file.flush()
        with self.path.open("rb") as file:
            while data := file.read(1 << 20):
                yield data

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self.bytes += len(data)

    def sync(self) -> tuple[int, str]:
        """Flushes to disk; returns the file's size and SHA-256 so far."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self.bytes, self._hash.hexdigest()

    def abandon(self) -> None:
        """Closes a file that will be deleted, and ignores errors such as a full disk."""
        with suppress(OSError):
            self._file.close()

    def close(self) -> dict[str, Any]:
        """Flushes and closes; returns the file's entry for store.json."""
        self.sync()
        self._file.close()
        with self.path.open("rb") as written:
            sample = sample_digest(written, self.bytes)
        return {"bytes": self.bytes, "sha256": self._hash.hexdigest(), "sample": sample}


SHARD_BYTES = 1 << 30
"""A new shard starts with the document that would make the current one larger."""

_COUNTS = ("documents", "tokens", "targets", "text_bytes", "max_token_id")


class SplitWriter:
    """Appends documents to one split's shards, offsets and loss mask; `state` resumes an earlier writer."""

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
        self._hashes = HashedFile(folder / "hashes.bin")
        self._offsets.write(np.zeros(1, dtype="<i8").tobytes())
        self._mask_carry = np.zeros(0, dtype=np.bool_)
        self._shard_counts: list[int] = []
        self._files: dict[str, dict[str, Any]] = {}
        self.documents = self.tokens = self.targets = self.text_bytes = 0
        self.max_token_id = -1

    def state(self) -> dict[str, Any]:
        """State to resume from; everything appended so far is flushed to disk first."""
        kept: dict[str, Any] = {"offsets": self._offsets.sync(), "shard": None, "mask": None}
        kept["hashes"] = self._hashes.sync()
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
        """Truncates every file to its saved size, and removes files that the state does not name."""
        for name in _COUNTS:
            setattr(self, name, state[name])
        self._files = dict(state["files"])
        self._shard_counts = list(state["shard_counts"])
        self._mask_carry = np.array(state["mask_carry"], dtype=np.bool_)
        kept = state["kept"]
        last = _shard_name(len(self._shard_counts) - 1)
        optional = {"loss_mask.bin": kept["mask"], last: kept["shard"]}
        known = {"offsets.bin", "hashes.bin", *self._files, *(name for name in optional if optional[name])}
        for name, facts in self._files.items():
            if not (file := self._folder / name).is_file() or file.stat().st_size != facts["bytes"]:
                raise StaleStateError(file)
            with file.open("rb") as closed:
                if sample_digest(closed, facts["bytes"]) != facts["sample"]:
                    raise StaleStateError(file)
        self._offsets = HashedFile(self._folder / "offsets.bin", *kept["offsets"])
        try:
            self._hashes = HashedFile(self._folder / "hashes.bin", *kept["hashes"])
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

    def append(
        self, ids: np.ndarray, lengths: np.ndarray, loss_mask: np.ndarray, text_bytes: int, hashes: np.ndarray
    ) -> None:
        """Appends documents: `ids` and bool `loss_mask` [tokens]; `lengths`, uint64 `hashes` [documents]."""
        if not len(lengths):
            return
        self._append_mask(loss_mask)
        ends = np.cumsum(lengths, dtype=np.int64)
        self._offsets.write((self.tokens + ends).astype("<i8").tobytes())
        self._hashes.write(hashes.astype("<u8").tobytes())
        data = np.ascontiguousarray(ids, dtype=self._dtype)
        start = document = 0
        while document < len(ends):
            room = self._shard_tokens - (self._shard_counts[-1] if self._shard else 0)
            fitting = int(np.searchsorted(ends, start + room, side="right"))
            if fitting <= document:
                if self._shard and self._shard_counts[-1]:
                    self._close_shard()
                    continue
                fitting = document + 1  # a document larger than a shard gets a larger shard
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
        self._files["hashes.bin"] = self._hashes.close()
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
        """Closes the open files of a split that will be deleted."""
        for file in vars(self).values():
            if isinstance(file, HashedFile):
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
        """Appends to the mask file. The first masked token creates it: all tokens before that are targets."""
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


_INDEX = r"index/\.?(train|validation)-[\w-]+-\d+\.bin(\.lock|\.tmp-[0-9a-f]+)?"
"""Names of the packing indexes that runs keep in a store."""


def _shard_name(index: int) -> str:
    return f"tokens-{index:05d}.bin"


def other_content(path: Path) -> str | None:
    """Says what is at `path` besides the files of a token store; None if there is nothing else."""
    if not os.path.lexists(path) or (path.is_dir() and not path.is_symlink() and not any(path.iterdir())):
        return None
    try:
        content = read_json(path / "store.json")
    except (OSError, ValueError, RecursionError):
        content = None
    if path.is_symlink() or not isinstance(content, dict) or content.get("format") != FORMAT:
        return "something else"
    name = foreign_file(path, _INDEX)
    return name and f"{name} in it, which is not the store's"


class StoreWriter:
    """Writes a store into a temporary folder beside `path`; `commit` moves it there.

    Use as a context manager, which removes an uncommitted temporary folder but keeps a given `folder`.
    `state` resumes an earlier writer in `folder`. Raises StaleStateError if files do not match `state`.
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
        self._keep_folder = folder is not None
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
            split_state = None if state is None else state[name]
            try:
                self.splits[name] = SplitWriter(self.folder / name, self._dtype, shard_bytes, split_state)
            except BaseException:
                for writer in self.splits.values():
                    writer.abandon()
                raise

    def state(self) -> dict[str, Any]:
        """State to resume from in the same folder."""
        return {name: writer.state() for name, writer in self.splits.items()}

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self.splits.values():
            writer.abandon()
        if not self._keep_folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def commit(
        self, facts: dict[str, Any], before_rename: Callable[[str], object] = lambda digest: None
    ) -> None:
        """Writes the tokenizer and store.json, then moves the store to its path, replacing an older one.

        Args:
            facts: Further entries of store.json.
            before_rename: Called with store.json's SHA-256 just before the store is moved.
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
            **facts,
        }
        content["sha256"] = facts_digest(content)
        index = HashedFile(self.folder / "store.json")
        index.write((json.dumps(content, indent=1, sort_keys=True) + "\n").encode())
        before_rename(index.close()["sha256"])
        if found := other_content(self._path):  # something was put there after the store was begun
            raise OutputError(f"{self._path}: expected a folder to replace, found {found}; move it")
        old = self.folder.with_name(self.folder.name + "-old")
        if self._path.exists():
            shutil.rmtree(old, ignore_errors=True)
            self._path.rename(old)
        self.folder.rename(self._path)
        shutil.rmtree(old, ignore_errors=True)

    def _copy_tokenizer(self) -> dict[str, dict[str, Any]]:
        """Copies the tokenizer so that readers of exports begin a text as the store's documents begin."""
        (self.folder / "tokenizer").mkdir()
        files, changed = {}, self._tokenizer.files_with_first(self._first_token())
        for name in TOKENIZER_FILES:
            source = self._tokenizer.folder / name
            if source.is_file():
                copy = HashedFile(self.folder / "tokenizer" / name)
                copy.write(changed.get(name) or source.read_bytes())
                files[f"tokenizer/{name}"] = copy.close()
        return files

    def _first_token(self) -> int | None:
        """BOS, or else EOS, if most of a sample of training documents begin with it; None otherwise."""
        bos, folder = self._tokenizer.bos_token_id, self.folder / "train"
        first = self._tokenizer.eos_token_id if bos is None else bos
        if not self.splits["train"].documents:
            return None
        tokens = np.memmap(folder / _shard_name(0), self._dtype, "r")
        starts = np.memmap(folder / "offsets.bin", "<i8", "r")[:-1]
        starts = starts[: np.searchsorted(starts, len(tokens))]
        begins = tokens[starts[:: len(starts) // 1000 + 1]] == first
        return first if begins.mean() > 0.5 else None
