"""Finds what `--input` names: files, folders, patterns, the standard library, sets of the Hugging Face hub.

Says what is there and in which order. Opens nothing: reading is in `readers.py`.
"""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llm_pretrain.data.hub import HUB_PREFIX, hub_revision, parse_hub_name
from llm_pretrain.errors import DataError

STDLIB = "stdlib"
"""The input that stands for the source text of the installed Python standard library."""

STDLIB_CHAT = "stdlib-chat"
"""The input that stands for conversations read off the docstrings of the Python standard library."""

COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")
LINE_SUFFIXES = (".jsonl", ".ndjson")
TABLE_SUFFIXES = (".parquet", ".arrow", ".feather")
DELIMITERS = {".csv": ",", ".tsv": "\t"}

_STDLIB_EXCLUDED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_ARCHIVES = {".zip", ".tar", ".tgz", ".7z", ".rar"}
_DATASETS_NOTES = {"dataset_info.json", "state.json", "dataset_dict.json"}
"""What `save_to_disk` of the `datasets` library writes beside its .arrow files."""


@dataclass(frozen=True, slots=True)
class Source:
    """A file or hub set: its `name` for messages, `path` (None for the hub), and the index of its input.

    With `conversations` the file is Python source, and its docstrings are the records.
    """

    name: str
    path: Path | None
    entry: int
    conversations: bool = False

    def format(self) -> str:
        """The suffix that decides how it is read, that of a compression left out: `.jsonl` for a.jsonl.gz."""
        assert self.path is not None
        suffixes = [suffix.lower() for suffix in self.path.suffixes[-2:]]
        if suffixes and suffixes[-1] in COMPRESSIONS:
            suffixes.pop()
        return suffixes[-1] if suffixes else ""

    def compression(self) -> str:
        """`.gz`, … or an empty string."""
        assert self.path is not None
        suffix = self.path.suffix.lower()
        return suffix if suffix in COMPRESSIONS else ""

    def fingerprint(self) -> tuple[str, int, int | str]:
        """What changes with the content: size and time of change of a file, the commit of a hub set."""
        if self.path is None:
            return (self.name, 0, hub_revision(self.name))
        status = self.path.stat()
        return (str(self.path.absolute()), status.st_size, status.st_mtime_ns)


def find_sources(inputs: Sequence[str]) -> list[Source]:
    """Every file and hub set of `inputs`; folders and patterns in the order of their sorted paths.

    Raises DataError for a path that does not exist, a folder or pattern without files, and archives.
    """
    sources = [
        Source(name, path, index, conversations=entry == STDLIB_CHAT)
        for index, entry in enumerate(inputs)
        for name, path in ([(entry, None)] if entry.startswith(HUB_PREFIX) else _files_of(entry))
    ]
    for source in sources:
        if source.path is None:
            parse_hub_name(source.name)
        elif source.format() in _ARCHIVES:
            raise DataError(
                f"{source.name}: expected a file of documents, found a {source.format()} archive; unpack it"
            )
    return sources


def find_files(inputs: Sequence[str]) -> list[tuple[str, Path]]:
    """(name for messages, path) of every file of `inputs`; as `find_sources`, hub sets left out."""
    return [(source.name, source.path) for source in find_sources(inputs) if source.path is not None]


def _files_of(entry: str) -> list[tuple[str, Path]]:
    path = Path(entry)
    if entry in (STDLIB, STDLIB_CHAT):
        return _stdlib_files()
    if path.is_dir():
        found = _visible_files(path)
        if not found:
            raise DataError(f"{entry}: expected a folder with .jsonl or other files, found none in it")
        return [(str(file), file) for file in found]
    if path.is_file():
        return [(entry, path)]
    if glob.has_magic(entry):
        matches = [Path(match) for match in sorted(glob.glob(entry, recursive=True))]
        files = [file for file in matches if file.is_file()]
        folders = [folder for folder in matches if folder.is_dir() and "**" not in entry]
        files += [file for folder in folders for file in _visible_files(folder)]
        if not files:
            raise DataError(f"{entry}: expected a pattern that files match, found none that does")
        return [(str(file), file) for file in sorted(files)]
    hint = ""
    if entry.count("/") == 1 and not path.suffix and not entry.startswith((".", "/")):
        hint = f"; a data set of the Hugging Face hub is written {HUB_PREFIX}{entry}"
    raise DataError(f"{entry}: expected a file, a folder or `{STDLIB}`, found no such path{hint}")


def _visible_files(folder: Path) -> list[Path]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    visible = [p for p in files if not any(part.startswith(".") for part in p.relative_to(folder).parts)]
    saved = {path.parent for path in visible if path.suffix == ".arrow"}
    saved |= {path.parent for path in visible if path.name == "dataset_dict.json"}
    documents = [p for p in visible if not (p.name in _DATASETS_NOTES and p.parent in saved)]
    return sorted(documents, key=lambda path: path.relative_to(folder).as_posix())


def _stdlib_files() -> list[tuple[str, Path]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, inner, names in os.walk(root):
        # installed packages may be many times as many files
        inner[:] = [name for name in inner if name not in _STDLIB_EXCLUDED]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted((path.relative_to(root).as_posix(), path) for path in files)
