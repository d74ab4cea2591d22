"""Cuts files of every kind into raw records, in order and in bounded memory.

Knows no tokenizer and does not look into records: `documents.py` does, in many processes.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from llm_pretrain.data.inputs import DELIMITERS, LINE_SUFFIXES, TABLE_SUFFIXES, Source, find_sources
from llm_pretrain.data.records import BROKEN, RawRecord, bad_record
from llm_pretrain.data.stdlib_chat import conversations
from llm_pretrain.data.tables import choose_columns, hub_records, table_records
from llm_pretrain.errors import DataError

_DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)
_CHUNK = 1 << 20


def read_records(
    inputs: Sequence[str], *, text_column: str = "text", after: tuple[int, int] = (0, -1)
) -> Iterator[RawRecord]:
    """The raw records of `inputs` in order; see `read_sources`."""
    yield from read_sources(find_sources(inputs), text_column=text_column, after=after)


def read_sources(
    sources: Sequence[Source], *, text_column: str = "text", after: tuple[int, int] = (0, -1)
) -> Iterator[RawRecord]:
    """The raw records of `sources` in order, beginning after (source, line) of the last one known.

    What cannot be read of a damaged file becomes one bad record. Raises DataError for a file that cannot be
    opened and for a table without a column to train on.
    """
    for index, source in enumerate(sources):
        if index < after[0]:
            continue
        last = after[1] if index == after[0] else -1
        try:
            for record in _read_source(index, source, text_column):
                if record.line > last:
                    yield record
        except OSError as error:
            raise DataError(
                f"{source.name}: expected a readable file, found: {error.strerror or error}"
            ) from error


def batch_records(records: Iterable[RawRecord], batch_bytes: int) -> Iterator[list[RawRecord]]:
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


def _read_source(index: int, source: Source, text_column: str) -> Iterator[RawRecord]:
    if source.path is None:
        yield from hub_records(index, source.name, text_column)
    elif source.conversations:
        for line, data in conversations(source.name, source.path):
            yield RawRecord(source.name, line, data, "json", index)
    elif source.format() in TABLE_SUFFIXES:
        yield from table_records(index, source.name, source.path, source.compression(), text_column)
    else:
        last = 0
        try:
            with open_binary(source.path, source.compression()) as file:
                for record in _records_of_stream(index, source, file, text_column):
                    last = record.line
                    yield record
        except (*_DAMAGE, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # not readable at all; bz2 has no error of its own for damage
            yield bad_record(source.name, last + 1, BROKEN, str(error), index)


def open_binary(path: Path, compression: str) -> Any:
    """The file's own bytes, decompressed. Reading raises one of `_DAMAGE` where they end too soon."""
    if compression == ".gz":
        return gzip.open(path, "rb")
    if compression == ".bz2":
        return bz2.open(path, "rb")
    if compression == ".xz":
        return lzma.open(path, "rb")
    if compression == ".zst":
        return io.BufferedReader(_ZstandardFile(path), _CHUNK)
    return path.open("rb")


class _ZstandardFile(io.RawIOBase):
    """Frame after frame of a .zst file; unlike the library's own reader it minds where the last one ends."""

    def __init__(self, path: Path):
        import zstandard

        self._file = path.open("rb")
        self._new_frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj
        self._frame = self._new_frame()
        self._error = zstandard.ZstdError
        self._begun = False
        self._rest = self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._ready:
            data = self._rest or self._file.read(1 << 17)
            self._rest = b""
            if not data:
                if self._begun:
                    raise EOFError("the last zstandard frame is cut short")
                return 0
            try:
                self._ready = self._frame.decompress(data)
            except self._error as error:
                raise EOFError(str(error)) from error
            self._begun = not self._frame.eof
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, self._new_frame()
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def close(self) -> None:
        self._file.close()
        super().close()


def _records_of_stream(index: int, source: Source, file: BinaryIO, text_column: str) -> Iterator[RawRecord]:
    suffix, name = source.format(), source.name
    if suffix in LINE_SUFFIXES:
        return _lines(index, name, file)
    if suffix == ".json":
        return _json_file(index, name, file)
    if suffix in DELIMITERS:
        return _delimited(index, name, file, DELIMITERS[suffix], text_column)
    return iter([RawRecord(name, 0, file.read(), "text", index)])


