"""Reads and writes token files of nanoGPT, llm.c, modded-nanogpt and Megatron.

Megatron's layout is that of `megatron.core.datasets.indexed_dataset`: a `.bin` of token ids and an `.idx` of
little-endian numbers: magic (9 bytes), version 1 (uint64), dtype code (uint8), number of sequences S
(uint64), length D of the document index (uint64), S lengths (int32), S byte offsets into the `.bin` (int64),
and D sequence numbers (int64): 0 and the end of every document. It has no loss mask; ours is a second dataset
beside it, `NAME-loss_mask`, of uint8.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llm_pretrain.data.store import StoreSplit, TokenStore
from llm_pretrain.data.tokenizers import Tokenizer
from llm_pretrain.errors import ConfigError, DataError
from llm_pretrain.files import open_plain, read_plain

BATCH_TOKENS = 1 << 20
"""Documents are read in groups of about this many tokens."""

_HEADER_BYTES = 1024
_HEADERS = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}
"""(magic, version) of a header of 256 int32, whose third number is the token count -> token dtype."""


@dataclass(frozen=True)
class DocumentFile:
    """Documents in a file: document d is tokens [offsets[d], offsets[d + 1]) of `tokens`.

    `tokens` is a memory map of any integer dtype; `loss_mask` is bool or uint8 of the same length, or None if
    every token is a target. `name` is for messages.
    """

    name: str
    tokens: np.ndarray
    offsets: np.ndarray
    loss_mask: np.ndarray | None = None

    def batches(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """(ids, lengths, bool loss mask) of groups of documents, in order, without empty documents."""
        offsets = self.offsets
        first = 0
        while first < len(offsets) - 1:
            limit = int(offsets[first]) + BATCH_TOKENS
            last = max(first + 1, int(np.searchsorted(offsets, limit, side="right")) - 1)
            start, stop = int(offsets[first]), int(offsets[last])
            ids = np.asarray(self.tokens[start:stop])
            mask = np.ones(len(ids), dtype=np.bool_)
            if self.loss_mask is not None:
                mask = np.asarray(self.loss_mask[start:stop]).astype(np.bool_)
            lengths = np.diff(offsets[first : last + 1])
            yield ids, lengths[lengths > 0], mask
            first = last


def check_ids(ids: np.ndarray, vocab_size: int, name: str, position: int) -> None:
    """Raises DataError for the first of `ids` outside [0, vocab_size); `position` is that of ids[0]."""
    if not len(ids) or (int(ids.min()) >= 0 and int(ids.max()) < vocab_size):
        return
    bad = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
    raise DataError(
        f"{name}: expected token ids below {vocab_size}, found {int(ids[bad])} at position "
        f"{position + bad}; were they written with another tokenizer?"
    )


def open_nanogpt(path: Path, end_of_document: int) -> DocumentFile:
    """Opens a `.bin` of uint16 ids, or one with llm.c's header; each `end_of_document` ends a document.

    Tokens after the last one are a document too. Raises DataError for another file.
    """
    tokens = _nanogpt_tokens(path)
    ends = [np.zeros(1, dtype=np.int64)]
    for start in range(0, len(tokens), BATCH_TOKENS):
        found = np.flatnonzero(tokens[start : start + BATCH_TOKENS] == end_of_document)
        ends.append(found.astype(np.int64) + start + 1)
    if int(ends[-1][-1] if len(ends[-1]) else -1) != len(tokens):
        ends.append(np.array([len(tokens)], dtype=np.int64))
    return DocumentFile(str(path), tokens, np.concatenate(ends))


def _nanogpt_tokens(path: Path) -> np.ndarray:
    try:
        with open_plain(path) as file:
            size, head = os.fstat(file.fileno()).st_size, file.read(12)
    except OSError as error:
        raise DataError(f"{path}: expected a readable file, found: {error.strerror}") from error
    header = struct.unpack("<3i", head) if len(head) == 12 else (0, 0, 0)
    magics = {magic for magic, _ in _HEADERS}
    if header[0] not in magics:
        if size == 0 or size % 2:
            raise DataError(f"{path}: expected uint16 token ids, an even number of bytes, found {size} bytes")
        return map_numbers(path, np.dtype("<u2"), 0, size // 2)
    dtype = _HEADERS.get((header[0], header[1]))
    if dtype is None:
        raise DataError(f"{path}: expected llm.c's version 1 or 7 in its header, found version {header[1]}")
    expected = _HEADER_BYTES + header[2] * dtype.itemsize
    if header[2] < 1 or size != expected:
        raise DataError(
            f"{path}: expected {header[2]} tokens as its header says, {expected} bytes, found {size} bytes"
        )
    return map_numbers(path, dtype, _HEADER_BYTES, header[2])


def map_numbers(path: Path, dtype: np.dtype, start: int, count: int) -> np.ndarray:
    """A memory map of `count` numbers from byte `start` of a file."""
    if count == 0:
        return np.zeros(0, dtype=dtype)
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=start, shape=(count,)))


_PLAIN_PICKLE = re.compile(
    "PROTO|FRAME|STOP|MARK|MEMOIZE|(LONG_|BIN|LONG_BIN)?(PUT|GET)|NONE|NEW(TRUE|FALSE)|(BIN)?INT[12]?|LONG[14]?"
    "|(BIN)?FLOAT|(SHORT_)?(BIN)?UNICODE8?|(EMPTY_)?(DICT|LIST|TUPLE)[123]?|SETITEMS?|APPENDS?"
)
"""Instructions of a pickle that builds containers of strings and numbers. Any other might import or call."""


def read_characters(inputs: Sequence[str]) -> dict[Path, list[str]]:
    """The characters of ids 0, 1, … that each nanoGPT `meta.pkl` in or beside the inputs states as `itos`.

    Raises DataError for a file that needs more than strings, numbers and containers, and for other content.
    """
    folders = [Path(entry) if Path(entry).is_dir() else Path(entry).parent for entry in inputs]
    found = {}
    for path in dict.fromkeys(folder / "meta.pkl" for folder in folders):
        if not path.exists():
            continue
        try:
            content = read_plain(path)
            for instruction, _, _ in pickletools.genops(content):
                if not _PLAIN_PICKLE.fullmatch(instruction.name):
                    raise ValueError(f"the pickle instruction {instruction.name}, which may run code")
            # C's unpickler would allocate what an index in the file says
            table = pickle._Unpickler(io.BytesIO(content)).load().get("itos")
            characters = [] if table is None else [table[index] for index in range(len(table))]
            if wrong := [each for each in characters if len(each.encode().decode()) != 1]:
                raise ValueError(f"{wrong[0]!r:.40} in itos")
        except OSError as error:
            raise DataError(f"{path}: expected a readable file, found: {error.strerror}") from error
        except Exception as error:  # a broken pickle raises many types of exception
            reason = " ".join(f"{error}".split()) or type(error).__name__
            raise DataError(
                f"{path}: expected nanoGPT's characters by id (itos), found: {reason:.200}; "
                "move the file away if --tokenizer names the tokenizer that wrote the ids"
            ) from error
        if characters:
            found[path] = characters
    return found


class NanogptWriter:
    """Writes documents as nanoGPT's raw uint16 ids; the format cannot store the loss mask."""

    def __init__(self, path: Path, vocab_size: int):
        if vocab_size > 1 << 16:
            raise DataError(f"{path}: expected a vocabulary of at most 65536 for uint16, found {vocab_size}")
        self._file = path.open("wb")

    def append(self, ids: np.ndarray, lengths: np.ndarray, loss_mask: np.ndarray) -> None:
        """Appends concatenated documents."""
        self._file.write(ids.astype("<u2").tobytes())

    def close(self) -> None:
        """Completes the file."""
        self._file.close()

    abandon = close


