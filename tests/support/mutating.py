"""Damages what a true file holds, for tests of what reads it: `fuzzing`'s changes, in files of a folder."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from hypothesis import strategies as st
from support.fuzzing import altered_bytes as damaged_bytes
from support.fuzzing import altered_json as damaged_json
from support.fuzzing import dumped

__all__ = ["damaged_bytes", "damaged_json", "damaged_lines", "dumped", "linked_copy", "put"]


def damaged_lines(content: bytes) -> st.SearchStrategy[bytes]:
    """A file of JSON lines with one row's values damaged, or any of its bytes."""
    lines = content.splitlines(keepends=True)

    def with_row(index: int) -> st.SearchStrategy[bytes]:
        row = damaged_json(json.loads(lines[index])).map(lambda value: dumped(value) + b"\n")
        return row.map(lambda line: b"".join([*lines[:index], line, *lines[index + 1 :]]))

    return st.one_of(st.integers(0, len(lines) - 1).flatmap(with_row), damaged_bytes(content))


def linked_copy(source: Path, target: Path) -> Path:
    """A folder with the same files by hard links; replace them by `put`, never write into them."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, copy_function=os.link)
    return target


def put(file: Path, content: bytes) -> None:
    """Replace a file of a linked copy."""
    file.unlink(missing_ok=True)
    file.write_bytes(content)
