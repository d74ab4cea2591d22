"""Finds what `--input` names: files, folders, patterns, the standard library, sets of the Hugging Face hub.

Says what is there and in which order. Opens nothing: reading is in `readers.py`.
"""

from __future__ import annotations

import glob
import os
import stat
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llm_pretrain.data.hub import HUB_PREFIX, hub_revision, parse_hub_name
from llm_pretrain.data.records import REPEATED, UNREADABLE
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

    With `conversations` the file is Python source, and its docstrings are the records. `status` is the file's
    size, time of change and inode when it was found. A source with a `fault` (cause and detail) cannot be
    read, and is one bad record.
    """

    name: str
    path: Path | None
    entry: int
    conversations: bool = False
    status: tuple[int, ...] = ()
    fault: tuple[str, str] | None = None

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
        size, changed = self.status[:2] or (0, 0)
        return (f"{self.path.absolute()}{self.fault or ''}", size, changed)

    def change(self) -> str | None:
        """What is wrong with the file now that it was read to its end, or None if it is as it was found."""
        assert self.path is not None
        try:
            status = self.path.stat()
        except OSError as error:
            return f"expected the file to stay until it is read, found: {error.strerror}"
        if (status.st_size, status.st_mtime_ns, status.st_ino) == self.status:
            return None
        return (
            f"expected the {self.status[0]} bytes that were there when work began, found {status.st_size} "
            "or other ones; wait until its writer is done"
        )


def find_sources(inputs: Sequence[str]) -> list[Source]:
    """Every file and hub set of `inputs`; folders and patterns in the order of their sorted paths.

    A file that comes again, under this or another name, and what is no file, are sources with a `fault`.
    Raises DataError for a path that does not exist, a folder or pattern without files, and archives.
    """
    sources = []
    for index, entry in enumerate(inputs):
        if entry.startswith(HUB_PREFIX):
            parse_hub_name(entry)
            sources.append(Source(entry, None, index))
            continue
        try:
            found = _files_of(entry)
        except OSError as error:
            reason = error.strerror or error
            raise DataError(f"{entry}: expected readable files, found: {reason}") from error
        sources += [_source(name, path, index, chat=entry == STDLIB_CHAT) for name, path in found]
    for source in sources:
        if source.path is not None and source.format() in _ARCHIVES:
            raise DataError(
                f"{source.name}: expected a file of documents, found a {source.format()} archive; unpack it"
            )
    return list(_without_repetition(sources))


def _source(name: str, path: Path, entry: int, *, chat: bool) -> Source:
    source = Source(name, path, entry, conversations=chat)
    try:
        status = path.stat()
    except OSError as error:
        return replace(source, fault=(UNREADABLE, f"found: {error.strerror}"))
    if not stat.S_ISREG(status.st_mode):
        return replace(source, fault=(UNREADABLE, f"expected a file, found {_kind(status.st_mode)}"))
    return replace(source, status=(status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev))


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a folder that cannot be listed"
    kinds = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def _without_repetition(sources: Iterable[Source]) -> Iterable[Source]:
    """Faults what is the same file as one before it: by links as well as by names."""
    names: dict[tuple[object, ...], str] = {}
    for source in sources:
        key = (source.conversations, *(source.status[2:] or (source.name,)))
        first = names.get(key)
        names.setdefault(key, source.name)
        if first is not None:
            advice = "to weigh it more, prepare it apart and give data.sources a weight"
            fault = (REPEATED, f"expected each file once, found it as {first} before; {advice}")
            yield replace(source, fault=source.fault or fault, status=source.status[:3])
        else:
            yield replace(source, status=source.status[:3])


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
    if path.exists():
        kind = _kind(path.stat().st_mode)
        raise DataError(
            f"{entry}: expected a file or a folder, found {kind}; write what it gives to a file first"
        )
    if glob.has_magic(entry):
        matches = [Path(match) for match in sorted(glob.glob(entry, recursive=True))]
        files = [file for file in matches if not file.is_dir()]
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
    """All that is no folder, and folders that cannot be listed; links to folders are not followed."""
    visible: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=lambda e: visible.append(Path(e.filename))):
        folders[:] = [name for name in folders if not name.startswith(".")]
        visible.extend(Path(parent, name) for name in names if not name.startswith("."))
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
