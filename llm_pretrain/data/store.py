"""Opens and verifies token stores: tokens by memory map, document offsets, loss mask, tokenizer.

Of large stores, only a few blocks of each file are hashed: this detects exchanged or half-copied shards
without reading them. To detect a single altered byte, `TokenStore.verify` reads everything.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from llm_pretrain.data.tokenizers import Tokenizer, open_tokenizer
from llm_pretrain.errors import DataError
from llm_pretrain.files import json_object, open_data, read_data

FORMAT = "llm_pretrain token store"
FORMAT_VERSION = 2


def read_facts(path: Path) -> tuple[dict[str, Any], str]:
    """Returns (content of store.json, its SHA-256). Raises DataError if it is missing, foreign or altered."""
    file = path / "store.json"
    if not file.is_file():
        raise DataError(
            f"{path}: expected a folder with store.json, found none; make one with "
            f"`llm-pretrain prepare --output {path}` (its --help has examples)"
        )
    content = read_data(file)
    facts = json_object(file, content)
    if facts.get("format") != FORMAT:
        raise DataError(f"{file}: expected format {FORMAT!r}, found another file; name a store's folder")
    version, digest = facts.get("format_version"), facts_digest(facts)
    _require(version == FORMAT_VERSION, file, f"format_version {FORMAT_VERSION}", f"{version!r:.40}")
    if facts.get("sha256") != digest:
        raise _altered(path, "store.json", "SHA-256", str(facts.get("sha256")), digest)
    return facts, hashlib.sha256(content).hexdigest()


def facts_digest(facts: dict[str, Any]) -> str:
    """SHA-256 of all entries of store.json except `sha256`, which holds this digest."""
    rest = {key: value for key, value in facts.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _require(condition: bool, file: Path, expected: str, found: object) -> None:
    if not condition:
        raise DataError(f"{file}: expected {expected}, found {found!s:.80}; prepare the store again")


SAMPLE_BLOCKS = 4
SAMPLE_BYTES = 1 << 16
"""Number and size of the blocks of a file that `sample_digest` reads, evenly spaced from begin to end."""

_BLOCK = 1 << 20
"""Numbers checked per numpy call."""


def sample_digest(file: BinaryIO, size: int, start: int = 0) -> str:
    """SHA-256 of sampled blocks of the `size` bytes from `start`; of all bytes if the blocks hold them."""
    digest = hashlib.sha256()
    last = max(size - SAMPLE_BYTES, 0)
    for place in sorted({last * k // (SAMPLE_BLOCKS - 1) for k in range(SAMPLE_BLOCKS)}):
        file.seek(start + place)
        digest.update(file.read(min(SAMPLE_BYTES, size - place)))
    return digest.hexdigest()


def check_files(path: Path, files: dict[str, dict[str, Any]], *, whole: bool) -> None:
    """Compares the hash of every file of the store at `path`, or of its sampled blocks, if not `whole`.

    Raises DataError for an altered file.
    """
    kind, key = ("SHA-256", "sha256") if whole else ("sample", "sample")
    for name, entry in files.items():
        with open_data(path / name) as file:
            size = entry["bytes"]
            found = hashlib.file_digest(file, "sha256").hexdigest() if whole else sample_digest(file, size)
        if found != entry[key]:
            raise _altered(path, name, kind, entry[key], found)


def _altered(path: Path, name: str, kind: str, expected: str, found: str) -> DataError:
    tokenizer = name.startswith("tokenizer/")
    what = "the tokenizer that wrote the store" if tokenizer else "unaltered contents"
    wanted = f"{what} ({kind} {expected[:12]})"
    return DataError(f"{path / name}: expected {wanted}, found {found[:12]}; prepare the store again")


def check_offsets(folder: Path, offsets: np.ndarray, shard_starts: np.ndarray) -> None:
    """Checks that offsets rise from 0 (no document is empty) and that no document crosses shards."""
    file = folder / "offsets.bin"
    _require(int(offsets[0]) == 0, file, "offsets from 0 on", int(offsets[0]))
    for start in range(0, len(offsets) - 1, _BLOCK):
        part = offsets[start : start + _BLOCK + 1]
        rising = part[1:] > part[:-1]  # a difference might overflow
        if not rising.all():
            place = int(np.argmin(rising))
            length = int(part[place + 1]) - int(part[place])
            _require(False, file, "rising offsets", f"a document of {length} tokens")
    places = np.minimum(np.searchsorted(offsets, shard_starts), len(offsets) - 1)
    begins = bool(np.all(offsets[places] == shard_starts))
    _require(begins, file, "every shard to begin with a document", "one that does not")


def check_ids(
    ids: np.ndarray, vocab_size: int, name: object, position: int, advice: str = "prepare the store again"
) -> None:
    """Raises DataError for the first id outside [0, vocab_size); `position`: position of ids[0] in `name`."""
    if not len(ids) or (int(ids.min()) >= 0 and int(ids.max()) < vocab_size):
        return
    place = int(np.argmax((ids < 0) | (ids >= vocab_size)))
    raise DataError(
        f"{name}: expected token ids below vocab_size {vocab_size}, found {int(ids[place])} at "
        f"{position + place}; {advice}"
    )


VERIFY_LIMIT = 256 << 20
"""Opening hashes stores up to this many bytes completely, and sampled blocks of larger stores."""

_verified: set[tuple[Any, ...]] = set()


class TokenStore:
    """A folder written by `llm-pretrain prepare`.

    Attributes: `path`, `facts` (content of store.json), `hash` (SHA-256 of store.json, which holds the hash
    of every file), `vocab_size` (every id is below it), `tokenizer_folder`, `tokenizer_hash`, `special_ids`,
    `bos_token_id`, `eos_token_id`, `pad_token_id`, `zlib_bits_per_byte` (of the validation text at level 9,
    or None). Raises DataError for a missing, truncated or altered file.
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
        for name in ("train", "validation"):
            self.split(name)  # maps the files now: the folder may be moved or deleted later

    def split(self, name: str) -> StoreSplit:
        """The `train` or `validation` split."""
        if name not in self._splits:
            self._splits[name] = StoreSplit(self, name)
        return self._splits[name]

    def tokenizer(self) -> Tokenizer:
        """Opens the store's tokenizer. Raises DataError if it is not the one that wrote the store."""
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

    @property
    def tokenizer_digests(self) -> dict[str, str]:
        """Name → SHA-256 of each file of the tokenizer, as store.json lists them."""
        files = {Path(name): entry["sha256"] for name, entry in self.facts["files"].items()}
        return {file.name: digest for file, digest in files.items() if file.parent == Path("tokenizer")}

    def token_bytes(self) -> np.ndarray:
        """int64 [vocab_size]: UTF-8 bytes of each id, 0 for special ids."""
        return self.tokenizer().token_bytes()

    def verify(self) -> None:
        """Reads and hashes every file, whatever the store's size. Raises DataError for an altered file."""
        check_files(self.path, self.facts["files"], whole=True)
        self._check_ids()

    def __reduce__(self):
        return _open_again, (self.path, self.hash)

    def _check_sizes(self) -> tuple[Any, ...]:
        """Checks every file's size; returns a key that changes when a file does."""
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
        """Verifies the files once per process: fully up to VERIFY_LIMIT bytes, else by sampled blocks."""
        if key in _verified:
            return
        files: dict[str, dict[str, Any]] = self.facts["files"]
        is_small = sum(expected["bytes"] for expected in files.values()) <= VERIFY_LIMIT
        check_files(self.path, files, whole=is_small)
        if is_small:
            self._check_ids()
        for name in ("train", "validation"):
            split = self.split(name)
            check_offsets(self.path / name, split.offsets, split.shard_starts)
        _verified.add(key)

    def _check_ids(self) -> None:
        for name in ("train", "validation"):
            for file, tokens in zip(self.split(name).shard_files, self.split(name).shards, strict=True):
                for start in range(0, len(tokens), _BLOCK):
                    check_ids(tokens[start : start + _BLOCK], self.vocab_size, file, start)


