"""Faults in the file calls of real processes, and what a disk holds when the power goes.

`faulty_io.c` stands between a process and the C library: it numbers calls, lets the process die at one, or
refuses one, and keeps a journal. `Disk` takes a journal and says what a folder would hold after a power cut
at any of its calls, under the strictest reading of what fsync promises: content that was not synced may be
gone, and so may names whose folder was not.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).with_name("faulty_io.c")
HOW = {"count": 0, "before": 1, "after": 2, "half": 3, "refuse": 4}
"""What happens at the chosen call: nothing, death before or after it or in mid-write, an error number."""


@dataclass(frozen=True)
class Fault:
    """What `faulty_io.c` is to do in one process: `how`, of `HOW`, at call number `at`, from 0.

    A refused call fails with `error`, `times` in a row, -1 for all that follow. `only` says which calls are
    numbered: words `call:part of its path`, an empty call for all; all if empty.
    """

    how: str = "count"
    at: int = -1
    error: int = 0
    times: int = 1
    only: str = ""


def arm(library: str, folder: str, journal: str, with_data: bool, faults: list[dict[str, Any]]) -> None:
    """Put its fault into this rank, in whose process the library is preloaded."""
    rank = int(os.environ.get("RANK", "0"))
    fault = Fault(**faults[rank])
    texts = (folder.encode(), journal.encode())
    numbers = (ctypes.c_long(fault.at), HOW[fault.how], fault.error, ctypes.c_long(fault.times))
    ctypes.CDLL(library).faulty_arm(*texts, int(with_data), rank, fault.only.encode(), *numbers)


def build_library(folder: Path) -> Path:
    """Compile `faulty_io.c`; skips the test where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc)")
    library = folder / "faulty_io.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o", str(library)]
    subprocess.run([*command, str(SOURCE), "-lpthread"], check=True, capture_output=True, text=True)
    return library


@dataclass(frozen=True)
class Call:
    """One line of a journal: a call that was made, refused (`outcome`), or at which its process died."""

    rank: int
    number: int
    call: str
    path: str
    other: str
    offset: int
    size: int
    outcome: str
    data: bytes

    @property
    def kind(self) -> str:
        """The call and the last part of its path, for a message."""
        return f"{self.call} {'/'.join(Path(self.path).parts[-2:])}"


def read_journal(file: Path) -> list[Call]:
    """The calls of a journal, in the order in which they were done."""
    content, calls, start = file.read_bytes() if file.exists() else b"", [], 0
    while start < len(content):
        end = content.index(b"\n", start)
        rank, number, call, path, other, offset, size, kept, outcome = content[start:end].decode().split("\t")
        start = end + 1 + int(kept)
        data = content[end + 1 : start]
        calls.append(Call(int(rank), int(number), call, path, other, int(offset), int(size), outcome, data))
    return calls


class _File:
    def __init__(self, data: bytes = b"", synced: bytes = b""):
        self.data, self.synced = bytearray(data), synced


class _Folder:
    def __init__(self) -> None:
        self.entries: dict[str, _File | _Folder] = {}
        self.synced: dict[str, _File | _Folder] = {}


Tree = dict[str, bytes | None]
"""Relative path → content of a file, None for a folder."""

CUTS = (
    *("as it is", "content gone", "content zeros"),
    *("names gone", "names and content gone", "outer names gone"),
)
"""What a power cut may leave: nothing is lost, or what was not synced is: content, names, or only the names
in the run's folder, in checkpoints/ and in weights/, while what is below those has come as far as it has."""


class Disk:
    """Content of `root`, call by call, with what is durable of it.

    Args:
        root: The folder that the journal is about.
        start: What it held at first, all of it durable.
    """

    def __init__(self, root: Path, start: Tree):
        self.root, self._top = str(root), _Folder()
        for path, content in sorted(start.items()):
            node = _Folder() if content is None else _File(content, content)
            folder, name = self._parent(f"{root}/{path}")
            folder.entries[name] = folder.synced[name] = node

    def apply(self, call: Call) -> None:
        """Do what `call` did."""
        if call.outcome in ("failed", "refused", "before"):
            return
        folder, name = (self._top, "") if call.path == self.root else self._parent(call.path)
        if call.call == "fsync":
            self._notice_rename(folder, name)
            self._sync(folder.entries[name] if name else folder)
            return
        if call.call in ("create", "mkdir"):
            folder.entries[name] = _Folder() if call.call == "mkdir" else _File()
        elif call.call in ("unlink", "rmdir"):
            del folder.entries[name]
        elif call.call == "rename":
            target, new_name = self._parent(call.other)
            target.entries[new_name] = folder.entries.pop(name)
        else:
            file = folder.entries[name]
            assert isinstance(file, _File)
            self._change(file, call)

    def after_cut(self, cut: str) -> Tree:
        """What is found when the power is back."""
        tree: Tree = {}
        self._collect(self._top, "", cut, tree, 0)
        return tree

    def _change(self, file: _File, call: Call) -> None:
        if call.call == "write":
            file.data[len(file.data) :] = bytes(max(0, call.offset - len(file.data)))
            file.data[call.offset : call.offset + len(call.data)] = call.data
            return
        size = call.offset if call.call == "truncate" else 0
        file.data[size:] = bytes(max(0, size - len(file.data)))

    @staticmethod
    def _notice_rename(folder: _Folder, name: str) -> None:
        """safetensors gives its temporary file the final name past the C library, by a call of its own."""
        if name and name not in folder.entries:
            (temporary,) = [entry for entry in folder.entries if entry.startswith(".tmp")]
            folder.entries[name] = folder.entries.pop(temporary)

    def _sync(self, node: _File | _Folder) -> None:
        if isinstance(node, _File):
            node.synced = bytes(node.data)
        else:
            node.synced = dict(node.entries)

    def _node(self, path: str) -> _File | _Folder:
        node: _File | _Folder = self._top
        for name in Path(path).relative_to(self.root).parts:
            assert isinstance(node, _Folder)
            node = node.entries[name]
        return node

    def _parent(self, path: str) -> tuple[_Folder, str]:
        node = self._node(str(Path(path).parent))
        assert isinstance(node, _Folder)
        return node, Path(path).name

    def _collect(self, folder: _Folder, prefix: str, cut: str, tree: Tree, depth: int) -> None:
        names_gone = "names" in cut and not ("outer" in cut and depth > 1)
        for name, node in (folder.synced if names_gone else folder.entries).items():
            path = f"{prefix}{name}"
            if isinstance(node, _Folder):
                tree[path] = None
                self._collect(node, f"{path}/", cut, tree, depth + 1)
            elif cut == "content zeros" and node.data != node.synced:
                tree[path] = node.synced + bytes(max(0, len(node.data) - len(node.synced)))
            else:
                tree[path] = node.synced if "content" in cut else bytes(node.data)


def read_tree(folder: Path) -> Tree:
    """What stands below `folder`."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def write_tree(tree: Tree, folder: Path) -> Path:
    """Make `folder` hold `tree`."""
    folder.mkdir(parents=True)
    for name, content in sorted(tree.items()):
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content)
    return folder


def change_tree(before: Tree, after: Tree, folder: Path) -> None:
    """Make `folder`, which holds `before`, hold `after`."""
    for name in sorted(before.keys() - after.keys(), reverse=True):
        (folder / name).rmdir() if before[name] is None else (folder / name).unlink()
    for name, content in sorted(after.items()):
        if name in before and before[name] == content:
            continue
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content)
