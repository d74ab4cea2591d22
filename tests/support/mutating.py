"""Damages what a true file holds, byte by byte or value by value, for tests of what reads it."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

TEXTS = st.sampled_from(
    [
        "",
        "x",
        "../x",
        "/etc/passwd",
        "..",
        ".",
        "a/b",
        "\0",
        "float32",
        "\ud800",
        "é\n",
        "1",
        "nan",
        "x" * 999,
    ]
)
NUMBERS = st.sampled_from(
    [
        *(0, 1, -1, 2, 7, 2**31, 2**53 + 1, 2**62, 2**63, 2**64, -(2**63), 10**30),
        *(0.0, 0.5, -1.5, 1e308, -1e308, 5e-324, math.nan, math.inf, -math.inf),
    ]
)
LEAVES = st.none() | st.booleans() | NUMBERS | TEXTS
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """The path of every value inside of a JSON value."""
    entries = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, inner in entries:
        yield (*path, key)
        yield from places(inner, (*path, key))


@st.composite
def damaged_json(draw: Any, value: Any) -> Any:
    """`value` with one to three of its values replaced, removed, added to or exchanged."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        found = list(places(value))
        if not found or draw(st.integers(0, 30)) == 0:
            return draw(VALUES)
        # the few values near the top must not drown in thousands of leaves
        depth = draw(st.integers(1, max(map(len, found))))
        path = draw(st.sampled_from([each for each in found if len(each) == depth]))
        owner = value
        for key in path[:-1]:
            owner = owner[key]
        change = draw(st.sampled_from(["replace", "replace", "remove", "add", "swap"]))
        if change == "remove":
            del owner[path[-1]]
        elif change == "add" and isinstance(owner, dict):
            owner[draw(TEXTS)] = draw(VALUES)
        elif change == "swap":
            owner[path[-1]] = copy.deepcopy(_at(value, draw(st.sampled_from(found))))
        else:
            owner[path[-1]] = draw(VALUES)
    return value


def _at(value: Any, path: tuple) -> Any:
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return value


@st.composite
def damaged_bytes(draw: Any, content: bytes) -> bytes:
    """`content` with bytes flipped, cut, doubled, inserted, or replaced as a whole."""
    if draw(st.integers(0, 15)) == 0:
        return draw(st.binary(max_size=64))
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(content)))
        end = min(len(content), start + draw(st.integers(0, 40)))
        inner = draw(
            st.one_of(
                st.just(b""),
                st.binary(max_size=12),
                st.just(content[start:end] * 3),
                st.sampled_from([b"\0", b"{", b"[" * 2000, b"1e999", b"\xff", b"\n", b"\n\n{}\n", b"null"]),
            )
        )
        content = content[:start] + inner + content[end:]
        if draw(st.integers(0, 5)) == 0:
            content = content[: draw(st.integers(0, len(content)))]
    return content


def damaged_lines(content: bytes) -> st.SearchStrategy[bytes]:
    """A file of JSON lines with one row's values damaged, or any of its bytes."""
    lines = content.splitlines(keepends=True)

    def with_row(index: int) -> st.SearchStrategy[bytes]:
        row = damaged_json(json.loads(lines[index])).map(lambda value: json.dumps(value).encode() + b"\n")
        return row.map(lambda line: b"".join([*lines[:index], line, *lines[index + 1 :]]))

    return st.one_of(st.integers(0, len(lines) - 1).flatmap(with_row), damaged_bytes(content))


def dumped(value: Any) -> bytes:
    """JSON as a program would write it that does not mind NaN or lone surrogates."""
    return json.dumps(value).encode()


def linked_copy(source: Path, target: Path) -> Path:
    """A folder with the same files by hard links; replace them by `put`, never write into them."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, copy_function=os.link)
    return target


def put(file: Path, content: bytes) -> None:
    """Replace a file of a linked copy."""
    file.unlink(missing_ok=True)
    file.write_bytes(content)
