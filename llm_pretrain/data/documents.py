"""Reads corpora into documents: jsonl, plain text files, folders of both, and the standard library.

Reading is split in two, so that the slow half can run in many processes: `read_records` finds files and
cuts them into raw records, `parse_record` turns one raw record into a document. Knows no tokenizer.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_pretrain.errors import DataError

STDLIB = "stdlib"
"""The input that stands for the source text of the installed Python standard library."""

_STDLIB_EXCLUDED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_JSONL_SUFFIXES = {".jsonl", ".ndjson"}
_REFUSED_SUFFIXES = {".gz", ".zst", ".bz2", ".xz", ".zip", ".parquet", ".arrow", ".csv", ".tsv"}


@dataclass(frozen=True, slots=True)
class RawRecord:
    """A record as it lies in a file: `line` counts from 1, and is 0 where the whole file is the record."""

    name: str
    line: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Document:
    """A document, either as text in segments or as token ids.

    `segments` holds (text, whether it is a target of the loss); `input_ids` and `loss_mask` are set instead
    where the record holds tokens. `location` is `file:line`, for messages.
    """

    location: str
    segments: tuple[tuple[str, bool], ...] = ()
    input_ids: list[int] | None = None
    loss_mask: list[int] | None = None


class RecordError(Exception):
    """A record that cannot be trained on: `cause` is the kind that is counted, the text says it in full."""

    def __init__(self, cause: str, location: str, detail: str):
        self.cause = cause
        super().__init__(f"{location}: {cause}: {detail}")


EMPTY = "empty document"
"""The one cause that is never an error: there is nothing to learn from no text."""


def find_files(inputs: Sequence[str]) -> list[tuple[str, Path]]:
    """(name for messages, path) of every file of `inputs`, folders in the order of their sorted paths.

    Raises DataError for a path that does not exist, a folder without files, and formats that are not read.
    """
    files: list[tuple[str, Path]] = []
    for entry in inputs:
        path = Path(entry)
        if entry == STDLIB:
            files += _stdlib_files()
        elif path.is_dir():
            found = _visible_files(path)
            if not found:
                raise DataError(f"{entry}: expected a folder with .jsonl or text files, found none in it")
            files += [(str(file), file) for file in found]
        elif path.is_file():
            files.append((entry, path))
        else:
            raise DataError(f"{entry}: expected a file, a folder or `{STDLIB}`, found no such path")
    for name, path in files:
        if path.suffix.lower() in _REFUSED_SUFFIXES:
            raise DataError(
                f"{name}: expected .jsonl or plain text, found a {path.suffix} file; convert it to jsonl"
            )
    return files


def _visible_files(folder: Path) -> list[Path]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    visible = [p for p in files if not any(part.startswith(".") for part in p.relative_to(folder).parts)]
    return sorted(visible, key=lambda path: path.relative_to(folder).as_posix())


def _stdlib_files() -> list[tuple[str, Path]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    named = ((path.relative_to(root).as_posix(), path) for path in root.rglob("*.py"))
    return sorted((name, path) for name, path in named if not _STDLIB_EXCLUDED & set(name.split("/")))


def read_records(inputs: Sequence[str]) -> Iterator[RawRecord]:
    """The raw records of `inputs` in order, one line of a jsonl file or one whole text file at a time."""
    for name, path in find_files(inputs):
        try:
            if path.suffix.lower() in _JSONL_SUFFIXES:
                with path.open("rb") as file:
                    for line, data in enumerate(file, start=1):
                        if not data.isspace():
                            yield RawRecord(name, line, data)
            else:
                yield RawRecord(name, 0, path.read_bytes())
        except OSError as error:
            raise DataError(f"{name}: expected a readable file, found: {error.strerror}") from error


def batch_records(records: Iterator[RawRecord], batch_bytes: int) -> Iterator[list[RawRecord]]:
    """Groups records into lists of about `batch_bytes`; the grouping depends on the records alone."""
    batch: list[RawRecord] = []
    size = 0
    for record in records:
        batch.append(record)
        size += len(record.data)
        if size >= batch_bytes:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def parse_record(record: RawRecord) -> Document:
    """The document of a raw record.

    A jsonl record is `{"text"}`, `{"prompt", "completion"}` (only the completion is a target) or
    `{"input_ids", "loss_mask"}` (stored as it is; without a mask every token is a target).
    Raises RecordError.
    """
    location = f"{record.name}:{record.line}" if record.line else record.name
    try:
        text = record.data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = record.line or record.data.count(b"\n", 0, error.start) + 1
        found = f"found byte 0x{record.data[error.start]:02x} at offset {error.start}"
        raise RecordError("invalid UTF-8", f"{record.name}:{line}", found) from error
    if not record.line:
        return _text_document(location, ((text, True),))
    try:
        fields = json.loads(text.removeprefix("\ufeff").rstrip("\r\n"))  # so that a cut string is called so
    except (ValueError, RecursionError) as error:
        found = str(error) or "nesting too deep"
        if isinstance(error, json.JSONDecodeError):
            found = f"{error.msg.removesuffix(' at')} at column {error.colno}"
        detail = f"expected one JSON object per line, found: {found}"
        raise RecordError("invalid JSON", location, detail) from error
    if not isinstance(fields, dict):
        raise RecordError("wrong type", location, f"expected a JSON object, found {_kind(fields)}")
    return _document_of_fields(location, fields)


def _document_of_fields(location: str, fields: dict[str, Any]) -> Document:
    if "text" in fields:
        return _text_document(location, ((_string(location, fields, "text"), True),))
    if "prompt" in fields and "completion" in fields:
        prompt = _string(location, fields, "prompt")
        return _text_document(location, ((prompt, False), (_string(location, fields, "completion"), True)))
    if "input_ids" in fields:
        return _token_document(location, fields)
    found = ", ".join(sorted(fields)) or "no field at all"
    raise RecordError(
        "no text", location, f"expected text, prompt and completion, or input_ids; found {found}"
    )


def _text_document(location: str, segments: tuple[tuple[str, bool], ...]) -> Document:
    text = "".join(part for part, _ in segments)
    if not text:
        raise RecordError(EMPTY, location, "found no text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        detail = f"found the lone surrogate U+{ord(text[error.start]):04X}"
        raise RecordError("invalid UTF-8", location, detail) from error
    return Document(location, segments=segments)


def _token_document(location: str, fields: dict[str, Any]) -> Document:
    ids = fields["input_ids"]
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise RecordError("wrong type", location, "expected input_ids to be a list of integers")
    mask = fields.get("loss_mask")
    if mask is None:
        mask = [1] * len(ids)
    elif not isinstance(mask, list) or not all(type(m) in (int, bool) and m in (0, 1) for m in mask):
        raise RecordError("wrong type", location, "expected loss_mask to be a list of 0 and 1")
    if len(mask) != len(ids):
        detail = f"expected a loss_mask as long as input_ids ({len(ids)}), found {len(mask)}"
        raise RecordError("wrong length", location, detail)
    if not ids:
        raise RecordError(EMPTY, location, "found no token ids")
    return Document(location, input_ids=ids, loss_mask=mask)


def _string(location: str, fields: dict[str, Any], key: str) -> str:
    value = fields[key]
    if not isinstance(value, str):
        raise RecordError("wrong type", location, f"expected {key} to be a string, found {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    names = {type(None): "null", dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return names.get(type(value), "a number")
