"""Reads plain files of bounded size, replaces files atomically, and tells which files this program wrote.

The program never deletes, truncates or replaces other files. A run's folder and a weights folder have the
marker `MARKER`, a store has `store.json`, a checkpoint `manifest.json`. All except a run's marker list the
folder's files; a folder with any other file is kept. A single file has a mark in its text.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import secrets
import stat
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import Any

from llm_pretrain.errors import CheckpointError, ConfigError, DataError, OutputError
from llm_pretrain.text import reason_of

MAX_BYTES = 1 << 28
"""Size limit for reading a JSON file; a tokenizer.json with a large vocabulary takes 30 MB."""
MARKER = ".llm_pretrain.json"
"""Name of the marker: it has the run's id in a run's folder, and the list of files in a weights folder."""
_MANIFESTS = (MARKER, "store.json", "manifest.json")
_CHECKPOINT_KEYS = {"format_version", "run", "tensors", "files", "sha256"}
_TEMPORARY = re.compile(r"\.(.+)\.tmp-[a-z0-9_]{8}")
_HEAD_BYTES = 1 << 12
"""A file's mark is within this many bytes from its start."""
_PATHS = re.compile(
    r"(^|\.)(output|output_dir|input|validation_input|exclude|store|tokenizer|source|resume|start_from"
    r"|init_from|runs?|paths|folder|ladder|(accelerate_)?config|from_pretrained|prompt_file)$"
)
"""Names of settings and options that are paths."""


def expand_paths(value: Any, name: str = "") -> Any:
    """`value` with `~` and `$VARIABLE` expanded in all paths in it, as by a shell; other texts are kept.

    Raises:
        ConfigError: names a variable that is not set, or a home folder that does not exist.
    """
    if isinstance(value, dict):
        return {key: expand_paths(each, f"{name}.{key}".lstrip(".")) for key, each in value.items()}
    if isinstance(value, list):
        return [expand_paths(each, name) for each in value]
    if not _PATHS.search(name) or not isinstance(value, str | Path):
        return value
    if "output" in name and re.match(r"\w+://", str(value)):
        raise ConfigError(f"{name}: expected a path, found an address: {value}; write to a disk and copy it")
    path = os.path.expanduser(value)
    if not os.path.lexists(path):  # else its name has a $
        path = os.path.expandvars(path)
        if unset := re.match("~[^/]*", path) or re.search(r"\$(\w+|{\w+})", path):
            raise ConfigError(f"{name}: expected a value of {unset[0]}, found none for {value}; write it out")
    return type(value)(path)


def ids_digest(spec: Mapping[str, Any]) -> str:
    """SHA-256 of what determines ids in the content of a tokenizer.json; other entries add or cut tokens."""
    others = dict.fromkeys(("truncation", "padding", "post_processor"))
    return hashlib.sha256(json.dumps({**spec, **others}, sort_keys=True).encode()).hexdigest()


def prepare_streams() -> None:
    """Replace closed standard streams (`>&-`) by the null device, and make standard output escape characters
    that its encoding lacks.

    Otherwise the next opened file would get a closed stream's number, and everything that libraries print.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # it keeps the number of a closed stream
    os.close(descriptor)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # for the process's life
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def flush_streams() -> None:
    """Flush standard output and error; redirect a stream whose reader has left to the null device."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # for Python's flush at exit


def open_plain(file: str | Path) -> BufferedReader:
    """Open a plain file for reading; never blocks.

    Raises:
        OSError: the file cannot be opened, or is not plain: a pipe would block, a device has no end.
    """
    descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "no plain file, which every process could read", str(file))
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_plain(file: str | Path, max_bytes: int = MAX_BYTES) -> bytes:
    """The content of a plain file of at most `max_bytes`.

    Raises:
        OSError: the file is larger; see also `open_plain`.
    """
    with open_plain(file) as stream:
        if os.fstat(stream.fileno()).st_size > max_bytes:
            raise OSError(errno.EFBIG, f"larger than {max_bytes >> 10} KiB", str(file))
        return stream.read()


