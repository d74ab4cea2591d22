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
from collections.abc import Callable, Iterable, Iterator, Sequence
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
LINES_SUFFIXES = (".jsonl", ".ndjson", ".jl", ".jsonlines")

TRAIN_SPLIT, VALIDATION_SPLIT = "train", "validation"
"""The split to read from a data set unless the user asks for another, and its validation split."""

SPLITS = {name: name for name in (TRAIN_SPLIT, VALIDATION_SPLIT, "test")}
SPLITS |= dict.fromkeys(("valid", "val", "dev"), VALIDATION_SPLIT)
SPLITS |= {"training": TRAIN_SPLIT} | dict.fromkeys(("testing", "eval", "evaluation", "holdout"), "test")
_DATA_SUFFIXES = ("", ".txt", ".raw", ".tokens", ".json", ".csv", ".tsv", *LINES_SUFFIXES, *TABLE_SUFFIXES)
_SPLIT_ENTRY = re.compile(
    rf"(?i)([^/]+[-_.])?(?P<split>{'|'.join(SPLITS)})\d*"
    r"([-_.]((split|set|data|part|shard|chunk|of)?\d*|\d+k|[0-9a-f]{16}|[a-z]{2,3}(?=[-_.])))*"
    rf"({'|'.join(map(re.escape, _DATA_SUFFIXES))})({'|'.join(map(re.escape, COMPRESSIONS))})?"
)
_NAMED_SPLIT = re.compile(rf"(?i)(?P<split>{'|'.join(SPLITS)})[-_][a-z]+(?P<rest>.*)")
"""Of a split with a name of its own: `dev-clean`, `validation_matched-00000-of-00001.parquet`."""

