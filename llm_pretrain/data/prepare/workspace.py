"""The resumable work folder of `prepare`, `.NAME.partial` beside the store, and its running totals."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from llm_pretrain.data.prepare.encoding import EncodedBatch
from llm_pretrain.data.store.writer import HashedFile, StaleStateError
from llm_pretrain.errors import OutputError
from llm_pretrain.files import MARKER, read_json, read_marker, replace_text, write_marker

STORE = "store"
"""Subfolder in which the store is written."""
REPLACED = STORE + "-old"
"""Subfolder of the store being replaced, between the two renames of a commit."""
_KEPT = ("lock", "pid", MARKER)
"""Names of what stands in the folder as long as a process is at work in it."""


class Workspace:
    """Holds the lock of `output` while used as a context manager.

    Attributes: `folder`, and `state`: what was last saved with the same `fingerprint` (of inputs, tokenizer
    and options), or None. Raises OutputError where another process prepares the same output.
    """

    def __init__(self, output: Path, fingerprint: str):
        self.folder = output.parent / f".{output.name}.partial"
        self.state: dict[str, Any] | None = None
        self._output = output
        self._fingerprint = fingerprint
        self._lock = FileLock(self.folder / "lock")
        self._removed = False

    def __enter__(self) -> Workspace:
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._refuse_other_content()
            try:
                self._lock.acquire(timeout=0)
            except FileNotFoundError:
                continue  # the lock's last holder has just removed the folder
            except Timeout:
                raise OutputError(
                    f"{self._output}: expected no other prepare at work on it, found {self._holder()}; "
                    "wait until it is done, or choose another --output"
                ) from None
            if (self.folder / "lock").exists():
                break
            self._lock.release()
        write_marker(self.folder, "prepare")  # before any file that it vouches for
        (self.folder / "pid").write_text(str(os.getpid()))
        self._restore_replaced_store()
        self.state = self._read_state()
        if self.state is None:
            self.clear()
        return self

    def __exit__(self, *_: object) -> None:
        if self.state is None:
            self.remove()
        if not self._removed:
            (self.folder / "pid").unlink(missing_ok=True)
        self._lock.release()

    def _refuse_other_content(self) -> None:
        """Refuse a folder that an earlier `prepare` did not leave, since all in it would be deleted."""
        found = None
        with suppress(FileNotFoundError):  # the lock's last holder has just removed it
            entries = list(os.scandir(self.folder))
            links = [entry.name for entry in entries if entry.is_symlink()]
            begun = f".{MARKER}.tmp-"  # by a process that was killed before its folder had a marker
            names = [entry.name for entry in entries if not entry.name.startswith(begun)]
            other = [name for name in names if name not in ("lock", "pid")]
            if self.folder.is_symlink() or links:
                found = f"a link: {min(links, default=self.folder.name)}"
            elif other and read_marker(self.folder, "prepare") is None:
                found = f"{min(other)} in it, and no {MARKER} of it"
            elif (lock := self.folder / "lock").exists() and lock.stat().st_size:
                found = "a lock with content"
        if found:
            raise OutputError(
                f"{self.folder}: expected the folder in which {self._output} is prepared, found {found}; "
                "move it, or choose another --output"
            )

    def _restore_replaced_store(self) -> None:
        """Moves the old store back where a kill came between the two renames of a commit."""
        old = self.folder / REPLACED
        if old.is_dir() and not self._output.exists():
            old.rename(self._output)

    def save(self, state: dict[str, Any]) -> None:
        """Saves `state` atomically; the files it describes must be on disk already."""
        self.state = state
        content = {"fingerprint": self._fingerprint, "digest": _digest(state), "state": state}
        replace_text(self.folder / "state.json", json.dumps(content))

    def clear(self) -> None:
        """Discards all work; the folder keeps only its lock."""
        self.state = None
        (self.folder / "state.json").unlink(missing_ok=True)  # first: it describes the other files
        self._clear_but(*_KEPT)

    def remove(self) -> None:
        """Removes the folder."""
        if self._removed:
            return  # a folder of this name belongs to another process now
        self._clear_but(*_KEPT, "state.json")
        (self.folder / "state.json").unlink(missing_ok=True)  # last: it may record that the store is complete
        shutil.rmtree(self.folder, ignore_errors=True)
        self._removed = True

    def _clear_but(self, *kept: str) -> None:
        for entry in self.folder.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name not in kept:
                entry.unlink()

    def _read_state(self) -> dict[str, Any] | None:
        try:
            content = read_json(self.folder / "state.json")
            same = content["fingerprint"] == self._fingerprint
            return content["state"] if same and content["digest"] == _digest(content["state"]) else None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def _holder(self) -> str:
        try:
            return f"process {int((self.folder / 'pid').read_text())}"
        except (OSError, ValueError):
            return "one"


def _digest(state: dict[str, Any]) -> str:
    """SHA-256 of a state: a damaged or edited one must not be resumed, as it could make a wrong store."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


