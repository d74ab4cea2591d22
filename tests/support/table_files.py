"""Tables as the bytes of CSV, Parquet and Arrow files."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Any

import pyarrow
import pyarrow.parquet


def delimited(rows: Iterable[Iterable[object]], delimiter: str = ",") -> bytes:
    """CSV or TSV, the names of the columns first."""
    file = io.StringIO(newline="")
    csv.writer(file, delimiter=delimiter).writerows(rows)
    return file.getvalue().encode()


def parquet(table: pyarrow.Table, **options: Any) -> bytes:
    """Options are those of `pyarrow.parquet.write_table`."""
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, sink, **options)
    return sink.getvalue().to_pybytes()


def arrow(table: pyarrow.Table, *, stream: bool, rows: int = 7) -> bytes:
    """An Arrow stream or file, with `rows` to a batch."""
    sink = pyarrow.BufferOutputStream()
    new = pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
    with new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return sink.getvalue().to_pybytes()
