"""Cuts files of JSON into records: one on each line, an array of them, or a single one.

Looks into no record: `documents.py` does.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any, BinaryIO

from llm_pretrain.data.records import RECORD_BYTES, RawRecord, bad_record

_CHUNK = 1 << 20


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file; of one longer than a record may be, no more than shows that it is."""
    while line := file.readline(RECORD_BYTES + 1):
        is_cut = len(line) > RECORD_BYTES and not line.endswith(b"\n")
        yield line
        while is_cut:
            rest = file.readline(_CHUNK)
            is_cut = bool(rest) and not rest.endswith(b"\n")


def json_lines(index: int, name: str, lines: Iterable[bytes]) -> Iterator[RawRecord]:
    """A record per line, counted from 1; blank lines are none."""
    for line, data in enumerate(lines, start=1):
        if not data.isspace():
            yield RawRecord(name, line, data, "json", index)


def json_file(index: int, name: str, file: Any) -> Iterator[RawRecord]:
    """A .json file: an array of records, one record per line (as many data sets have it), or one record."""
    head = file.peek(_CHUNK).removeprefix(b"\xef\xbb\xbf").lstrip()
    if head.startswith(b"["):
        return _elements(index, name, file)
    lines = lines_of(file)
    begin = [*islice(lines, 2)]
    if any(map(_is_json, begin)):  # of two, as the first line may be a bad one
        return json_lines(index, name, chain(begin, lines))
    whole = b"".join(begin)
    whole += file.read(max(RECORD_BYTES + 1 - len(whole), 0))
    return iter([RawRecord(name, 1, whole, "json", index)])


def _is_json(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


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
        if len(kept) > RECORD_BYTES:
            raise ValueError(f"one of more than {RECORD_BYTES} bytes, or one without an end")
        more = self._stream.read(max(_CHUNK, len(kept)))
        self._text, self._position = kept + more, 0
        return bool(more)