def _lines(index: int, name: str, file: Iterable[bytes]) -> Iterator[RawRecord]:
    for line, data in enumerate(file, start=1):
        if not data.isspace():
            yield RawRecord(name, line, data, "json", index)


def _json_file(index: int, name: str, file: Any) -> Iterator[RawRecord]:
    """A .json file: an array of records, one record per line (as many data sets have it), or one record."""
    head = file.peek(_CHUNK).removeprefix(b"\xef\xbb\xbf").lstrip()
    if head.startswith(b"["):
        return _elements(index, name, file)
    first = file.readline()
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return iter([RawRecord(name, 1, first + file.read(), "json", index)])
    return _lines(index, name, chain([first], file))


def _elements(index: int, name: str, file: BinaryIO) -> Iterator[RawRecord]:
    """The elements of a JSON array, counted from 1. After a broken one nothing can be told apart."""
    number = 0
    try:
        with io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
            window = _JsonWindow(stream)
            window.take("[")
            while number or window.next() != "]":
                data = window.value()
                number += 1
                yield RawRecord(name, number, data.encode("utf-8", "surrogateescape"), "json", index)
                if window.take(",]") == "]":
                    break
            else:
                window.take("]")
            if window.next():
                raise ValueError("more text behind its end")
    except (ValueError, RecursionError) as error:
        detail = f"expected a JSON array, found: {str(error) or 'nesting too deep'}"
        yield bad_record(name, number + 1, "invalid JSON", detail, index)


class _JsonWindow:
    """The part of a long JSON text that is being looked at; it grows to the longest value and no further."""

    def __init__(self, stream: io.TextIOBase):
        self._stream = stream
        self._text = ""
        self._position = 0
        self._scan = json.JSONDecoder().raw_decode

    def next(self) -> str:
        """The next character that is no space, or an empty string at the end."""
        while True:
            while self._position < len(self._text):
                if not self._text[self._position].isspace():
                    return self._text[self._position]
                self._position += 1
            if not self._grow():
                return ""

    def take(self, expected: str) -> str:
        """Passes over one of the characters `expected`, and returns it."""
        found = self.next()
        if not found or found not in expected:
            raise ValueError(f"{found or 'the end'} in place of {' or '.join(expected)}")
        self._position += 1
        return found

    def value(self) -> str:
        """Passes over one value, and returns its text."""
        self.next()
        while True:
            try:
                _, end = self._scan(self._text, self._position)
                if end < len(self._text):  # else a number might go on
                    break
            except ValueError as error:
                if not self._grow():
                    raise ValueError(str(error).split(":")[0]) from error
                continue
            if not self._grow():
                break
        text, self._position = self._text[self._position : end], end
        return text

    def _grow(self) -> bool:
        """Reads as much again as is held, so that the time for a long value stays linear."""
        kept = self._text[self._position :]
        more = self._stream.read(max(_CHUNK, len(kept)))
        self._text, self._position = kept + more, 0
        return bool(more)


def _delimited(
    index: int, name: str, file: BinaryIO, delimiter: str, text_column: str
) -> Iterator[RawRecord]:
    """Rows of a .csv or .tsv file under the names of its first line; `line` is that of the row's end."""
    csv.field_size_limit(sys.maxsize)
    with io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
        rows = csv.reader(stream, delimiter=delimiter, strict=True)
        try:
            header = next(rows, None)
        except csv.Error as error:
            raise DataError(f"{name}:1: expected the names of the columns, found: {error}") from error
        columns = choose_columns(name, header, text_column) if header else []
        while header:
            try:
                row = next(rows, None)
            except csv.Error as error:
                yield bad_record(name, rows.line_num, "invalid CSV", str(error), index)
                continue
            if row is None:
                return
            if len(row) == len(header):
                fields = {column: row[header.index(column)] for column in columns}
                yield _record_of_row(index, name, rows.line_num, fields, text_column)
            elif row:
                detail = f"expected {len(header)} columns, found {len(row)}"
                yield bad_record(name, rows.line_num, "wrong number of columns", detail, index)


def _record_of_row(index: int, name: str, line: int, fields: dict[str, str], text_column: str) -> RawRecord:
    if text_column in fields:
        return RawRecord(name, line, fields[text_column].encode("utf-8", "surrogateescape"), "text", index)
    data = json.dumps(fields, ensure_ascii=False).encode("utf-8", "surrogateescape")
    return RawRecord(name, line, data, "json", index)
