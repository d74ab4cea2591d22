"""Small files that are replaced whole, and what it takes for a file or a name to outlive a power cut.

Knows nothing of what the files say; checkpoints have a protocol of their own on top of this.
"""

from __future__ import annotations

import errno
import os
import re
import tempfile
from pathlib import Path

_TEMPORARY = re.compile(r"\..+\.tmp-[a-z0-9_]{8}")


def fsync_folder(folder: Path) -> None:
    """Make the folder's entries survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # some network file systems cannot sync a folder, and say so like this
        if error.errno != errno.EINVAL:
            error.filename = str(folder)
            raise
    finally:
        os.close(descriptor)


def fsync_file(file: Path) -> None:
    """Make the file's content survive a power cut."""
    with file.open("rb") as stream:
        try:
            os.fsync(stream.fileno())
        except OSError as error:
            error.filename = str(file)
            raise


def make_folder(folder: Path) -> None:
    """Create a folder and those above it durably, where they are missing."""
    missing = [each for each in (folder, *folder.parents) if not each.is_dir()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in reversed(missing):
        fsync_folder(each.parent)


def replace_text(file: Path, text: str) -> None:
    """Replace a file by one with this text: a reader, and a crash at any point, finds the old or the new.

    Raises:
        OSError: naming the file that cannot be written; the old one stays, and nothing else is left.
    """
    descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.tmp-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())  # or a power cut may leave the new name with nothing in it
        os.chmod(temporary, 0o644)
        os.replace(temporary, file)
    except OSError as error:
        error.filename = str(file)
        Path(temporary).unlink(missing_ok=True)
        raise


def remove_leftovers(folder: Path) -> None:
    """Delete what killed calls of `replace_text` left in `folder`; only while nobody else writes there."""
    for entry in list(os.scandir(folder)):
        if _TEMPORARY.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
            Path(entry.path).unlink(missing_ok=True)