def read_json(file: str | Path) -> Any:
    """The value in a JSON file in UTF-8.

    Raises:
        OSError: see `read_plain`.
        ValueError, RecursionError: the content is no JSON.
    """
    return json.loads(read_plain(file).decode())


def object_or_empty(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if the file has none or cannot be read."""
    try:
        content = read_json(file)
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def plain_json(value: Any) -> Any:
    """`value` in JSON's types; numbers that JSON does not have (NaN, infinity) become None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def open_data(file: Path) -> BufferedReader:
    """`open_plain`, but raises a DataError if the file cannot be opened."""
    try:
        return open_plain(file)
    except OSError as error:
        raise _unreadable(file, error) from error


def read_data(file: Path) -> bytes:
    """`read_plain`, but raises a DataError if the file cannot be read."""
    try:
        return read_plain(file)
    except OSError as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: OSError) -> DataError:
    return DataError(f"{file}: expected a readable file, found: {reason_of(error)}")


def json_object(file: Path, content: bytes) -> dict[str, Any]:
    """Parse `content` of `file` as a JSON object; raises DataError if it is none."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: expected JSON, found: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{file}: expected a JSON object, found a {type(value).__name__}")
    return value


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; raises DataError if the file has none or cannot be read."""
    return json_object(file, read_data(file))


def read_chat_template(folder: Path, name: str = "default") -> str | None:
    """A tokenizer's template in Jinja, from chat_template.jinja or else tokenizer_config.json.

    A single template is named `default`. Raises DataError if a file cannot be read.
    """
    template: Any = None
    if (folder / "chat_template.jinja").exists():
        template = read_data(folder / "chat_template.jinja").decode("utf-8", errors="replace")
    elif (folder / "tokenizer_config.json").exists():
        template = read_object(folder / "tokenizer_config.json").get("chat_template")
    templates = template if isinstance(template, list) else [{"name": "default", "template": template}]
    entries = [entry for entry in templates if isinstance(entry, dict)]
    template = next((entry.get("template") for entry in entries if entry.get("name") == name), None)
    return template if isinstance(template, str) else None


def read_special_tokens(folder: Path) -> dict[str, str]:
    """{"bos_token": "<s>", …} from a tokenizer's tokenizer_config.json, else from special_tokens_map.json."""
    named: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        content = read_object(folder / file) if (folder / file).exists() else {}
        for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
            value = content.get(key)
            token = value.get("content") if isinstance(value, dict) else value
            if isinstance(token, str):
                named[key] = token
    return named


def open_safetensors(file: Path) -> Any:
    """Open a safetensors file to read one tensor at a time; the result is a context manager.

    Raises:
        CheckpointError: the file cannot be read, or is not a safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        open_plain(file).close()  # raises for a pipe, on which safetensors would wait
        return safe_open(file, "pt")
    except (OSError, ValueError, SafetensorError) as error:  # ValueError: an invalid file name
        raise CheckpointError(f"{file}: expected a safetensors file, found: {reason_of(error)}") from error


@contextmanager
def naming(file: str | Path) -> Iterator[None]:
    """Add the file's name to an OSError in the block: errors of reading, writing and fsync lack it."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(file)
        raise


