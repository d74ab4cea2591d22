"""A token store on disk, opened for reading: tokens by memmap, document offsets, loss mask, its tokenizer.

Writing one is in `store_writer.py`. Knows nothing of sequences or batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from llm_pretrain.data.store_contents import check_digests, check_ids_below, check_offsets, check_samples
from llm_pretrain.data.store_facts import read_facts
from llm_pretrain.data.tokenizers import Tokenizer, open_tokenizer
from llm_pretrain.errors import DataError

VERIFY_LIMIT = 256 << 20
"""Stores of at most this many bytes are read and hashed when opened; larger ones at sampled places."""

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
        self.facts, self.hash = read_facts(self.path)
        key = self._check_sizes()
        self.tokenizer_folder = self.path / "tokenizer"
        self.tokenizer_hash: str = self.facts["tokenizer_hash"]
        self.vocab_size: int = self.facts["vocab_size"]
        self.special_ids: frozenset[int] = frozenset(self.facts["special_ids"])
        self.bos_token_id: int | None = self.facts["bos_token_id"]
        self.eos_token_id: int | None = self.facts["eos_token_id"]
        self.pad_token_id: int | None = self.facts["pad_token_id"]
        self.zlib_bits_per_byte: float | None = self.facts["zlib_bits_per_byte"]
        self._splits: dict[str, StoreSplit] = {}
        self._check_contents(key)

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
        if tokenizer.vocab_size != self.vocab_size:
            raise DataError(
                f"{self.path / 'store.json'}: expected the tokenizer's vocab_size {tokenizer.vocab_size}, "
                f"found {self.vocab_size}; prepare the store again"
            )
        return tokenizer

    def token_bytes(self) -> np.ndarray:
        """int64 [vocab_size]: UTF-8 bytes each id stands for, 0 for special ids."""
        return self.tokenizer().token_bytes()

    def verify(self) -> None:
        """Reads and hashes every file, whatever the store's size. Raises DataError for an altered one."""
        check_digests(self.path, self.facts["files"])
        self._check_ids()

    def __reduce__(self):
        return TokenStore, (self.path,)

    def _check_sizes(self) -> tuple[Any, ...]:
        """Returns what changes with the files."""
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
                    f"{file}: expected {expected['bytes']!r:.40} bytes, found {status.st_size}; "
                    "prepare it again"
                )
            seen += [status.st_size, status.st_mtime_ns, status.st_ino]
        return tuple(seen)

    def _check_contents(self, key: tuple[Any, ...]) -> None:
        """Once per process: all contents where the store is small, or else what tells its files apart."""
        if key in _verified:
            return
        files: dict[str, dict[str, Any]] = self.facts["files"]
        if sum(expected["bytes"] for expected in files.values()) > VERIFY_LIMIT:
            check_samples(self.path, files)
        else:
            check_digests(self.path, files)
            self._check_ids()
        for name in ("train", "validation"):
            split = self.split(name)
            check_offsets(self.path / name, split.offsets, split.shard_starts)
        _verified.add(key)

    def _check_ids(self) -> None:
        for name in ("train", "validation"):
            for file, tokens in zip(self.split(name).shard_files, self.split(name).shards, strict=True):
                check_ids_below(file, tokens, self.vocab_size)


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
        self.shard_files = [folder / name for name in names]
        self.shards = [_map(f, dtype, count) for f, count in zip(self.shard_files, counts, strict=True)]
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

    @property
    def mask_bytes(self) -> np.ndarray:
        """The loss mask as it lies in its file, the first token in the lowest bit; empty without a mask."""
        return np.zeros(0, dtype=np.uint8) if self._mask is None else self._mask

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
