"""Resolves `--input` to sources: files, folders, patterns, the standard library, Hugging Face hub data sets.

A hub data set is written `hf://OWNER/NAME[@REVISION][/CONFIG][:SPLIT]` (default split: train), and is
streamed by the `datasets` library.
"""

from __future__ import annotations

import functools
import glob
import os
import re
import stat
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from llm_pretrain.data.documents import REPEATED, UNREADABLE
from llm_pretrain.errors import DataError
from llm_pretrain.files import read_json
from llm_pretrain.text import reason_of

HUB_PREFIX = "hf://"
TIMEOUT_SECONDS = 10.0
"""Timeout of the first request to the hub."""
BATCH_ROWS = 256

_SPELLING = re.compile(
    r"hf://(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[^/:]+))?(/(?P<config>[^:/]+))?(:(?P<split>[^:]+))?"
)


class HubInterruptedError(DataError):
    """The connection to the hub failed within a data set; the rows read before are valid."""


@dataclass(frozen=True)
class HubSet:
    """A data set's repository `name`, and the part of it to read."""

    name: str
    revision: str | None
    config: str | None
    split: str


def parse_hub_name(name: str) -> HubSet:
    """The parts of `hf://OWNER/NAME[@REVISION][/CONFIG][:SPLIT]`. Raises DataError for another spelling."""
    match = _SPELLING.fullmatch(name)
    if match is None:
        raise DataError(f"{name}: expected hf://OWNER/NAME[@REVISION][/CONFIG][:SPLIT], found another form")
    revision = match["revision"] and unquote(match["revision"])
    return HubSet(match["name"], revision, match["config"], match["split"] or TRAIN_SPLIT)


@functools.cache
def hub_revision(name: str) -> str:
    """The current commit of `name`, requested from the hub once per process. Raises DataError."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    parts = parse_hub_name(name)
    where = f"the data set {parts.name} on {constants.ENDPOINT}"
    try:
        found = HfApi().dataset_info(parts.name, revision=parts.revision, timeout=TIMEOUT_SECONDS)
    except RevisionNotFoundError as error:
        raise DataError(
            f"{name}: expected {where} at revision {parts.revision}, found no such one"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        advice = "check its name, or log in with `hf auth login` if it is private"
        raise DataError(f"{name}: expected {where}, found none; {advice}") from error
    except Exception as error:  # several libraries raise many types without a network
        advice = "try again with a network, or fetch its files elsewhere and give their folder"
        raise DataError(
            f"{name}: expected {where}, found no answer within {TIMEOUT_SECONDS:.0f} s "
            f"({reason_of(error):.300}); {advice}"
        ) from error
    return found.sha or "main"


def hub_tables(name: str) -> Iterator[Any]:
    """Yields the rows of a hub data set in order, as `pyarrow.Table`s. Raises DataError."""
    parts = parse_hub_name(name)
    rows = _open(name, parts, hub_revision(name))
    try:
        yield from rows.with_format("arrow").iter(batch_size=BATCH_ROWS)
    except Exception as error:  # network and decoding errors have many types
        raise HubInterruptedError(
            f"{name}: expected to read on, found {reason_of(error):.300}; start again to continue"
        ) from error


def _open(name: str, parts: HubSet, revision: str) -> Any:
    import datasets

    config = datasets.DownloadConfig(max_retries=2)
    try:
        return datasets.load_dataset(
            parts.name,
            parts.config,
            split=parts.split,
            revision=revision,
            streaming=True,
            download_config=config,
        )
    except Exception as error:  # network errors have many types; an unknown config or split is a ValueError
        part = f"split {parts.split}" + (f" of config {parts.config}" if parts.config else "")
        raise DataError(f"{name}: expected {part}, found {reason_of(error):.300}") from error


STDLIB = "stdlib"
"""Input name of the source text of the installed Python standard library."""

STDLIB_CHAT = "stdlib-chat"
"""Input name of conversations made from the docstrings of the Python standard library."""

COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")
TABLE_SUFFIXES = (".parquet", ".arrow", ".feather")

TRAIN_SPLIT = "train"
"""The split to read from a saved `DatasetDict` or a hub data set, unless the user asks for another."""

_STDLIB_EXCLUDED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_ARCHIVES = {".zip", ".tar", ".tgz", ".7z", ".rar"}
_DATASETS_NOTES = {"dataset_info.json", "state.json", "dataset_dict.json"}
"""Metadata that `save_to_disk` of the `datasets` library writes beside its .arrow files."""


@dataclass(frozen=True, slots=True)
class Source:
    """A file or a hub data set: `name` for messages, `path` (None for the hub), `entry` (index of its input).

    With `conversations`, the file is Python source and its docstrings are the records. `status` is the `stat`
    of the file when it was found. A source with a `fault` (cause, detail) is read as one bad record. The
    `separator` cuts a text file into documents.
    """

    name: str
    path: Path | None
    entry: int
    conversations: bool = False
    status: os.stat_result | None = None
    fault: tuple[str, str] | None = None
    separator: str | None = None

    def format(self) -> str:
        """The suffix that selects the reader; a compression's suffix is dropped: `.jsonl` for a.jsonl.gz."""
        assert self.path is not None
        suffixes = [suffix.lower() for suffix in self.path.suffixes[-2:]]
        if suffixes and suffixes[-1] in COMPRESSIONS:
            suffixes.pop()
        return suffixes[-1] if suffixes else ""

    def compression(self) -> str:
        """The suffix of the compression (`.gz`, …), or an empty string."""
        assert self.path is not None
        suffix = self.path.suffix.lower()
        return suffix if suffix in COMPRESSIONS else ""

    def fingerprint(self) -> tuple[str | int, ...]:
        """A value that changes with the content: from a file's status, or a hub data set's commit."""
        if self.path is None:
            return (self.name, hub_revision(self.name))
        # the change time too: `cp -p`, `rsync -t` and `tar` restore the modification time; not the device:
        # its number changes with the mount
        status = self.status
        of_file = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino) if status else ()
        return (f"{self.path.absolute()}{self.fault or ''}", *of_file)

    def change(self) -> str | None:
        """A message if the file has changed since it was found, or None."""
        assert self.path is not None
        before = self.status
        assert before is not None
        try:
            now = self.path.stat()
        except OSError as error:
            return f"expected the file to stay until it is read, found: {error.strerror}"
        if all(getattr(now, name) == getattr(before, name) for name in ("st_size", "st_mtime_ns", "st_ino")):
            return None
        return (
            f"expected the {before.st_size} bytes that were there when work began, found {now.st_size} "
            "or other ones; wait until its writer is done"
        )