def fsync_folder(folder: Path) -> None:
    """fsync a folder, so that its entries persist after a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # some network file systems cannot sync a folder, and return EINVAL
        if error.errno != errno.EINVAL:
            error.filename = str(folder)
            raise
    finally:
        os.close(descriptor)


def fsync_file(file: Path) -> None:
    """fsync a file, so that its content persists after a power cut."""
    with file.open("rb") as stream, naming(file):
        os.fsync(stream.fileno())


def file_name(text: str, default: str = "imported") -> str:
    """`text` as a name for runs and folders; `default` if no character of `text` is allowed in a name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:128] or default  # the length limit of run.name


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, and fsync each new entry."""
    missing = [each for each in (folder, *folder.parents) if not each.is_dir()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in reversed(missing):
        fsync_folder(each.parent)


def write_text(file: Path, text: str) -> None:
    """Write and fsync `text`."""
    with file.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def replace_text(file: Path, text: str) -> None:
    """Replace a file's content atomically: a reader finds the old or the new text, even after a crash.

    Raises:
        OSError: the file cannot be written; the error has its name. The old file stays, and no other is left.
    """
    temporary = file.with_name(f".{file.name}.tmp-{secrets.token_hex(4)}")
    try:
        with temporary.open("x", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())  # else a power cut may leave an empty file
        os.replace(temporary, file)
    except BaseException as error:
        if isinstance(error, OSError):
            error.filename = str(file)
        with suppress(OSError):  # a read-only file system refuses the deletion, too
            temporary.unlink()
        raise


def remove_leftovers(folder: Path, names: Collection[str]) -> None:
    """Delete temporary files of `names` that killed calls of `replace_text` left; no other may be running."""
    for entry in list(os.scandir(folder)):
        match = _TEMPORARY.fullmatch(entry.name)
        if match and match[1] in names and entry.is_file(follow_symlinks=False):
            Path(entry.path).unlink(missing_ok=True)


def write_marker(folder: Path, kind: str, **content: Any) -> None:
    """Mark a folder as written by this program, with its `kind` (such as `weights`)."""
    text = json.dumps({"format": f"llm_pretrain {kind}", **content}, indent=1) + "\n"
    replace_text(folder / MARKER, text)


def read_marker(folder: Path, kind: str) -> dict[str, Any] | None:
    """The content of a folder's marker; None if the folder has no marker of `kind`.

    Raises:
        OSError: the marker cannot be read.
    """
    try:
        content = read_json(folder / MARKER)
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None
    is_of_kind = isinstance(content, dict) and content.get("format") == f"llm_pretrain {kind}"
    return content if is_of_kind else None


def listed_files(folder: Path) -> frozenset[str] | None:
    """Relative names of a manifest and the files that it lists; None if the folder has no manifest."""
    for name in _MANIFESTS:
        content = object_or_empty(folder / name)
        if not isinstance(content.get("files"), list | dict):
            continue
        if str(content.get("format")).startswith("llm_pretrain ") or content.keys() >= _CHECKPOINT_KEYS:
            return frozenset([name, *map(str, content["files"])])
    return None


def foreign_file(folder: Path, also: str = "") -> str | None:
    """The first file or link in a folder that its manifest does not list; None if all are listed.

    Args:
        folder: The folder; it may have no manifest.
        also: Pattern of further file names that this program writes to the folder.
    """
    if folder.is_symlink() or not folder.is_dir():
        return folder.name
    listed, pattern = listed_files(folder) or frozenset(), re.compile(also or r"(?!)")
    for parent, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        for name in sorted([*files, *links]):
            relative = os.path.relpath(os.path.join(parent, name), folder)
            if relative not in listed and not pattern.fullmatch(relative):
                return relative
    return None


def check_replaceable(file: Path, *marks: bytes, begin: bytes = b"") -> None:
    """Check that `file` may be replaced: it does not exist, is empty, or was written by this program. Such a
    file begins with `begin` and has one of `marks` in its first bytes.

    Raises:
        OutputError: `file` is something else.
    """
    if not os.path.lexists(file):
        return
    found = "a link"
    if not file.is_symlink():
        try:
            with open_plain(file) as stream:
                head = stream.read(_HEAD_BYTES)
            if not head or (head.startswith(begin) and any(mark in head for mark in marks)):
                return
            found = "another file"
        except OSError as error:
            found = reason_of(error)
    raise OutputError(
        f"{file}: expected a new file, or one that this program wrote, found {found}; choose another name"
    )
