"""Commits and prunes folders named `step-00000100`, which hold a checkpoint or exported weights.

The parent folder has other names, too. `.step-N.tmp-UUID` is being written, `.step-N.old-UUID` is being
deleted; readers ignore both. `.step-N.replaced-UUID` made room for a new `step-N` and counts as step N until
the new folder exists. The folder `best` (lowest evaluation loss) is replaced in the same way.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import uuid
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from llm_pretrain.errors import CheckpointError
from llm_pretrain.files import foreign_file, fsync_folder, listed_files

logger = logging.getLogger(__name__)

_COMMITTED = re.compile(r"step-(\d{8,})")
_REPLACED = re.compile(r"\.step-(\d{8,})\.replaced-[0-9a-f]+")
_REPLACED_BEST = re.compile(r"\.best\.replaced-[0-9a-f]+")
_TEMPORARY = re.compile(r"\.step-\d{8,}\.(?:tmp|old)-[0-9a-f]+")

_UNLISTED = r"shard-\d{5}-model-\d{5}-of-\d{5,}\.safetensors|manifest\.json"
"""Names of the files that a save writes, for a checkpoint whose manifest is damaged and lists none."""

BEST = "best"
"""Name of the folder with the lowest evaluation loss; `prune` never deletes it."""

MINIMUM_KEPT = 2
"""Number of folders that `prune` always keeps, because the newest may turn out to be damaged."""


def folder_name(step: int) -> str:
    """Name of a committed folder."""
    return f"step-{step:08d}"


def temporary_folder(parent: Path, step: int, token: str) -> Path:
    """The folder that step `step` is written to before the commit; pass one `token` on all ranks."""
    return parent / f".{folder_name(step)}.tmp-{token}"


def check_parent(parent: Path) -> None:
    """Check that `parent` is a folder or does not exist.

    Raises:
        CheckpointError: `parent` is a file or a broken link, for example because a disk is not mounted. To
            treat it as empty would start training from scratch although checkpoints exist.
    """
    if os.path.lexists(parent) and not parent.is_dir():
        raise CheckpointError(
            f"{parent}: expected a folder of checkpoints, found a file or a link that leads nowhere; bring "
            "the folder back, or start in another one"
        )


def committed_folders(parent: Path) -> dict[int, Path]:
    """Step → committed folder, in ascending order of steps. Links and other names are ignored.

    Raises:
        OSError: `parent` exists and cannot be listed.
    """
    committed: dict[int, Path] = {}
    replaced: dict[int, Path] = {}
    if parent.is_dir():
        for entry in os.scandir(parent):
            if not entry.is_dir(follow_symlinks=False):
                continue
            if (match := _COMMITTED.fullmatch(entry.name)) and entry.name == folder_name(int(match[1])):
                committed[int(match[1])] = Path(entry.path)
            elif match := _REPLACED.fullmatch(entry.name):
                replaced[int(match[1])] = Path(entry.path)
    return dict(sorted({**replaced, **committed}.items()))


def newest_step(parent: Path) -> int:
    """Step of the newest committed folder; 0 if there is none."""
    return max(committed_folders(parent), default=0)


def commit_folder(temporary: Path, name: str) -> Path:
    """Rename a completely written temporary folder to `name`, in its parent folder.

    The name may exist if the run resumed from an older step and reached this step again. The existing folder
    is renamed first and deleted last, so that one of the two counts at every moment. If it has a file that no
    save wrote, it stays as `NAME.kept-UUID`.
    """
    target = temporary.parent / name
    fsync_folder(temporary)
    old, is_kept = None, False
    if os.path.lexists(target):
        is_kept = unlisted_file(target) is not None
        name = f"{name}.kept-" if is_kept else f".{name}.replaced-"
        old = target.parent / f"{name}{uuid.uuid4().hex}"
        os.rename(target, old)
    try:
        os.rename(temporary, target)
    except OSError:
        if old is not None:
            with suppress(OSError):
                os.rename(old, target)
        raise
    fsync_folder(target.parent)
    if old is not None and not is_kept:
        discard(old)
    return target


def unlisted_file(path: Path) -> str | None:
    """A file that no save wrote, in a folder of a checkpoint or of weights; None if there is none."""
    return foreign_file(path, _UNLISTED if listed_files(path) is None else "")


def discard(path: Path) -> None:
    """Delete as much of `path` as possible; the next save deletes the rest."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def clean(parent: Path) -> None:
    """Undo interrupted replacements, and delete the temporary folders of interrupted saves."""
    best_folder(parent)
    committed = committed_folders(parent)
    for step, path in committed.items():
        if path.name != folder_name(step):
            os.rename(path, parent / folder_name(step))
    for entry in list(os.scandir(parent)):
        if any(each.fullmatch(entry.name) for each in (_TEMPORARY, _REPLACED, _REPLACED_BEST)):
            discard(Path(entry.path))


def best_folder(parent: Path) -> Path | None:
    """The folder `best`, after undoing an interrupted replacement; None if there is none."""
    best = parent / BEST
    if not best.is_dir() and parent.is_dir():
        replaced = [name for name in os.listdir(parent) if _REPLACED_BEST.fullmatch(name)]
        if replaced:
            os.rename(parent / replaced[0], best)
    return best if best.is_dir() else None


def multiples(steps: Collection[int], period: int, newest: int) -> list[int]:
    """The multiples of `period` among `steps`, up to `newest`; empty if `period` is 0."""
    return [step for step in steps if period and step <= newest and step % period == 0]


def prune(
    parent: Path, *, newest: int, keep_last: int, unsound: Collection[int] = (), period: int = 0
) -> None:
    """Delete old folders. Each is renamed first. Failures are only logged: the new folder is committed.

    Up to step `newest`, the one just committed, `prune` keeps the last `keep_last` folders, at least two. It
    keeps the last folder whose step is a multiple of `period`, for a rollback. Steps in `unsound` count for
    neither. It also keeps folders with a file that no save wrote. Folders of later steps belong to an earlier
    attempt and stay until this attempt has reached their step.
    """
    try:
        steps = [step for step in reversed(committed_folders(parent)) if step <= newest]
    except OSError as error:
        logger.warning("%s: old folders are not deleted: %s", parent, error)
        return
    sound = [step for step in steps if step not in unsound]
    kept = sound[: max(MINIMUM_KEPT, keep_last)] + multiples(sound, period, newest)[:1]
    for step in [step for step in steps if step not in kept]:
        retired = parent / f".{folder_name(step)}.old-{uuid.uuid4().hex}"
        try:
            if unlisted_file(parent / folder_name(step)) is not None:
                continue
            os.rename(parent / folder_name(step), retired)
            fsync_folder(parent)  # else a power cut may bring back the old name of a half-deleted folder
        except OSError as error:
            logger.warning("%s could not be deleted: %s", parent / folder_name(step), error)
        else:
            discard(retired)
