"""A token store on disk, opened for reading: tokens by memmap, document offsets, loss mask, its tokenizer.

Writing one is in `store_writer.py`. Knows nothing of sequences or batches.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from llm_pretrain.data.tokenizers import Tokenizer, open_tokenizer
from llm_pretrain.errors import DataError

FORMAT = "llm_pretrain token store"
FORMAT_VERSION = 1
VERIFY_LIMIT = 256 << 20
"""Stores of at most this many bytes are read and hashed when opened; of larger ones only sizes are."""

_FACTS: dict[str, Any] = {
    **{"dtype": str, "vocab_size": int, "tokenizer_hash": str, "special_ids": list},
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), int | None),
    **{"zlib_bits_per_byte": float | None, "splits": dict, "files": dict},
}
_SPLIT_FACTS: dict[str, Any] = {
    **dict.fromkeys(("documents", "tokens", "targets", "text_bytes", "max_token_id"), int),
    **{"shards": list, "masked": bool},
}

_OPTIONAL_FACTS: dict[str, Any] = {
    **{"inputs": list, "input_documents": list | None, "skipped": dict},
    **{"duplicates": int, "altered_documents": int},
}

_verified: set[tuple[Any, ...]] = set()


class TokenStore:
    """A folder written by `llm-pretrain prepare`.

    Attributes: `path`, `hash` (SHA-256 of store.json, which holds every file's), `vocab_size` (the
    tokenizer's; every id is below it), `tokenizer_folder`, `tokenizer_hash`, `special_ids`, `bos_token_id`,
    `eos_token_id`, `pad_token_id`, `zlib_bits_per_byte` (of the validation text at level 9, or None).
    Raises DataError for whatever is missing, cut short or altered.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.facts = _read_facts(self.path)
        self.hash = hashlib.sha256((self.path / "store.json").read_bytes()).hexdigest()
        self._check_files()
        self.tokenizer_folder = self.path / "tokenizer"
        self.tokenizer_hash: str = self.facts["tokenizer_hash"]
        self.vocab_size: int = self.facts["vocab_size"]
        self.special_ids: frozenset[int] = frozenset(self.facts["special_ids"])
        self.bos_token_id: int | None = self.facts["bos_token_id"]
        self.eos_token_id: int | None = self.facts["eos_token_id"]
        self.pad_token_id: int | None = self.facts["pad_token_id"]
        self.zlib_bits_per_byte: float | None = self.facts["zlib_bits_per_byte"]
        self._splits: dict[str, StoreSplit] = {}

    def split(self, name: str) -> StoreSplit:
        """The `train` or `validation` split."""
        if name not in self._splits:
            self._splits[name] = StoreSplit(self, name)
        return self._splits[name]

    def tokenizer(self) -> Tokenizer:
        """The store's own tokenizer. Raises DataError when it is not the one that wrote the store."""
        tokenizer = open_tokenizer(self.tokenizer_folder)
        if tokenizer.hash != self.tokenizer_hash:
            raise DataError(
                f"{self.tokenizer_folder}: expected the tokenizer that wrote the store "
                f"({self.tokenizer_hash[:12]}), found another ({tokenizer.hash[:12]}); prepare it again"
            )
        return tokenizer

    def token_bytes(self) -> np.ndarray:
        """int64 [vocab_size]: UTF-8 bytes each id stands for, 0 for special ids."""
        return self.tokenizer().token_bytes()

    def verify(self) -> None:
        """Reads and hashes every file, whatever the store's size. Raises DataError for an altered one."""
        self._check_hashes(self.facts["files"])

    def __reduce__(self):
        return TokenStore, (self.path,)

    def _check_files(self) -> None:
        """Sizes of all files always; contents once per process, where the store is small."""
        files: dict[str, dict[str, Any]] = self.facts["files"]
        seen: list[Any] = [str(self.path.resolve()), self.hash]
        for name, expected in files.items():
            file = self.path / name
            if not file.is_file():
                raise DataError(
                    f"{file}: expected a file of the token store, found none; prepare the store again"
                )
            status = file.stat()
            if status.st_size != expected["bytes"]:
                raise DataError(
                    f"{file}: expected {expected['bytes']} bytes, found {status.st_size}; prepare it again"
                )
            seen += [status.st_size, status.st_mtime_ns]
        key = tuple(seen)
        if sum(expected["bytes"] for expected in files.values()) > VERIFY_LIMIT or key in _verified:
            return
        self._check_hashes(files)
        _verified.add(key)

    def _check_hashes(self, files: dict[str, dict[str, Any]]) -> None:
        for name, expected in files.items():
            with (self.path / name).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found == expected["sha256"]:
                continue
            what = (
                "the tokenizer that wrote the store"
                if name.startswith("tokenizer/")
                else "unaltered contents"
            )
            raise DataError(
                f"{self.path / name}: expected {what} (SHA-256 {expected['sha256'][:12]}), "
                f"found {found[:12]}; prepare the store again"
            )


class StoreSplit:
    """Documents of one split: document d is tokens [offsets[d], offsets[d + 1]), `offsets` int64.

    `documents`, `tokens` and `text_bytes` (UTF-8 bytes of all text) are counts.
    """

    def __init__(self, store: TokenStore, name: str):
        facts = store.facts["splits"][name]
        folder = store.path / name
        dtype = np.dtype(store.facts["dtype"])
        self.documents: int = facts["documents"]
        self.tokens: int = facts["tokens"]
        self.text_bytes: int = facts["text_bytes"]
        self.offsets = _map(folder / "offsets.bin", np.dtype("<i8"), self.documents + 1)
        counts = [shard["tokens"] for shard in facts["shards"]]
        self.shard_starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        names = [shard["file"] for shard in facts["shards"]]
        self.shards = [_map(folder / n, dtype, count) for n, count in zip(names, counts, strict=True)]
        bits = -(-self.tokens // 8)
        self._mask = _map(folder / "loss_mask.bin", np.dtype("u1"), bits) if facts["masked"] else None
        if self.offsets[-1] != self.tokens or self.shard_starts[-1] != self.tokens:
            raise DataError(
                f"{folder}: expected {self.tokens} tokens in shards and offsets, found another number"
            )

    @property
    def has_mask(self) -> bool:
        """Whether any token is masked; without a mask every token is a target."""
        return self._mask is not None

    def tokens_at(self, start: int, stop: int) -> np.ndarray:
        """Token ids [start, stop), which lie in one document; uint16 or uint32, a view of the file."""
        shard = 0
        if len(self.shards) > 1:
            shard = int(np.searchsorted(self.shard_starts, start, side="right")) - 1
            start, stop = start - int(self.shard_starts[shard]), stop - int(self.shard_starts[shard])
        return self.shards[shard][start:stop]

    def mask_at(self, start: int, stop: int) -> np.ndarray:
        """bool [stop - start]: which of the tokens [start, stop) are targets of the loss."""
        if self._mask is None:
            return np.ones(stop - start, dtype=np.bool_)
        first = start >> 3
        bits = np.unpackbits(self._mask[first : (stop + 7) >> 3], bitorder="little")
        return bits[start - 8 * first : stop - 8 * first].view(np.bool_)

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(token ids, loss mask) of one document."""
        start, stop = int(self.offsets[index]), int(self.offsets[index + 1])
        return self.tokens_at(start, stop), self.mask_at(start, stop)

    def iterate(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(token ids, loss mask) of every document."""
        return (self.document(index) for index in range(self.documents))


def _map(file: Path, dtype: np.dtype, count: int) -> np.ndarray:
    """A file of `count` numbers as an array that the system reads on demand."""
    if file.stat().st_size != count * dtype.itemsize:
        raise DataError(f"{file}: expected {count} numbers of {dtype}, found {file.stat().st_size} bytes")
    if count == 0:
        return np.zeros(0, dtype=dtype)
    return np.asarray(np.memmap(file, dtype=dtype, mode="r", shape=(count,)))


def _read_facts(path: Path) -> dict[str, Any]:
    file = path / "store.json"
    if not file.is_file():
        raise DataError(
            f"{path}: expected a folder with store.json, found none; make one with `llm-pretrain prepare`"
        )
    try:
        facts = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: expected JSON, found: {error}") from error
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise DataError(f"{file}: expected format {FORMAT!r}, found another file; name a store's folder")
    if facts.get("format_version") != FORMAT_VERSION:
        found = facts.get("format_version")
        raise DataError(
            f"{file}: expected format_version {FORMAT_VERSION}, found {found}; prepare the store again"
        )
    _check_facts(file, facts)
    return facts


def _check_facts(file: Path, facts: dict[str, Any]) -> None:
    """What later code relies on; a store.json edited by hand is named here, not by a KeyError later."""
    _check_types(file, "", facts, _FACTS)
    _check_types(file, "", facts, {key: kind for key, kind in _OPTIONAL_FACTS.items() if key in facts})
    if facts["dtype"] not in ("<u2", "<u4"):
        raise DataError(f"{file}: expected dtype <u2 or <u4, found {facts['dtype']}; prepare the store again")
    for name in ("train", "validation"):
        split = facts["splits"].get(name)
        if not isinstance(split, dict):
            raise DataError(f"{file}: expected a split {name}, found none; prepare the store again")
        _check_types(file, f"splits.{name}.", split, _SPLIT_FACTS)
        if split["max_token_id"] >= facts["vocab_size"]:
            raise DataError(
                f"{file}: expected token ids below vocab_size {facts['vocab_size']}, "
                f"found {split['max_token_id']} in {name}; prepare the store again"
            )
    _check_entries(file, facts)


def _check_entries(file: Path, facts: dict[str, Any]) -> None:
    """What lists and mappings hold; that every file which is read has its size and hash among `files`."""
    shapes = {"bytes": int, "sha256": str}
    files = facts["files"]
    counts = [
        *facts["special_ids"],
        *(facts.get("input_documents") or ()),
        *facts.get("skipped", {}).values(),
    ]
    sound = all(isinstance(entry, dict) and _has(entry, shapes) for entry in files.values())
    sound &= all(isinstance(count, int) for count in counts)
    sound &= all(isinstance(name, str) for name in facts.get("inputs", ()))
    needed = ["tokenizer/tokenizer.json"]
    for name in ("train", "validation"):
        split = facts["splits"][name]
        shards = [shard for shard in split["shards"] if isinstance(shard, dict)]
        shards = [shard for shard in shards if _has(shard, {"file": str, "tokens": int})]
        sound &= len(shards) == len(split["shards"])
        parts = ["offsets.bin", *(["loss_mask.bin"] if split["masked"] else []), *(s["file"] for s in shards)]
        needed += [f"{name}/{part}" for part in parts]
    if not sound:
        raise DataError(
            f"{file}: expected what prepare writes, found entries of other types; prepare it again"
        )
    if missing := [name for name in needed if name not in files]:
        raise DataError(f"{file}: expected {missing[0]} in files, found none; prepare the store again")


def _has(entry: dict[str, Any], types: dict[str, type]) -> bool:
    return all(isinstance(entry.get(key), kind) for key, kind in types.items())


def _check_types(file: Path, prefix: str, facts: dict[str, Any], types: dict[str, Any]) -> None:
    for key, kind in types.items():
        if key not in facts:
            raise DataError(f"{file}: expected the field {prefix}{key}, found none; prepare the store again")
        if not isinstance(facts[key], kind):
            expected = kind.__name__ if isinstance(kind, type) else str(kind)
            raise DataError(
                f"{file}: expected {prefix}{key} of type {expected}, found {facts[key]!r:.40}; "
                "prepare the store again"
            )
