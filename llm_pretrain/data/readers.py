"""Cuts files of every kind into raw records, in order and in bounded memory.

Knows no tokenizer and does not look into records: `documents.py` does, in many processes.
"""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import BinaryIO

from llm_pretrain.data.compressed_files import DAMAGE, open_binary
from llm_pretrain.data.inputs import DELIMITERS, LINE_SUFFIXES, TABLE_SUFFIXES, Source, find_sources
from llm_pretrain.data.json_files import json_file, json_lines, lines_of
from llm_pretrain.data.records import (
    BROKEN,
    CHANGED,
    NUL,
    RECORD_BYTES,
    TOO_LARGE,
    UNREADABLE,
    RawRecord,
    bad_record,
)
from llm_pretrain.data.stdlib_chat import conversations
from llm_pretrain.data.tables import choose_columns, hub_records, table_records
from llm_pretrain.errors import DataError


def read_records(
    inputs: Sequence[str], *, text_column: str = "text", after: tuple[int, int] = (0, -1)
) -> Iterator[RawRecord]:
    """The raw records of `inputs` in order; see `read_sources`."""
    yield from read_sources(find_sources(inputs), text_column=text_column, after=after)


def read_sources(
    sources: Sequence[Source], *, text_column: str = "text", after: tuple[int, int] = (0, -1)
) -> Iterator[RawRecord]:
    """The raw records of `sources` in order, beginning after (source, line) of the last one known.

    What cannot be read of a damaged file becomes one bad record, as does a file that is not to be read at
    all, or changed meanwhile. Raises DataError for a table without a column to train on.
    """
    for index, source in enumerate(sources):
        if index < after[0]:
            continue
        last = after[1] if index == after[0] else -1
        for record in _read_source(index, source, text_column):
            if record.line > last:
                yield record


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
    name = source.name
    if source.path is None:
        yield from hub_records(index, name, text_column)
        return
    if source.fault:
        yield bad_record(name, 0, *source.fault, index)
        return
    last = -1
    try:
        for record in _records_of_file(index, source, text_column):
            last = record.line
            if len(record.data) > RECORD_BYTES:
                detail = f"expected at most {RECORD_BYTES} bytes in one record; cut it into documents"
                yield bad_record(name, last, TOO_LARGE, detail, index)
            else:
                yield record
    except (*DAMAGE, OSError) as error:
        # bz2 has no error of its own for damage
        number = error.errno if isinstance(error, OSError) else None
        unreadable = number is not None
        cause, detail = (UNREADABLE, f"found: {os.strerror(number)}") if unreadable else (BROKEN, str(error))
        line = 0 if unreadable and last < 0 else max(last, 0) + 1
        yield bad_record(name, line, cause, detail, index)
        return
    if change := source.change():
        yield bad_record(name, last + 1, CHANGED, change, index)


def _records_of_file(index: int, source: Source, text_column: str) -> Iterator[RawRecord]:
    assert source.path is not None
    if source.conversations:
        for line, data in conversations(source.name, source.path):
            yield RawRecord(source.name, line, data, "json", index)
    elif source.format() in TABLE_SUFFIXES:
        yield from table_records(index, source.name, source.path, source.compression(), text_column)
    else:
        with open_binary(source.path, source.compression()) as file:
            yield from _records_of_stream(index, source, file, text_column)


def _records_of_stream(index: int, source: Source, file: BinaryIO, text_column: str) -> Iterator[RawRecord]:
    suffix, name = source.format(), source.name
    if suffix in LINE_SUFFIXES:
        return json_lines(index, name, lines_of(file))
    if suffix == ".json":
        return json_file(index, name, file)
    if suffix in DELIMITERS:
        return _delimited(index, name, file, DELIMITERS[suffix], text_column)
    return iter([RawRecord(name, 0, file.read(RECORD_BYTES + 1), "text", index)])


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
    if any("\0" in field for field in fields.values()):
        return bad_record(name, line, NUL, "found one in the row; was its writer interrupted?", index)
    if text_column in fields:
        return RawRecord(name, line, fields[text_column].encode("utf-8", "surrogateescape"), "text", index)
    data = json.dumps(fields, ensure_ascii=False).encode("utf-8", "surrogateescape")
    return RawRecord(name, line, data, "json", index)
