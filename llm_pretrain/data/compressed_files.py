"""Opens files that are compressed as a whole, and says what shows that one is cut short or damaged.

Knows nothing of records: `readers.py` does.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from pathlib import Path
from typing import Any

DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)
"""What reading a damaged file raises; besides, an OSError without a number (bz2 has none of its own)."""

_CHUNK = 1 << 20
_ZSTANDARD_CHUNK = 1 << 12
"""Few bytes at a time, as each of them may stand for tens of thousands."""


def open_binary(path: Path, compression: str) -> Any:
    """The file's own bytes, decompressed. Reading raises one of `DAMAGE` where they end too soon."""
    if compression == ".gz":
        return gzip.open(path, "rb")
    if compression == ".bz2":
        return bz2.open(path, "rb")
    if compression == ".xz":
        return lzma.open(path, "rb")
    if compression == ".zst":
        return io.BufferedReader(_ZstandardFile(path), _CHUNK)
    return path.open("rb")


class _ZstandardFile(io.RawIOBase):
    """Frame after frame of a .zst file; unlike the library's own reader it minds where the last one ends."""

    def __init__(self, path: Path):
        import zstandard

        self._file = path.open("rb")
        self._new_frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj
        self._frame = self._new_frame()
        self._error = zstandard.ZstdError
        self._begun = False
        self._rest = self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._ready:
            data = self._rest or self._file.read(_ZSTANDARD_CHUNK)
            self._rest = b""
            if not data:
                if self._begun:
                    raise EOFError("the last zstandard frame is cut short")
                return 0
            try:
                self._ready = self._frame.decompress(data)
            except self._error as error:
                raise EOFError(str(error)) from error
            self._begun = not self._frame.eof
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, self._new_frame()
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def close(self) -> None:
        self._file.close()
        super().close()
