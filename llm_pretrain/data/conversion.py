"""Converts token files of nanoGPT, llm.c and modded-nanogpt into a token store, without tokenizing."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import pickletools
import re
import struct
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from llm_pretrain.data.inputs import SPLITS
from llm_pretrain.data.preparation import HASHES, ZlibRate, check_fraction, fitting_threshold
from llm_pretrain.data.store import check_ids
from llm_pretrain.data.store_writer import StoreWriter
from llm_pretrain.data.tokenizer_training import nanogpt_tokenizer, write_files
from llm_pretrain.data.tokenizers import Tokenizer, convert_tokenizer, open_tokenizer
from llm_pretrain.errors import ConfigError, DataError
from llm_pretrain.files import open_data, read_data
from llm_pretrain.text import reason_of

BATCH_TOKENS = 1 << 20
"""Documents are read in groups of about this many tokens."""

_HEADER_BYTES = 1024
_HEADERS = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}
"""(magic, version) -> token dtype. The header is 256 int32 numbers; the third is the token count."""


@dataclass(frozen=True)
class DocumentFile:
    """Documents of the file `name`; document d is [offsets[d], offsets[d + 1]) of `tokens`, a memory map."""

    name: str
    tokens: np.ndarray
    offsets: np.ndarray

    def batches(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields (ids, lengths) of groups of consecutive documents; leaves out empty documents."""
        offsets = self.offsets
        first = 0
        while first < len(offsets) - 1:
            limit = int(offsets[first]) + BATCH_TOKENS
            last = max(first + 1, int(np.searchsorted(offsets, limit, side="right")) - 1)
            ids = np.asarray(self.tokens[int(offsets[first]) : int(offsets[last])])
            lengths = np.diff(offsets[first : last + 1])
            yield ids, lengths[lengths > 0]
            first = last


TokenType = Literal["int64", "uint32", "int32", "uint16"]
"""Types of ids in files without a header, widest first."""


def open_nanogpt(path: Path, tokenizer: Tokenizer, dtype: TokenType | None = None) -> DocumentFile:
    """Opens `.npy`, a file with llm.c's header, or one without, of `dtype`; the eos token ends a document.

    Tokens after the last one are a document too. Raises DataError for any other file or type.
    """
    tokens = _nanogpt_tokens(path, tokenizer, dtype)
    ends = [np.zeros(1, dtype=np.int64)]
    for start in range(0, len(tokens), BATCH_TOKENS):
        found = np.flatnonzero(tokens[start : start + BATCH_TOKENS] == tokenizer.eos_token_id)
        ends.append(found.astype(np.int64) + start + 1)
    if int(ends[-1][-1] if len(ends[-1]) else -1) != len(tokens):
        ends.append(np.array([len(tokens)], dtype=np.int64))
    return DocumentFile(str(path), tokens, np.concatenate(ends))


def _nanogpt_tokens(path: Path, tokenizer: Tokenizer, dtype: TokenType | None) -> np.ndarray:
    with open_data(path) as file:
        size, head = os.fstat(file.fileno()).st_size, file.read(BATCH_TOKENS)
    if head.startswith(b"\x93NUMPY"):
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
            if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
                raise ValueError(f"{tokens.dtype} of shape {tokens.shape}")
            return tokens
        except (OSError, ValueError) as error:
            found = reason_of(error)
            raise DataError(f"{path}: expected integers in one dimension, found: {found}") from error
    header = struct.unpack("<3i", head[:12]) if len(head) >= 12 else (0, 0, 0)
    magics = {magic for magic, _ in _HEADERS}
    if header[0] not in magics:
        assumed = np.dtype(dtype or "uint16").newbyteorder("<")
        fitting = [name for name in get_args(TokenType) if _are_ids(head, name, tokenizer.vocab_size)]
        is_wide = fitting[:1] != ["uint16"] or tokenizer.vocab_size > 1 << 16
        is_narrow = size > 1 << 10 and assumed.itemsize < np.dtype(fitting[0] if fitting else "u2").itemsize
        if fitting and (is_wide if dtype is None else dtype not in fitting or is_narrow):
            raise DataError(
                f"{path}: expected {assumed.name} ids of the tokenizer, which has {tokenizer.vocab_size}, "
                f"found a file that has them as {fitting[0]}; use --dtype {fitting[0]}"
            )
        if size == 0 or size % assumed.itemsize:
            raise DataError(
                f"{path}: expected {assumed.itemsize} bytes for each {assumed.name}, found {size}"
            )
        return np.memmap(path, dtype=assumed, mode="r")
    of_header = _HEADERS.get((header[0], header[1]))
    if of_header is None:
        raise DataError(f"{path}: expected llm.c's version 1 or 7 in its header, found version {header[1]}")
    expected = _HEADER_BYTES + header[2] * of_header.itemsize
    if header[2] < 1 or size != expected:
        raise DataError(
            f"{path}: expected {header[2]} tokens as its header says, {expected} bytes, found {size} bytes"
        )
    return np.memmap(path, dtype=of_header, mode="r", offset=_HEADER_BYTES)


