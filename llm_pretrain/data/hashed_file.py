"""A file that is hashed while it is written, and that can be taken up again."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from llm_pretrain.data.store_contents import sample_digest


class StaleStateError(Exception):
    """The files are not those that a writer's state speaks of."""


class HashedFile:
    """A file that is hashed while it is written; with `keep`, its first so many bytes stay.

    Raises StaleStateError where these are not there, or have another `sha256`.
    """

    def __init__(self, path: Path, keep: int | None = None, sha256: str = ""):
        self.path = path
        self._hash = hashlib.sha256()
        self.bytes = 0
        if keep is None:
            self._file = path.open("wb")
            return
        if not path.is_file() or path.stat().st_size < keep:
            raise StaleStateError(path)
        self._file = path.open("r+b")
        self._file.truncate(keep)
        while data := self._file.read(1 << 20):
            self._hash.update(data)
            self.bytes += len(data)
        if self._hash.hexdigest() != sha256:
            self._file.close()
            raise StaleStateError(path)

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self.bytes += len(data)

    def sync(self) -> tuple[int, str]:
        """Brings everything onto the disk; returns the file's size and SHA-256 so far."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self.bytes, self._hash.hexdigest()

    def abandon(self) -> None:
        """Closes a file that is not wanted; what is still to be written may find no room any more."""
        with suppress(OSError):
            self._file.close()

    def close(self) -> dict[str, Any]:
        self.sync()
        self._file.close()
        with self.path.open("rb") as written:
            sample = sample_digest(written, self.bytes)
        return {"bytes": self.bytes, "sha256": self._hash.hexdigest(), "sample": sample}
