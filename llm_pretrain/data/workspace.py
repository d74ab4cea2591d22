"""The folder in which a store is prepared, `.NAME.partial` beside it: its lock, and how far the work is.

What was done survives a kill, and is taken up again by the same work alone: same inputs, tokenizer, options.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from llm_pretrain.errors import OutputError

STORE = "store"
"""The store in the making, in the folder."""
REPLACED = STORE + "-old"
"""What it replaces, for the moment in which neither is in its place."""


class Workspace:
    """Use as a context manager; it holds the lock of `output` in the meantime.

    Attributes: `folder`, `state` (what was last saved under the same `fingerprint`, or None). Raises
    OutputError where another process prepares the same output.
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
            try:
                self._lock.acquire(timeout=0)
            except FileNotFoundError:
                continue  # its last holder has just removed the folder
            except Timeout:
                raise OutputError(
                    f"{self._output}: expected no other prepare at work on it, found {self._holder()}; "
                    "wait until it is done, or choose another --output"
                ) from None
            if (self.folder / "lock").exists():
                break
            self._lock.release()
        (self.folder / "pid").write_text(str(os.getpid()))
        self._give_back()
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

    def _give_back(self) -> None:
        """Returns the store that was being replaced, where a kill kept the new one from its place."""
        old = self.folder / REPLACED
        if old.is_dir() and not self._output.exists():
            old.rename(self._output)

    def save(self, state: dict[str, Any]) -> None:
        """Replaces what is known of the work; whatever it speaks of must be on disk already."""
        self.state = state
        file = self.folder / "state.json.new"
        with file.open("w", encoding="utf-8") as stream:
            content = {"fingerprint": self._fingerprint, "digest": _digest(state), "state": state}
            json.dump(content, stream)
            stream.flush()
            os.fsync(stream.fileno())
        file.replace(self.folder / "state.json")

    def clear(self) -> None:
        """Forgets the work: the folder is empty but for its lock."""
        self.state = None
        (self.folder / "state.json").unlink(missing_ok=True)  # it must not speak of what is gone
        self._clear_but("lock", "pid")

    def remove(self) -> None:
        """Removes the folder; nothing of it is needed any more."""
        if self._removed:
            return  # what is there now is another process's
        self._clear_but("lock", "pid", "state.json")
        (self.folder / "state.json").unlink(missing_ok=True)  # last, as it may say that all is done
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
            content = json.loads((self.folder / "state.json").read_text(encoding="utf-8"))
            known = content["fingerprint"] == self._fingerprint
            return content["state"] if known and content["digest"] == _digest(content["state"]) else None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def _holder(self) -> str:
        try:
            return f"process {int((self.folder / 'pid').read_text())}"
        except (OSError, ValueError):
            return "one"


def _digest(state: dict[str, Any]) -> str:
    """What a damaged or edited state cannot have by chance: going on from one could make a wrong store."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