def _are_ids(head: bytes, dtype: TokenType, vocab_size: int) -> bool:
    """Whether a file that begins with `head` can be ids of `dtype`; two ids read as one are too large."""
    width = np.dtype(dtype).itemsize
    ids = np.frombuffer(head[: len(head) // width * width], np.dtype(dtype).newbyteorder("<"))
    return len(ids) > 0 and ids.min() >= 0 and ids.max() < vocab_size


_PLAIN_PICKLE = re.compile(
    "PROTO|FRAME|STOP|MARK|MEMOIZE|(LONG_|BIN|LONG_BIN)?(PUT|GET)|NONE|NEW(TRUE|FALSE)|(BIN)?INT[12]?|LONG[14]?"
    "|(BIN)?FLOAT|(SHORT_)?(BIN)?UNICODE8?|(EMPTY_)?(DICT|LIST|TUPLE)[123]?|SETITEMS?|APPENDS?"
)
"""Pickle instructions that build containers of strings and numbers. Others might import or call code."""


def read_characters(inputs: Sequence[str]) -> dict[Path, list[str]]:
    """Reads the `itos` of each nanoGPT `meta.pkl` in or beside the inputs: the characters of ids 0, 1, ….

    Raises DataError for a pickle of more than strings, numbers and containers, and for other content.
    """
    folders = [Path(entry) if Path(entry).is_dir() else Path(entry).parent for entry in inputs]
    found = {}
    for path in dict.fromkeys(folder / "meta.pkl" for folder in folders):
        if not path.exists():
            continue
        content = read_data(path)
        try:
            for instruction, _, _ in pickletools.genops(content):
                if not _PLAIN_PICKLE.fullmatch(instruction.name):
                    raise ValueError(f"the pickle instruction {instruction.name}, which may run code")
            # C's unpickler would allocate as many entries as an index in the file asks for
            table = pickle._Unpickler(io.BytesIO(content)).load().get("itos")
            characters = [] if table is None else [table[index] for index in range(len(table))]
            if wrong := [each for each in characters if len(each.encode().decode()) != 1]:
                raise ValueError(f"{wrong[0]!r:.40} in itos")
        except Exception as error:  # a broken pickle raises many types of exception
            raise DataError(
                f"{path}: expected nanoGPT's characters by id (itos), found: {reason_of(error):.200}; "
                "move the file away if --tokenizer names the tokenizer that wrote the ids"
            ) from error
        if characters:
            found[path] = characters
    return found


_OF_SPLIT = re.compile(rf"(.*[_.-])?({'|'.join(SPLITS)})([_.\d-].*)?", re.IGNORECASE)


def find_tokenizer(inputs: Sequence[str]) -> Path | None:
    """The folder `tokenizer` in or beside the inputs, None if there is none."""
    for entry in inputs:
        for folder in (Path(entry) / "tokenizer", Path(entry).parent / "tokenizer"):
            if (folder / "tokenizer.json").is_file():
                return folder
    return None


@dataclass
class ConversionReport:
    """Counts of a conversion: `documents` and `tokens` written per split, `tokens_read`,
    `first_tokens_added`, `empty_documents` left out. `unended` names files that have no end of a
    document, and each of them became one; `left_out` those of a test split."""

    documents: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    tokens_read: int = 0
    first_tokens_added: int = 0
    empty_documents: int = 0
    unended: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def convert(
    input: Sequence[str],
    output: str | Path,
    *,
    tokenizer: str | Path | None = None,
    dtype: TokenType | None = None,
    validation_fraction: float = 0.01,
) -> ConversionReport:
    """Converts; a failed conversion leaves nothing behind. Raises DataError and ConfigError.

    Documents that lack the first token that `prepare` writes (bos, or eos where there is none) get it, and
    those without text are left out.

    Args:
        input: Files, or folders of them.
        output: The new store's folder.
        tokenizer: The folder of the tokenizer that wrote the ids (default: the folder `tokenizer` that lies
            with the input, else nanoGPT's meta.pkl).
        dtype: Type of the ids in files without a header (default: uint16; refused if another one fits).
        validation_fraction: Share of the documents, chosen by hash, that is kept for validation where no file
            is named so.
    """
    check_fraction(validation_fraction)
    output = Path(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise DataError(f"{output}: expected a new or empty folder, found one in use; choose another")
    characters = read_characters(input)
    with tempfile.TemporaryDirectory(prefix="llm_pretrain-") as temporary:
        folder = tokenizer or find_tokenizer(input)
        if folder is None and characters:
            folder = Path(temporary)
            write_files(folder, nanogpt_tokenizer(next(iter(characters.values()))), chat=False, model=None)
        if folder is None:
            raise ConfigError(
                f"--tokenizer: expected the folder of the tokenizer that wrote {input[0]}, found none"
            )
        opened = open_tokenizer(convert_tokenizer(Path(folder), Path(temporary) / "tokenizer"))
        _check_characters(characters, opened)
        report = ConversionReport()
        reader = _Reader(opened, report, dtype)
        _convert(input, output, reader, validation_fraction, known=bool(characters))
        return report


def _check_characters(characters: dict[Path, list[str]], tokenizer: Tokenizer) -> None:
    """Raises DataError if the tokenizer and a `meta.pkl` give an id different texts."""
    pieces = tokenizer.token_pieces()
    for path, texts in characters.items():
        for index, text in enumerate(texts):
            piece = pieces[index] if index < len(pieces) else b""
            if piece != text.encode():
                raise DataError(
                    f"{path}: expected the text of the tokenizer, found id {index} as {text!r} instead of "
                    f"{piece.decode(errors='replace')!r}; without --tokenizer this file gives the tokenizer"
                )


def _convert(inputs: Sequence[str], output: Path, reader: _Reader, fraction: float, *, known: bool) -> None:
    """Writes the store. `known`: the reader's tokenizer certainly wrote the ids, so `unended` stays empty."""
    tokenizer, report = reader.tokenizer, reader.report
    splits = reader.open_splits(inputs)
    threshold = None
    if "all" in splits:
        hashing = _Reader(tokenizer, ConversionReport())
        threshold = _threshold(hashing, splits["all"], fraction)
    if not known:
        files = [f for each in splits.values() for f in each if len(f.offsets) == 2]
        report.unended += [file.name for file in files if int(file.tokens[-1]) != tokenizer.eos_token_id]
    pieces, piece_bytes, packed = tokenizer.token_pieces(), tokenizer.token_bytes(), ZlibRate()
    with StoreWriter(output, tokenizer) as store:
        for name, files in splits.items():
            for batch in reader.batches(files):
                parts = {name: batch} if threshold is None else batch.divided(threshold)
                for split, part in parts.items():
                    mask = np.ones(len(part.ids), dtype=np.bool_)
                    text_bytes = int(piece_bytes[part.ids].sum())
                    store.splits[split].append(part.ids, part.lengths, mask, text_bytes, part.hashes())
                    if split == "validation" and not packed.is_full:
                        packed.add(b"".join(pieces[token] for token in part.ids.tolist()))
                    report.documents[split] += len(part.lengths)
                    report.tokens[split] += len(part.ids)
        if not report.documents.total():
            raise DataError(f"{', '.join(inputs)}: expected documents, found none")
        if not reader.has_text:
            raise DataError(
                f"{', '.join(inputs)}: expected ids of text, found special and byte tokens alone; "
                "--tokenizer must name the tokenizer that wrote them"
            )
        store.commit(
            {
                "converted": True,
                "inputs": [Path(name).name for name in inputs],
                "validation_fraction": None if threshold is None else fraction,
                "on_error": "fail",
                "skipped": {"empty document": report.empty_documents} if report.empty_documents else {},
                "altered_documents": 0,
                "zlib_bits_per_byte": packed.bits_per_byte(),
            }
        )


@dataclass(frozen=True)
class _Batch:
    ids: np.ndarray
    lengths: np.ndarray

    def hashes(self) -> np.ndarray:
        """Hashes the ids of each document, uint64 [documents]: equal documents get into the same split."""
        content = memoryview(self.ids.astype("<u4").tobytes())
        ends = np.cumsum(self.lengths) * 4
        digests = [
            hashlib.sha256(content[end - 4 * n : end]).digest()[:8]
            for end, n in zip(ends.tolist(), self.lengths.tolist(), strict=True)
        ]
        return np.frombuffer(b"".join(digests), dtype=">u8").astype(np.uint64)

    def chosen(self, which: np.ndarray) -> _Batch:
        """The documents selected by `which` bool [documents]."""
        return _Batch(self.ids[np.repeat(which, self.lengths)], self.lengths[which])

    def divided(self, threshold: int) -> dict[str, _Batch]:
        validation = self.hashes() < np.uint64(threshold)
        return {"train": self.chosen(~validation), "validation": self.chosen(validation)}


class _Reader:
    """Reads documents in batches, checks their ids, and adds the first token to those that lack it.

    `has_text` is True after the first id that is neither a special token nor a byte of an unknown character.
    It is True from the start if the tokenizer has no such ids.
    """

    def __init__(self, tokenizer: Tokenizer, report: ConversionReport, dtype: TokenType | None = None):
        self.tokenizer, self.report = tokenizer, report
        self._dtype: TokenType | None = dtype
        self._is_special = np.zeros(tokenizer.vocab_size, dtype=np.bool_)
        self._is_special[sorted(tokenizer.special_ids)] = True
        self._is_text = ~self._is_special
        self._is_text[tokenizer.byte_ids()] = False
        self.has_text = not self._is_text.any()

    def open_splits(self, inputs: Sequence[str]) -> dict[str, list[DocumentFile]]:
        """Returns {"train": …, "validation": …} if the file names tell these apart, else {"all": …}.

        A folder stands for its `.bin` and `.npy` files, by name; those named as a test split are left out
        where there are others. Raises DataError like `open_nanogpt`.
        """
        found: dict[str, list[DocumentFile]] = {"train": [], "validation": [], "test": []}
        for entry in map(Path, inputs):
            paths = sorted([*entry.glob("*.bin"), *entry.glob("*.npy")]) if entry.is_dir() else [entry]
            if not paths:
                raise DataError(f"{entry}: expected a folder with .bin or .npy files, found none in it")
            for path in paths:
                match = _OF_SPLIT.fullmatch(path.stem)
                split = SPLITS[match[2].lower()] if match else "train"
                found[split].append(open_nanogpt(path, self.tokenizer, self._dtype))
        if found["train"]:
            self.report.left_out += [file.name for file in found.pop("test")]
        return found if all(found.values()) else {"all": [file for each in found.values() for file in each]}

    def batches(self, files: Sequence[DocumentFile]) -> Iterator[_Batch]:
        for file in files:
            position = 0
            for ids, lengths in file.batches():
                advice = "were they written with another tokenizer, or another --dtype?"
                check_ids(ids, self.tokenizer.vocab_size, file.name, position, advice)
                position += len(ids)
                self.report.tokens_read += len(ids)
                self.has_text = self.has_text or bool(self._is_text[ids].any())
                yield self._framed(_Batch(ids.astype(np.uint32), lengths))

    def _framed(self, batch: _Batch) -> _Batch:
        """Leaves out documents without text; the others get the first token of `prepare` if they lack it."""
        if not len(batch.lengths):
            return batch
        starts = np.cumsum(batch.lengths) - batch.lengths
        text = np.add.reduceat((~self._is_special[batch.ids]).astype(np.int64), starts) > 0
        self.report.empty_documents += int(np.count_nonzero(~text))
        batch = batch.chosen(text)
        starts = np.cumsum(batch.lengths) - batch.lengths
        bos = self.tokenizer.bos_token_id
        first = self.tokenizer.eos_token_id if bos is None else bos
        assert first is not None  # open_tokenizer refuses a tokenizer without EOS
        lacking = batch.ids[starts] != first
        self.report.first_tokens_added += int(np.count_nonzero(lacking))
        return _Batch(np.insert(batch.ids, starts[lacking], first), batch.lengths + lacking)


def _threshold(reader: _Reader, files: Sequence[DocumentFile], fraction: float) -> int:
    """Hash below which documents are validation."""
    hashes = np.concatenate([np.zeros(0, np.uint64), *(batch.hashes() for batch in reader.batches(files))])
    lowest, highest = (int(hashes.min()), int(hashes.max())) if len(hashes) else (0, 0)
    return fitting_threshold(int(fraction * HASHES), lowest, highest)
