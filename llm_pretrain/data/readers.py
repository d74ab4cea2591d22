"""Reads files of every format and compression into raw records, in order."""

from __future__ import annotations

import ast
import bz2
import csv
import gzip
import io
import json
import lzma
import os
import re
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any, BinaryIO, Literal

from llm_pretrain.data.documents import (
    BROKEN,
    CHANGED,
    NUL,
    RECORD_BYTES,
    TOO_LARGE,
    UNREADABLE,
    RawRecord,
    RecordError,
    bad_record,
    parse_record,
)
from llm_pretrain.data.inputs import LINES_SUFFIXES, TABLE_SUFFIXES, Source, find_sources
from llm_pretrain.data.tables import choose_columns, hub_records, table_records
from llm_pretrain.errors import DataError
from llm_pretrain.files import open_plain
from llm_pretrain.text import reason_of

DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error)
"""Raised when a damaged compressed file is read."""

_READ_BYTES = 1 << 20
_COMPRESSED_BYTES = 1 << 12
"""Bytes read at a time: few, since each compressed byte can expand to tens of thousands of bytes."""


def open_binary(path: Path, compression: str) -> Any:
    """Opens a file to read it decompressed. A truncated or empty compressed file raises one of `DAMAGE`."""
    open_plain(path).close()  # a pipe that has taken the file's place would never end
    if compression and not path.stat().st_size:
        raise EOFError("found no bytes, which no compressed file is")
    if compression == ".gz":
        return gzip.open(path, "rb")
    if compression == ".bz2":
        return io.BufferedReader(_StreamsFile(path, bz2.BZ2Decompressor, OSError), _READ_BYTES)
    if compression == ".xz":
        file = _StreamsFile(path, lzma.LZMADecompressor, lzma.LZMAError, padding=b"\0")
        return io.BufferedReader(file, _READ_BYTES)
    if compression == ".zst":
        import zstandard

        new_frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj
        return io.BufferedReader(_StreamsFile(path, new_frame, zstandard.ZstdError), _READ_BYTES)
    return path.open("rb", _READ_BYTES)


class _StreamsFile(io.RawIOBase):
    """Reads all streams of a compressed file; the libraries' readers may end without an error at damage.

    Args:
        path: The file.
        new_stream: Makes a decompressor of one stream, such as `bz2.BZ2Decompressor`.
        error: Exception that the decompressor raises for damage.
        padding: Byte that may follow a stream, any number of times.
    """

    def __init__(
        self, path: Path, new_stream: Callable[[], Any], error: type[Exception], padding: bytes = b""
    ):
        self._file, self._new_stream, self._error = path.open("rb"), new_stream, error
        self._padding = padding
        self._stream = new_stream()
        self._begun = True  # a file without any stream is cut short
        self._rest = self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._ready:
            data = self._rest or self._file.read(_COMPRESSED_BYTES)
            self._rest = b""
            if not data:
                if self._begun:
                    raise EOFError("the last compressed stream is cut short")
                return 0
            if not self._begun and self._padding and not (data := data.lstrip(self._padding)):
                continue
            try:
                self._ready = self._stream.decompress(data)
            except self._error as error:
                raise EOFError(str(error)) from error
            self._begun = not self._stream.eof
            if self._stream.eof:
                self._rest, self._stream = self._stream.unused_data, self._new_stream()
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def close(self) -> None:
        self._file.close()
        super().close()