MAGIC = b"MMIDIDX\x00\x00"
MASK_SUFFIX = "-loss_mask"

_VERSION = 1
_FIXED_BYTES = 34
_LEGACY_MAGIC = b"TNTIDX\x00\x00"
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_SMALL_VOCABULARY = 65500
"""Megatron writes uint16 for smaller vocabularies, int32 from this size on."""


def open_megatron(prefix: Path) -> DocumentFile:
    """Opens `PREFIX.bin`, `PREFIX.idx` and the loss mask beside them. Raises DataError."""
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
    wrong = pointers[(pointers < 0) | (pointers % dtype.itemsize != 0)]
    if len(wrong):
        raise DataError(
            f"{index}: expected byte offsets that are multiples of {dtype.itemsize}, 0 or more, "
            f"found {int(wrong[0])}"
        )
    filled = lengths > 0
    starts = np.minimum(pointers[filled], 1 << 62)  # avoids overflow of the sum
    ends = starts + lengths[filled].astype(np.int64) * dtype.itemsize
    if len(ends) and int(ends.max()) > size:
        raise DataError(
            f"{content}: expected {int(ends.max())} bytes as {index.name} says, found {size} bytes"
        )
    if np.any(np.sort(starts)[1:] < np.sort(ends)[:-1]):
        raise DataError(
            f"{index}: expected sequences that lie apart in {content.name}, found some that overlap"
        )
    tokens = map_numbers(content, dtype, 0, size // dtype.itemsize)
    edges = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if not np.array_equal(pointers, edges[:-1] * dtype.itemsize):  # sequences are not in file order
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
    """Writes documents as an indexed dataset, one sequence each, with a loss mask dataset beside it."""

    def __init__(self, prefix: Path, vocab_size: int):
        code = 8 if vocab_size < _SMALL_VOCABULARY else 4
        self._data = _IndexedWriter(prefix, code)
        self._mask = _IndexedWriter(prefix.with_name(prefix.name + MASK_SUFFIX), 1)
        self._masked = 0

    def append(self, ids: np.ndarray, lengths: np.ndarray, loss_mask: np.ndarray) -> None:
        """Appends concatenated documents."""
        self._data.append(ids, lengths)
        self._mask.append(loss_mask, lengths)
        self._masked += int(np.count_nonzero(~loss_mask))

    def close(self) -> None:
        """Writes the index; a mask dataset without masked tokens is deleted."""
        self._data.close()
        self._mask.close()
        if not self._masked:
            self._mask.remove()

    def abandon(self) -> None:
        """Closes the files of a dataset that will be deleted."""
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


_VALIDATION = re.compile(r"(^|[_.-])val(id(ation)?)?([_.-]|$)")
_SUFFIXES = {"nanogpt": {".bin"}, "megatron": {".bin", ".idx"}}


def find_tokenizer(inputs: Sequence[str]) -> Path | None:
    """The folder `tokenizer` in or beside the inputs, None if there is none."""
    for entry in inputs:
        for folder in (Path(entry) / "tokenizer", Path(entry).parent / "tokenizer"):
            if (folder / "tokenizer.json").is_file():
                return folder
    return None


def open_splits(format: str, inputs: Sequence[str], tokenizer: Tokenizer) -> dict[str, list[DocumentFile]]:
    """{"train": …, "validation": …}, or {"all": …} if no file names a validation split.

    `format` is `store`, `nanogpt` or `megatron`. Raises DataError for files of another format.
    """
    if format == "store":
        return _open_store(inputs, tokenizer)
    assert tokenizer.eos_token_id is not None
    found: dict[str, list[DocumentFile]] = {"train": [], "validation": []}
    for path in _find(format, inputs):
        file = open_megatron(path) if format == "megatron" else open_nanogpt(path, tokenizer.eos_token_id)
        found["validation" if _VALIDATION.search(path.name) else "train"].append(file)
    if found["train"] and found["validation"]:
        return found
    return {"all": found["train"] + found["validation"]}


def _find(format: str, inputs: Sequence[str]) -> list[Path]:
    """nanoGPT's files, or the prefixes of Megatron's pairs of files, in a fixed order."""
    suffixes = _SUFFIXES[format]
    paths: list[Path] = []
    for entry in inputs:
        path = Path(entry)
        inside = sorted(p for p in path.glob("*") if p.suffix in suffixes) if path.is_dir() else [path]
        if not inside:
            wanted = " and ".join(sorted(suffixes))
            raise DataError(f"{entry}: expected a folder with {wanted} files, found none in it")
        paths += inside
    if format == "nanogpt":
        return paths
    prefixes = [p.with_suffix("") if p.suffix in suffixes else p for p in paths]
    return [p for p in dict.fromkeys(prefixes) if not p.name.endswith(MASK_SUFFIX)]


def _open_store(inputs: Sequence[str], tokenizer: Tokenizer) -> dict[str, list[DocumentFile]]:
    if len(inputs) != 1:
        raise ConfigError(f"--input: expected one store, found {len(inputs)}")
    store = TokenStore(inputs[0])
    if store.tokenizer_hash != tokenizer.hash:
        raise DataError(f"{tokenizer.folder}: expected the tokenizer that wrote the store, found another")
    return {name: _store_files(store.split(name), f"{store.path}/{name}") for name in ("train", "validation")}


def _store_files(split: StoreSplit, name: str) -> list[DocumentFile]:
    """One per shard; no document crosses shards."""
    files = []
    for index, tokens in enumerate(split.shards):
        start, stop = (int(split.shard_starts[k]) for k in (index, index + 1))
        first, last = np.searchsorted(split.offsets, [start, stop])
        mask: Any = _MaskView(split, start) if split.has_mask else None
        files.append(DocumentFile(name, tokens, split.offsets[first : last + 1] - start, mask))
    return files


class _MaskView:
    """The loss mask of one shard, unpacked slice by slice."""

    def __init__(self, split: StoreSplit, start: int):
        self._split, self._start = split, start

    def __getitem__(self, where: slice) -> np.ndarray:
        return self._split.mask_at(self._start + where.start, self._start + where.stop)