def _open_again(path: Path, expected: str) -> TokenStore:
    """Opens the store at `path` in another process. Raises DataError if the store was replaced meanwhile."""
    store = TokenStore(path)
    if store.hash != expected:
        raise DataError(
            f"{path}: expected the store that the run has opened ({expected[:12]}), found another "
            f"({store.hash[:12]}): it was replaced; start again"
        )
    return store


class StoreSplit:
    """One split of a store: document d has the tokens [offsets[d], offsets[d + 1]); `offsets` is int64.

    `documents`, `tokens` and `text_bytes` (UTF-8) are counts. `hashes`, uint64 [documents], are equal for
    equal text, or for equal ids in a converted store. `mask` is the bit-packed loss mask, first token in the
    lowest bit; None if every token is a target.
    """

    def __init__(self, store: TokenStore, name: str):
        facts = store.facts["splits"][name]
        folder = store.path / name
        dtype = np.dtype(store.facts["dtype"])
        self.documents: int = facts["documents"]
        self.tokens: int = facts["tokens"]
        self.text_bytes: int = facts["text_bytes"]
        self.offsets = _map(folder / "offsets.bin", np.dtype("<i8"), self.documents + 1)
        self.hashes = _map(folder / "hashes.bin", np.dtype("<u8"), self.documents)
        counts = [shard["tokens"] for shard in facts["shards"]]
        self.shard_starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        names = [shard["file"] for shard in facts["shards"]]
        self.shard_files = [folder / name for name in names]
        self.shards = [_map(f, dtype, count) for f, count in zip(self.shard_files, counts, strict=True)]
        bits = -(-self.tokens // 8)
        self.mask = _map(folder / "loss_mask.bin", np.dtype("u1"), bits) if facts["masked"] else None
        if self.offsets[-1] != self.tokens or self.shard_starts[-1] != self.tokens:
            raise DataError(
                f"{folder}: expected {self.tokens} tokens in shards and offsets, found another number"
            )

    def tokens_at(self, start: int, stop: int) -> np.ndarray:
        """Token ids [start, stop) of one document: uint16 or uint32, a view of the memory map."""
        shard = 0
        if len(self.shards) > 1:
            shard = int(np.searchsorted(self.shard_starts, start, side="right")) - 1
            start, stop = start - int(self.shard_starts[shard]), stop - int(self.shard_starts[shard])
        return self.shards[shard][start:stop]

    def mask_at(self, start: int, stop: int) -> np.ndarray:
        """bool [stop - start]: which of the tokens are targets of the loss."""
        if self.mask is None:
            return np.ones(stop - start, dtype=np.bool_)
        first = start >> 3
        bits = np.unpackbits(self.mask[first : (stop + 7) >> 3], bitorder="little")
        return bits[start - 8 * first : stop - 8 * first].view(np.bool_)

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (token ids, loss mask) of one document."""
        start, stop = int(self.offsets[index]), int(self.offsets[index + 1])
        return self.tokens_at(start, stop), self.mask_at(start, stop)

    def iterate(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields (token ids, loss mask) of every document."""
        return (self.document(index) for index in range(self.documents))


def _map(file: Path, dtype: np.dtype, count: int) -> np.ndarray:
    """A file of `count` numbers as a memory map."""
    if file.stat().st_size != count * dtype.itemsize:
        raise DataError(f"{file}: expected {count} numbers of {dtype}, found {file.stat().st_size} bytes")
    if count == 0:
        return np.zeros(0, dtype=dtype)
    return np.asarray(np.memmap(file, dtype=dtype, mode="r", shape=(count,)))


def shared_documents(labels: Sequence[str], stores: Sequence[TokenStore]) -> list[str]:
    """A warning for each two stores, named by `labels`, where one trains on the other's validation data."""
    lines = []
    for (label, store), (other, trained) in product(zip(labels, stores, strict=False), repeat=2):
        validation, train = store.split("validation").hashes, trained.split("train").hashes
        is_shared = np.zeros(len(validation), dtype=np.bool_)
        for start in range(0, len(train), 1 << 24):  # not all at once: they are copied
            some = train[start : start + (1 << 24)]
            is_shared |= np.isin(validation, some[some <= validation.max(initial=0)])
        if shared := int(np.count_nonzero(is_shared)):
            option = "--deduplicate" if trained is store else f"--exclude {store.path}"
            lines.append(
                f"{shared} of {len(validation)} validation documents of {label} are trained on in {other}; "
                f"prepare {trained.path} again with {option}"
            )
    return lines