def find_sources(inputs: Sequence[str], split: str | None = None) -> list[Source]:
    """Finds every file and hub data set of `inputs`; files of a folder or pattern are sorted by path.

    A data set saved in splits, or a hub data set that names no split, gives only `split` (`train` if None).
    Repeated files, under any name, and paths that are not regular files get a `fault`. Raises DataError for a
    path that does not exist, a folder or pattern without files, an archive, and a `split` that no input has.
    """
    sources = []
    for index, entry in enumerate(inputs):
        if entry.startswith(HUB_PREFIX):
            parse_hub_name(entry)
            part = f":{split}" if split and ":" not in entry.removeprefix(HUB_PREFIX) else ""
            sources.append(Source(entry + part, None, index))
            continue
        try:
            found = _files_of(entry, split or TRAIN_SPLIT)
        except OSError as error:
            raise DataError(f"{entry}: expected readable files, found: {reason_of(error)}") from error
        sources += [_source(name, path, index, chat=entry == STDLIB_CHAT) for name, path in found]
    for source in sources:
        if source.path is not None and source.format() in _ARCHIVES:
            raise DataError(
                f"{source.name}: expected a file of documents, found a {source.format()} archive; unpack it"
            )
    if split and not any(_is_of_split(source, split) for source in sources):
        raise DataError(
            f"--split: expected an input with a split {split} (a folder that `datasets` saved, or "
            f"{HUB_PREFIX}…), found none in {', '.join(inputs)}"
        )
    return list(_without_repetition(sources))


def _is_of_split(source: Source, split: str) -> bool:
    if source.path is None:
        return parse_hub_name(source.name).split == split
    folder = source.path.parent
    return folder.name == split and split in saved_splits(folder.parent)


def _source(name: str, path: Path, entry: int, *, chat: bool) -> Source:
    source = Source(name, path, entry, conversations=chat)
    try:
        status = path.stat()
    except OSError as error:
        return replace(source, fault=(UNREADABLE, f"found: {error.strerror}"))
    if not stat.S_ISREG(status.st_mode):
        return replace(source, fault=(UNREADABLE, "expected a plain file, found another kind"))
    return replace(source, status=status)


