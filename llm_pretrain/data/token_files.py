"""Reads token files of nanoGPT, llm.c and modded-nanogpt."""

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

import numpy as np

from llm_pretrain.errors import DataError
from llm_pretrain.files import open_plain, read_plain

BATCH_TOKENS = 1 << 20
"""Documents are read in groups of about this many tokens."""

_HEADER_BYTES = 1024
_HEADERS = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}
"""(magic, version) of a header of 256 int32, whose third number is the token count -> token dtype."""


@dataclass(frozen=True)
class DocumentFile:
    """Documents in a file: document d is tokens [offsets[d], offsets[d + 1]) of `tokens`, a memory map.

    `name` is for messages.
    """

    name: str
    tokens: np.ndarray
    offsets: np.ndarray

    def batches(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(ids, lengths) of groups of documents, in order, without empty documents."""
        offsets = self.offsets
        first = 0
        while first < len(offsets) - 1:
            limit = int(offsets[first]) + BATCH_TOKENS
            last = max(first + 1, int(np.searchsorted(offsets, limit, side="right")) - 1)
            ids = np.asarray(self.tokens[int(offsets[first]) : int(offsets[last])])
            lengths = np.diff(offsets[first : last + 1])
            yield ids, lengths[lengths > 0]
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
        return np.memmap(path, dtype="<u2", mode="r")
    dtype = _HEADERS.get((header[0], header[1]))
    if dtype is None:
        raise DataError(f"{path}: expected llm.c's version 1 or 7 in its header, found version {header[1]}")
    expected = _HEADER_BYTES + header[2] * dtype.itemsize
    if header[2] < 1 or size != expected:
        raise DataError(
            f"{path}: expected {header[2]} tokens as its header says, {expected} bytes, found {size} bytes"
        )
    return np.memmap(path, dtype=dtype, mode="r", offset=_HEADER_BYTES)


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


_VALIDATION = re.compile(r"(^|[_.-])val(id(ation)?)?([_.-]|$)")


def find_tokenizer(inputs: Sequence[str]) -> Path | None:
    """The folder `tokenizer` in or beside the inputs, None if there is none."""
    for entry in inputs:
        for folder in (Path(entry) / "tokenizer", Path(entry).parent / "tokenizer"):
            if (folder / "tokenizer.json").is_file():
                return folder
    return None


def open_splits(inputs: Sequence[str], end_of_document: int) -> dict[str, list[DocumentFile]]:
    """{"train": …, "validation": …}, or {"all": …} if no file names a validation split.

    A folder stands for the `.bin` files in it, in the order of their names. Raises DataError for other files.
    """
    found: dict[str, list[DocumentFile]] = {"train": [], "validation": []}
    for entry in inputs:
        paths = sorted(Path(entry).glob("*.bin")) if Path(entry).is_dir() else [Path(entry)]
        if not paths:
            raise DataError(f"{entry}: expected a folder with .bin files, found none in it")
        for path in paths:
            split = "validation" if _VALIDATION.search(path.name) else "train"
            found[split].append(open_nanogpt(path, end_of_document))
    if found["train"] and found["validation"]:
        return found
    return {"all": found["train"] + found["validation"]}
