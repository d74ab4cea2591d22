"""Reads tables with pyarrow: parquet, both Arrow IPC formats, hub data sets.

A text column is passed through; other columns become one JSON object per row, as in a jsonl file.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from llm_pretrain.data.documents import BROKEN, RawRecord, bad_record
from llm_pretrain.data.inputs import hub_tables
from llm_pretrain.errors import DataError, ResourceError
from llm_pretrain.files import open_plain

BATCH_BYTES = 16 << 20
"""Approximate size of the decoded batches of a parquet file."""
_MOST_ROWS = 16
"""Most rows in a batch of a parquet file. The file stores a repeated value once, memory once per row."""

_FORMS = (
    (("prompt", "completion"), ()),
    (("messages",), ("tools",)),
    (("conversations",), ("tools",)),
    (("segments",), ()),
    (("input_ids",), ("loss_mask", "labels", "attention_mask")),
)
"""(required, optional) columns of each form of document."""
_CHAT = {"messages", "conversations", "tools"}


def choose_columns(name: str, columns: Sequence[str], text_column: str) -> list[str]:
    """Chooses the columns that form a document. Raises DataError if none do, or one of them occurs twice."""
    for needed, optional in (((text_column,), ()), *_FORMS):
        if set(needed) <= set(columns):
            chosen = [*needed, *(column for column in optional if column in columns)]
            for column in chosen:
                if (count := columns.count(column)) > 1:
                    raise DataError(f"{name}: expected one column {column}, found {count}; rename the others")
            return chosen
    forms = ", ".join([text_column, *(" and ".join(needed) for needed, _ in _FORMS)])
    found = " ".join(", ".join(columns).split()) or "none"  # without a header, these words are text
    raise DataError(
        f"{name}: expected one of the columns {forms}; found {found:.300}; "
        "name the column of the text with --text_column"
    )


def table_records(
    index: int, name: str, path: Path, compression: str, text_column: str
) -> Iterator[RawRecord]:
    """The rows of a .parquet, .arrow or .feather file, counted from 1."""
    import pyarrow

    if compression:
        raise DataError(
            f"{name}: expected a table that is not compressed as a whole, found {compression}; unpack it"
        )
    row = 0
    open_plain(path).close()  # a pipe that has taken the file's place would never end
    with _TableFile(io.FileIO(path)) as file:
        try:
            is_parquet = path.suffix.lower() == ".parquet"
            read = _parquet if is_parquet else _ipc
            batches = read(file, name, text_column)
            columns = None
            for batch in batches:
                columns = columns or choose_columns(name, batch.schema.names, text_column)
                yield from _rows(index, name, batch, columns, text_column, row)
                row += batch.num_rows
        except MemoryError as error:  # before ArrowException: pyarrow's error is both
            raise ResourceError(
                f"{name}: expected memory for the rows after row {row}, found too little ({error}); "
                "use a machine with more, or leave the file out if it is damaged"
            ) from error
        except (pyarrow.ArrowException, EOFError, OSError, ValueError, TypeError, ArithmeticError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            yield bad_record(name, row + 1 if row else 0, BROKEN, str(error), index)


class _TableFile(io.BufferedReader):
    """A file that reads no more bytes than it has left: a damaged length may ask for more than the memory."""

    def read(self, size: int | None = -1, /) -> bytes:
        rest = max(os.fstat(self.fileno()).st_size - self.tell(), 0)
        return super().read(rest if size is None or size < 0 else min(size, rest))


def hub_records(index: int, name: str, text_column: str) -> Iterator[RawRecord]:
    """The rows of a data set on the hub, counted from 1."""
    row = 0
    for table in hub_tables(name):
        columns = choose_columns(name, table.column_names, text_column)
        for batch in table.to_batches():
            yield from _rows(index, name, batch, columns, text_column, row)
            row += batch.num_rows


def _parquet(file: BinaryIO, name: str, text_column: str) -> Iterator[Any]:
    """Yields the needed columns in record batches of about `BATCH_BYTES`, whatever the size of row groups."""
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False)
    groups = [table.metadata.row_group(k) for k in range(table.num_row_groups)]
    size = max((group.total_byte_size // max(group.num_rows, 1) for group in groups), default=1)
    columns = choose_columns(name, table.schema_arrow.names, text_column)
    rows = min(max(BATCH_BYTES // max(size, 1), 1), _MOST_ROWS)
    yield from table.iter_batches(batch_size=rows, columns=columns, use_threads=False)


def _ipc(file: BinaryIO, name: str, text_column: str) -> Iterator[Any]:
    """Record batches of Arrow's file format (begins with ARROW1) or stream format, with the needed columns.

    It validates the batches: pyarrow follows offsets of a damaged file beyond the end of the memory.
    """

    for batch in _ipc_batches(file):
        batch.validate()
        chosen = batch.select(choose_columns(name, batch.schema.names, text_column))
        if chosen.num_columns > 1 or _binary_type(chosen.column(0).type) is None:
            chosen.validate(full=True)
        yield chosen


def _ipc_batches(file: BinaryIO) -> Iterator[Any]:
    import pyarrow.ipc

    if file.read(6) == b"ARROW1":
        reader = pyarrow.ipc.open_file(file)
        yield from (reader.get_batch(k) for k in range(reader.num_record_batches))
        return
    file.seek(max(file.seek(0, io.SEEK_END) - 4, 0))
    complete = file.read(4) == bytes(4)  # a complete stream ends with a length of 0
    file.seek(0)
    yield from pyarrow.ipc.open_stream(file)
    if not complete:
        raise EOFError("the stream has no end mark")


def _rows(
    index: int, name: str, batch: Any, columns: list[str], text_column: str, before: int
) -> Iterator[RawRecord]:
    if columns == [text_column]:
        texts = _utf8(batch.column(text_column))
        if texts is not None:
            for row, text in enumerate(texts, start=before + 1):
                if text is None:
                    yield RawRecord(name, row, json.dumps({text_column: None}).encode(), "json", index)
                else:
                    yield RawRecord(name, row, text, "text", index)
            return
    chosen = batch.select(columns)
    for position in range(chosen.num_rows):
        row = before + position + 1
        try:
            fields = chosen.slice(position, 1).to_pylist()[0]
            for column in _CHAT & fields.keys():
                fields[column] = _without_nulls(fields[column])
            data = json.dumps(fields, ensure_ascii=False, default=_named).encode()
            yield RawRecord(name, row, data, "json", index)
        except UnicodeError as error:
            yield bad_record(name, row, "invalid UTF-8", str(error), index)


def _without_nulls(value: Any) -> Any:
    """Leaves out null fields: Arrow gives the objects of each row the fields of all rows."""
    if isinstance(value, dict):
        return {name: _without_nulls(field) for name, field in value.items() if field is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _named(value: Any) -> dict[str, str]:
    """Writes bytes, dates and other types as {type: value}, so that they are not mistaken for text."""
    return {type(value).__name__: str(value)}


def _utf8(column: Any) -> list[bytes | None] | None:
    """The values of a column of strings or bytes as bytes, without UTF-8 checks; None for another type."""
    binary = _binary_type(column.type)
    if binary is None:
        return None
    column = column.view(binary)
    column.validate(full=True)  # checks that offsets are within the data
    return column.to_pylist()


def _binary_type(kind: Any) -> Any:
    """The binary type with the memory layout of a string type; None for other types."""
    import pyarrow
    from pyarrow import types

    if types.is_string(kind) or types.is_binary(kind):
        return pyarrow.binary()
    if types.is_large_string(kind) or types.is_large_binary(kind):
        return pyarrow.large_binary()
    if types.is_string_view(kind) or types.is_binary_view(kind):
        return pyarrow.binary_view()
    return None