def _without_repetition(sources: Iterable[Source]) -> Iterable[Source]:
    """Sets the `fault` of each source that is the same file as an earlier source, also through a link."""
    names: dict[tuple[object, ...], str] = {}
    for source in sources:
        status = source.status
        key = (source.conversations, *((status.st_ino, status.st_dev) if status else (source.name,)))
        first = names.get(key)
        names.setdefault(key, source.name)
        if first is not None:
            advice = "to weigh it more, prepare it apart and give data.sources a weight"
            fault = (REPEATED, f"expected each file once, found it as {first} before; {advice}")
            yield replace(source, fault=source.fault or fault)
        else:
            yield source


def _files_of(entry: str, split: str) -> list[tuple[str, Path]]:
    path = Path(entry)
    if entry in (STDLIB, STDLIB_CHAT):
        return _stdlib_files()
    if path.is_dir():
        found = _visible_files(path, split)
        if not found:
            raise DataError(f"{entry}: expected a folder with .jsonl or other files, found none in it")
        return [(str(file), file) for file in found]
    if path.is_file():
        return [(entry, path)]
    if path.exists():
        raise DataError(
            f"{entry}: expected a file or a folder, found a pipe or device; write it to a file first"
        )
    if glob.has_magic(entry):
        matches = [Path(match) for match in sorted(glob.glob(entry, recursive=True))]
        files = [file for file in matches if not file.is_dir()]
        folders = [folder for folder in matches if folder.is_dir() and "**" not in entry]
        files += [file for folder in folders for file in _visible_files(folder, split)]
        if not files:
            raise DataError(f"{entry}: expected a pattern that files match, found none that does")
        return [(str(file), file) for file in sorted(files)]
    hint = ""
    if entry.count("/") == 1 and not path.suffix and not entry.startswith((".", "/")):
        hint = f"; a data set of the Hugging Face hub is written {HUB_PREFIX}{entry}"
    raise DataError(f"{entry}: expected a file, a folder or `{STDLIB}`, found no such path{hint}")


def saved_splits(folder: Path) -> list[str]:
    """Names of the splits if `folder` is a `DatasetDict` that `save_to_disk` wrote; else an empty list."""
    if not (folder / "dataset_dict.json").is_file():
        return []
    return sorted(path.name for path in folder.iterdir() if (path / "state.json").is_file())


def _saved_files(folder: Path) -> list[Path] | None:
    """The files of the `Dataset` that `save_to_disk` wrote to `folder`; None if it wrote none there.

    Other .arrow files in the folder are left out: `datasets` keeps results of `map` there, and an earlier
    save may have left files.
    """
    try:
        names = [each["filename"] for each in read_json(folder / "state.json")["_data_files"]]
        return [folder / Path(name).name for name in names]  # only files in `folder`
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def _visible_files(folder: Path, split: str) -> list[Path]:
    """Finds files that are not hidden and folders that cannot be listed; does not follow links to folders.

    A data set saved in splits, at any depth, gives only `split`. Raises DataError if it has no such split.
    """
    visible: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=lambda e: visible.append(Path(e.filename))):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if splits := saved_splits(Path(parent)):
            if split not in splits:
                raise DataError(
                    f"{parent}: expected a split {split}, found {', '.join(splits)}; "
                    "name the folder of one, or choose it with prepare's --split"
                )
            folders[:] = [split]
        elif "state.json" in names and (saved_files := _saved_files(Path(parent))) is not None:
            visible.extend(saved_files)
        else:
            visible.extend(Path(parent, name) for name in names if not name.startswith("."))
    saved = {path.parent for path in visible if path.suffix == ".arrow"}
    saved |= {path.parent for path in visible if path.name == "dataset_dict.json"}
    documents = [p for p in visible if not (p.name in _DATASETS_NOTES and p.parent in saved)]
    return sorted(documents, key=lambda path: path.relative_to(folder).as_posix())


def _stdlib_files() -> list[tuple[str, Path]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, inner, names in os.walk(root):
        # not installed packages, which can have many times as many files
        inner[:] = [name for name in inner if name not in _STDLIB_EXCLUDED]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted((path.relative_to(root).as_posix(), path) for path in files)