_STDLIB_EXCLUDED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_ARCHIVES = {".zip", ".tar", ".tgz", ".7z", ".rar"}
_DATASETS_NOTES = {"dataset_info.json", "state.json", "dataset_dict.json"}
"""Metadata that the `datasets` library writes beside its .arrow files."""
_CARD = "README.md"
_ADDRESS = re.compile(r"([a-zA-Z][\w+.-]*)://.*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Source:
    """A file or a hub data set: `name` for messages, `path` (None for the hub), `entry` (index of its input).

    With `conversations`, the file is Python source and its docstrings are the records. `split` is the one of
    its data set, if that has several; a `validation` source is not trained on. `status` is the `stat` of the
    file when it was found. A source with a `fault` (cause, detail) is read as one bad record. The
    `separator` cuts a text file into documents; of a lone text, `part` alone is read.
    """

    name: str
    path: Path | None
    entry: int
    conversations: bool = False
    split: str | None = None
    validation: bool = False
    status: os.stat_result | None = None
    fault: tuple[str, str] | None = None
    separator: str | None = None
    part: slice | None = None

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


def find_sources(
    inputs: Sequence[str],
    split: str | None = None,
    validation_inputs: Sequence[str] = (),
    notice: Callable[[str], object] = lambda text: None,
) -> list[Source]:
    """Finds every file and hub data set of `inputs`; files of a folder or pattern are sorted by path.

    A folder with a data set in splits, or a hub data set that names no split, gives only `split` (None:
    `train`, and the folder's validation split); `notice` gets what is left out. Validation sources, among
    them `validation_inputs`, come first, and are used for nothing else; `all` gives every file to training.
    Repeated files, under any name, and paths that are not regular files get a `fault`. Raises DataError for a
    path that does not exist, a folder or pattern without files, an archive, and a `split` that no input has.
    """
    sources = []
    for index, entry in enumerate([*inputs, *validation_inputs]):
        is_validation = index >= len(inputs)
        wanted = VALIDATION_SPLIT if is_validation else split
        if entry.startswith(HUB_PREFIX):
            parse_hub_name(entry)
            part = f":{wanted}" if wanted and ":" not in entry.removeprefix(HUB_PREFIX) else ""
            sources.append(Source(entry + part, None, index, validation=is_validation))
            continue
        try:
            found = _files_of(entry, wanted, notice)
        except OSError as error:
            raise DataError(f"{entry}: expected readable files, found: {reason_of(error)}") from error
        for name, path, of in found:
            own = is_validation or (split in (None, TRAIN_SPLIT) and of == VALIDATION_SPLIT)
            sources.append(_with_status(Source(name, path, index, entry == STDLIB_CHAT, of, own), path))
    for source in sources:
        if source.path is not None and source.format() in _ARCHIVES:
            raise DataError(
                f"{source.name}: expected a file of documents, found a {source.format()} archive; unpack it"
            )
    if split and split != "all" and not any(s.split or s.name.endswith(f":{split}") for s in sources):
        raise DataError(
            f"--split: expected an input with a split {split} (a folder with a data set in splits, or "
            f"{HUB_PREFIX}…), found none in {', '.join(inputs)}"
        )
    found = list(_without_repetition(sorted(sources, key=lambda source: not source.validation)))
    if all(source.validation for source in found):
        raise DataError(f"{', '.join(inputs)}: expected other files than those for validation, found none")
    return found


def _with_status(source: Source, path: Path) -> Source:
    try:
        status = path.stat()
    except OSError as error:
        return replace(source, fault=(UNREADABLE, f"found: {error.strerror}"))
    if not stat.S_ISREG(status.st_mode):
        return replace(source, fault=(UNREADABLE, "expected a plain file, found another kind"))
    return replace(source, status=status)


def _without_repetition(sources: Iterable[Source]) -> Iterable[Source]:
    """Sets the `fault` of a source that is an earlier source's file; drops it if that is for validation."""
    earlier: dict[tuple[object, ...], Source] = {}
    for source in sources:
        status = source.status
        key = (source.conversations, *((status.st_ino, status.st_dev) if status else (source.name,)))
        first = earlier.setdefault(key, source)
        if first is not source and first.validation:
            continue
        if first is not source:
            advice = "to weigh it more, prepare it apart and give data.sources a weight"
            fault = (REPEATED, f"expected each file once, found it as {first.name} before; {advice}")
            yield replace(source, fault=source.fault or fault)
        else:
            yield source


def _files_of(
    entry: str, split: str | None, notice: Callable[[str], object]
) -> list[tuple[str, Path, str | None]]:
    """The files of an input: name, path, and split of the data set in splits that it is from."""
    path = Path(entry)
    if entry in (STDLIB, STDLIB_CHAT):
        return [(name, file, None) for name, file in _stdlib_files()]
    if address := _ADDRESS.fullmatch(entry):
        raise DataError(
            f"{entry}: expected a path, found an address ({address[1]}://); copy its files into a folder and "
            f"give that; a data set of the Hugging Face hub is written {HUB_PREFIX}OWNER/NAME"
        )
    if path.name.startswith("datasets--") and (branch := path / "refs" / "main").is_file():  # the hub's cache
        path = path / "snapshots" / branch.read_text().strip()
    if path.is_dir():
        found = _visible_files(path, split, notice)
        if not found:
            raise DataError(f"{entry}: expected a folder with .jsonl or other files, found none in it")
        return [(str(file), file, of) for file, of in found]
    if path.is_file():
        return [(entry, path, None)]
    if path.exists():
        raise DataError(
            f"{entry}: expected a file or a folder, found a pipe or device; write it to a file first"
        )
    if glob.has_magic(entry):
        matches = [Path(match) for match in sorted(glob.glob(entry, recursive=True))]
        files = [(file, None) for file in matches if not file.is_dir()]
        folders = [folder for folder in matches if folder.is_dir() and "**" not in entry]
        files += [file for folder in folders for file in _visible_files(folder, split, notice)]
        if not files:
            raise DataError(f"{entry}: expected a pattern that files match, found none that does")
        return [(str(file), file, of) for file, of in sorted(files, key=lambda file: file[0])]
    hint = ""
    if entry.count("/") == 1 and not path.suffix and not entry.startswith((".", "/")):
        hint = f"; a data set of the Hugging Face hub is written {HUB_PREFIX}{entry}"
    raise DataError(f"{entry}: expected a file, a folder or `{STDLIB}`, found no such path{hint}")


def split_of(path: Path, *, is_folder: bool) -> str | None:
    """The split that an entry of a data set's folder is named after, or None.

    It is `train` for `train.jsonl.gz`, `wiki-train-00000-of-00002.arrow`, `train.en.jsonl`, and `train/` with
    data in it. Source code, such as `train.py`, is in no split.
    """
    named = _NAMED_SPLIT.fullmatch(path.name)
    plain = f"{named['split']}{named['rest']}" if named else path.name
    match = _SPLIT_ENTRY.fullmatch(path.name) or _SPLIT_ENTRY.fullmatch(plain)
    if match and is_folder:
        files = (file for file in path.rglob("*") if file.is_file())
        match = any(Source("", file, 0).format() in _DATA_SUFFIXES[1:] for file in files) and match
    return SPLITS[match["split"].lower()] if match else None


def _splits_in(folder: Path, folders: list[str], names: list[str], split: str) -> dict[str, str]:
    """Entry → split for the entries of a data set in splits; empty if `folder` holds none.

    It is a `DatasetDict` that `save_to_disk` wrote, or has several splits and fewer other files, or only
    `split`. Raises DataError without `split`; a folder of files without `train` counts as none in splits.
    """
    if is_saved := "dataset_dict.json" in names:
        saved = [name for name in folders if (folder / name / "state.json").is_file()]
        found = {name: SPLITS.get(name, name) for name in saved}
    else:
        splits = {name: split_of(folder / name, is_folder=name in folders) for name in (*folders, *names)}
        found = {name: of for name, of in splits.items() if of}
        others = set(names) - found.keys() - {_CARD, *_DATASETS_NOTES}
        if others and (len(others) >= len(found) or len({*found.values()}) == 1):
            return {}
    is_set = is_saved or (split != TRAIN_SPLIT and len({*found.values()}) > 1)
    if is_set and split not in found.values():
        raise DataError(
            f"{folder}: expected a split {split}, found {', '.join(sorted(found)[:4])}; "
            "name the file or folder of one, or choose it with prepare's --split"
        )
    return found if split in found.values() else {}


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


def _visible_files(
    folder: Path, split: str | None, notice: Callable[[str], object]
) -> list[tuple[Path, str | None]]:
    """Finds files that are not hidden, each with its split, and folders that cannot be listed.

    A folder is read once, also through links. A data set in splits, at any depth, gives only `split`, or
    `train` and its validation split. Raises DataError if a saved one has no such split.
    """
    visible: list[Path] = []
    left_out: set[Path] = set()
    unlisted: list[OSError] = []
    splits: dict[Path, str | None] = {}
    described: set[Path] = set()
    main = SPLITS.get(split or TRAIN_SPLIT, split or TRAIN_SPLIT)
    wanted = {main, VALIDATION_SPLIT} if main == TRAIN_SPLIT else {main}
    seen = {*folder.resolve().parents}
    for parent, folders, entries in os.walk(folder, onerror=unlisted.append, followlinks=True):
        here = Path(parent)
        if (real := here.resolve()) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        names = [name for name in entries if not name.startswith(".")]
        inherited = splits.get(here)
        if found := {} if inherited or split == "all" else _splits_in(here, folders, names, main):
            described |= {here, *here.parents}
            kept = {name for name, of in found.items() if of in wanted}
            left_out |= {here / name for name in {*names, *found} - kept}
            folders[:] = [name for name in folders if name in kept or name not in found]
            names = [name for name in names if name in kept]
        splits |= {here / name: found.get(name, inherited) for name in (*folders, *names)}
        saved_files = _saved_files(here) if "state.json" in names else None
        visible.extend([here / name for name in names] if saved_files is None else saved_files)
    saved = {path.parent for path in visible if path.suffix == ".arrow"}
    saved |= {path.parent for path in visible if path.name == "dataset_dict.json"}
    left_out |= {path for path in visible if path.name == _CARD and path.parent in described}
    visible += [Path(error.filename) for error in unlisted]
    read = [p for p in visible if not (p.name in _DATASETS_NOTES and p.parent in saved) and p not in left_out]
    names = sorted(p.relative_to(folder).as_posix() for p in left_out if p.name not in _DATASETS_NOTES)
    if of := sorted({name for path in read if (name := splits.get(path))}):
        shown = ", ".join(names[:4] or ["none"]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        notice(f"{folder}: read {' and '.join(of)}, left out {shown}; see --split")
    return [(path, splits.get(path)) for path in sorted(read, key=lambda p: p.relative_to(folder).as_posix())]


def _stdlib_files() -> list[tuple[str, Path]]:
    """Name and path of each; Debian's has a link to another of its files, which counts once."""
    root, files = Path(sysconfig.get_paths()["stdlib"]), []
    for folder, inner, names in os.walk(root):
        # not installed packages, which can have many times as many files
        inner[:] = [name for name in inner if name not in _STDLIB_EXCLUDED]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    once = {os.path.realpath(path): path for path in sorted(files, reverse=True)}
    return sorted((path.relative_to(root).as_posix(), path) for path in once.values())