HASHES = 1 << 64
ZLIB_LIMIT = 64 << 20
"""zlib's bits per byte are taken over at most this many leading bytes of the validation text."""

_COUNTS = ("documents", "altered", "duplicates", "lowest", "highest", "validation_documents")


class Totals:
    """Counts over all documents of a preparation. Use as a context manager, which closes its files.

    The validation text and the keys of documents seen are too large for the state and are kept in files.
    Attributes: `documents` (stored), `altered` (stored, but their tokens do not decode to their text),
    `duplicates` (left out), `skipped` (records by cause), `entries` (documents per input).
    """

    def __init__(self, folder: Path, inputs: int, state: dict[str, Any] | None = None):
        self.documents = self.altered = self.duplicates = self.validation_documents = 0
        self.lowest, self.highest = HASHES, -1
        self.skipped: Counter[str] = Counter()
        self.entries = [0] * inputs
        if state is not None:
            for name in _COUNTS:
                setattr(self, name, state[name])
            self.skipped.update(state["skipped"])
            self.entries = list(state["entries"])
        text, keys = ((), ()) if state is None else (state["text"], state["keys"])
        self._text = HashedFile(folder / "validation-text", *text)
        try:
            self._keys = HashedFile(folder / "document-keys", *keys)
        except StaleStateError:
            self._text.abandon()
            raise

    def __enter__(self) -> Totals:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files."""
        self._text.abandon()
        self._keys.abandon()

    def add(self, batch: EncodedBatch, entries: np.ndarray, duplicates: int, *, keep_keys: bool) -> None:
        """Counts a batch without its `duplicates`; `entries` [documents] are the documents' inputs."""
        self.skipped += batch.skipped
        self.duplicates += duplicates
        self.documents += len(batch.lengths)
        self.altered += int(np.count_nonzero(batch.altered))
        self.entries = (self.entries + np.bincount(entries, minlength=len(self.entries))).tolist()
        if len(batch.hashes):
            self.lowest = min(self.lowest, int(batch.hashes.min()))
            self.highest = max(self.highest, int(batch.hashes.max()))
        self.validation_documents += len(batch.texts)
        for text in batch.texts:
            self._text.write(text[: max(0, ZLIB_LIMIT - self._text.bytes)])
        if keep_keys:
            self._keys.write(batch.keys.tobytes())

    def state(self) -> dict[str, Any]:
        """State to resume from; the files are flushed to disk first."""
        return {
            **{name: getattr(self, name) for name in _COUNTS},
            "skipped": dict(self.skipped),
            "entries": self.entries,
            "text": self._text.sync(),
            "keys": self._keys.sync(),
        }

    def keys(self) -> np.ndarray:
        """uint64 keys of all documents added with `keep_keys`."""
        return np.frombuffer(b"".join(self._keys.content()), dtype=np.uint64)

    def other_threshold(self, threshold: int) -> int | None:
        """A threshold that leaves neither split empty, or None if `threshold` does or none can."""
        if threshold == 0 or self.lowest == self.highest:
            return 0 if threshold and self.validation_documents else None
        if self.validation_documents == 0:
            return self.lowest + 1
        return self.highest if self.validation_documents == self.documents else None

    def zlib_bits_per_byte(self) -> float | None:
        """Compressed bits per byte of the validation text at level 9; None without text."""
        size, packed = self._text.bytes, 0
        if not size:
            return None
        compressor = zlib.compressobj(9)
        for data in self._text.content():
            packed += len(compressor.compress(data))
        return 8 * (packed + len(compressor.flush())) / size

    def causes(self) -> str:
        """` (left out: 2 invalid JSON)`, or an empty string."""
        if not self.skipped:
            return ""
        parts = (f"{count} {cause}" for cause, count in sorted(self.skipped.items()))
        return f" (left out: {', '.join(parts)})"