_CHUNK = 1 << 20


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Yields the lines of a file; cuts a line longer than RECORD_BYTES after RECORD_BYTES + 1 bytes."""
    while line := file.readline(RECORD_BYTES + 1):
        is_cut = len(line) > RECORD_BYTES and not line.endswith(b"\n")
        yield line
        while is_cut:
            rest = file.readline(_CHUNK)
            is_cut = bool(rest) and not rest.endswith(b"\n")


def json_lines(index: int, name: str, lines: Iterable[bytes]) -> Iterator[RawRecord]:
    """A record per line, counted from 1; blank lines are skipped."""
    for line, data in enumerate(lines, start=1):
        if not data.isspace():
            yield RawRecord(name, line, data, "json", index)


def json_file(
    index: int, name: str, file: Any, single: Literal["json", "text"] = "json"
) -> Iterator[RawRecord]:
    """A .json file: an array of records, a record per line (as in many data sets), or a `single` record."""
    head = file.peek(_CHUNK).removeprefix(b"\xef\xbb\xbf").lstrip()
    if head.startswith(b"["):
        return _elements(index, name, file)
    lines = lines_of(file)
    blank = 0
    while (first := next(lines, b"")).isspace():  # put back below, since records have line numbers
        blank += 1
    begin = [first, *islice(lines, 3)]
    if any(map(_is_json, begin)):  # several lines, since the first may be damaged
        return json_lines(index, name, chain(repeat(b"\n", blank), begin, lines))
    whole = b"".join(begin) + file.read(RECORD_BYTES + 1)
    return iter([RawRecord(name, 1, whole, single, index)])


def text_file(
    index: int, name: str, file: Any, text_column: str, separator: str | None = None
) -> Iterator[RawRecord]:
    """A file of any other name, such as part-00000: records if it begins as JSON, or texts by `separator`."""
    keys = f"{re.escape(text_column)}|prompt|messages|conversations|segments|input_ids"
    begin = rb'(\xef\xbb\xbf)?\s*(\[\s*)?\{.*?"(' + keys.encode() + rb')"\s*:'
    head = file.peek(_CHUNK)
    lines = [line for line in head.split(b"\n", 3)[:-1] if line.strip()]
    if re.match(begin, head, re.DOTALL) or (len(lines) > 1 and all(map(_is_json, lines))):
        return json_file(index, name, file, "text")
    if separator:
        return _separated(index, name, file, separator.encode())
    return iter([RawRecord(name, 0, file.read(RECORD_BYTES + 1), "text", index)])


def _is_json(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


_ARRAY_CHARACTERS = 1 << 30
"""Largest .json file with an array, which is read as a whole."""
_UTF16 = re.compile(rb"\xff\xfe|\xfe\xff|[^\0]\0[^\0]\0|\0[^\0]\0[^\0]", re.DOTALL)
"""The beginning of UTF-16: its byte order mark, or two characters of ASCII."""
_MARK = re.compile(r"\s*(.?)\s*", re.DOTALL)


def _elements(index: int, name: str, file: BinaryIO) -> Iterator[RawRecord]:
    """The elements of a JSON array, counted from 1, of a file that is read as a whole.

    Reading ends at a malformed element.
    """
    with io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
        text = stream.read(_ARRAY_CHARACTERS + 1)
    if len(text) > _ARRAY_CHARACTERS:
        detail = f"expected an array of at most {_ARRAY_CHARACTERS} characters; write lines (.jsonl) instead"
        yield bad_record(name, 1, TOO_LARGE, detail, index)
        return
    if re.fullmatch(r"\s*\[\s*\]\s*", text):
        return
    scan, expected, number, end = json.JSONDecoder().raw_decode, "[", 0, 0
    try:
        while (mark := _MARK.match(text, end)) and mark[1] != "]":
            if not mark[1] or mark[1] not in expected:
                raise ValueError(f"{mark[1] or 'the end'} in place of {' or '.join(expected)}")
            _, end = scan(text, mark.end())
            number, expected = number + 1, ",]"
            data = text[mark.end() : end].encode("utf-8", "surrogateescape")
            yield RawRecord(name, number, data, "json", index)
        if mark and mark.end() < len(text):
            raise ValueError("more text behind its end")
    except (ValueError, RecursionError) as error:
        detail = f"expected a JSON array, found: {reason_of(error)}"
        yield bad_record(name, number + 1, "invalid JSON", detail, index)


_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def conversations(name: str, path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields (line, `{"messages": …}` as JSON) for every documented public definition of a source file.

    Args:
        name: Path within the library, such as `json/__init__.py`.
        path: The file. A file that this Python cannot parse gives no conversations.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of invalid escapes in the library's strings
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for dotted, node in _definitions(tree, module):
        documentation = ast.get_docstring(node)
        if documentation is None or not documentation.strip():
            continue
        kind = "class" if isinstance(node, ast.ClassDef) else "function"
        turns = [
            ("user", f"What does the {kind} `{dotted}` do?"),
            ("assistant", " ".join(documentation.strip().split("\n\n")[0].split())),
            ("user", "How is it written?"),
            ("assistant", f"`{_signature(node)}`"),
        ]
        messages = [{"role": role, "content": content} for role, content in turns]
        yield node.lineno, json.dumps({"messages": messages}, ensure_ascii=False).encode()


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, _Definition]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Definition) and not child.name.startswith("_"):
            dotted = f"{prefix}.{child.name}"
            yield dotted, child
            if isinstance(child, ast.ClassDef):
                yield from _definitions(child, dotted)


def _signature(node: _Definition) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(map(ast.unparse, node.bases))
        return f"class {node.name}({bases})" if bases else f"class {node.name}"
    prefix = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    return f"{prefix} {node.name}({ast.unparse(node.args)})"


def read_records(inputs: Sequence[str], *, text_column: str = "text") -> Iterator[RawRecord]:
    """The raw records of `inputs` in order, without those for validation; see `read_sources`."""
    sources = [source for source in find_sources(inputs) if not source.validation]
    yield from read_sources(sources, text_column=text_column)


def read_sources(
    sources: Sequence[Source], *, text_column: str = "text", after: tuple[int, int] = (0, -1)
) -> Iterator[RawRecord]:
    """The raw records of `sources` in order, beginning after the record at (source, line) `after`.

    One bad record stands for the unreadable rest of a damaged file, for a file with a `fault`, and for the
    change of a file while it is read. Raises DataError for a table without a column to train on.
    """
    for index, source in enumerate(sources):
        if index < after[0]:
            continue
        last = after[1] if index == after[0] else -1
        for record in _read_source(index, source, text_column):
            if record.line > last:
                yield record


def cut_lone_text(sources: Sequence[Source], fraction: float, text_column: str) -> list[Source]:
    """Split a file that is one text: its last lines, at most `fraction` of it, are for validation. Returns
    other `sources` as they are."""
    if len(sources) != 1 or sources[0].path is None or not fraction:
        return list(sources)
    match list(islice(_read_source(0, sources[0], text_column), 2)):
        case [RawRecord(line=0, kind="text", data=text) as record]:
            begin = text.find(b"\n", max(0, int(len(text) * (1 - fraction)) - 1)) + 1
            with suppress(RecordError):  # a bad record stays whole
                parse_record(record)
                if begin and text[begin:].strip():
                    last = replace(sources[0], validation=True, part=slice(begin, None))
                    return [last, replace(sources[0], part=slice(begin))]
    return list(sources)


def batch_records(records: Iterable[RawRecord], batch_bytes: int) -> Iterator[list[RawRecord]]:
    """Groups records into lists of about `batch_bytes`; the groups depend on the records only."""
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
                yield replace(record, data=record.data[source.part]) if source.part else record
    except (*DAMAGE, OSError) as error:
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
            if _UTF16.match(file.peek(4)):
                advice = "convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW"
                yield bad_record(source.name, 0, "invalid UTF-8", f"found UTF-16; {advice}", index)
                return
            reader = FORMATS.get(source.format()) or partial(text_file, separator=source.separator)
            yield from reader(index, source.name, file, text_column)


def _separated(index: int, name: str, file: BinaryIO, separator: bytes) -> Iterator[RawRecord]:
    """The texts between separators, without the line breaks beside them; leaves out empty ones."""
    rest, number = b"", 0
    while (chunk := file.read(max(_CHUNK, len(rest)))) or rest:  # twice as much: a long text is read once
        *texts, rest = (rest + (chunk or separator)).split(separator)
        for text in filter(None, (text.strip(b"\r\n") for text in texts)):
            number += 1
            if b"\0" in text:
                yield bad_record(name, number, NUL, "found one; is it text?", index)
            else:
                yield RawRecord(name, number, text, "text", index)
        rest = rest[: 2 * RECORD_BYTES] + rest[2 * RECORD_BYTES :][-len(separator) :]  # is too large already


def _delimited(
    index: int, name: str, file: BinaryIO, text_column: str, *, delimiter: str
) -> Iterator[RawRecord]:
    """Yields the rows of a .csv or .tsv file with a header line; `line` is the last line of the row."""
    csv.field_size_limit(RECORD_BYTES)  # or an open quote would put the rest of the file into one field
    with io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
        lines = iter(partial(stream.readline, RECORD_BYTES + 1), "")
        rows = csv.reader(lines, delimiter=delimiter, strict=True)
        try:
            header = next(filter(None, rows), None)  # blank lines may precede the header
        except csv.Error as error:
            raise DataError(f"{name}: expected the names of the columns first, found: {error}") from error
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


FORMATS: dict[str, Callable[[int, str, BinaryIO, str], Iterator[RawRecord]]] = {
    **dict.fromkeys(LINES_SUFFIXES, lambda index, name, file, _: json_lines(index, name, lines_of(file))),
    ".json": lambda index, name, file, _: json_file(index, name, file),
    ".csv": partial(_delimited, delimiter=","),
    ".tsv": partial(_delimited, delimiter="\t"),
}
"""Suffix of a file -> its reader. Arguments: index and name of the source, open file, column of the text. A
file with any other suffix is read by `text_file`."""
