"""Folders named `step-00000100` that appear whole or not at all, and how old ones go.

Shared by checkpoints and exported weights. Knows nothing of what stands inside them.

Names beside the committed ones, all ignored by readers, with one exception:
`.step-N.tmp-UUID` is being written, `.step-N.old-UUID` is being deleted, and `.step-N.replaced-UUID`
made room for a new `step-N`: as long as that one does not exist, it still counts as step N. The folder
`best`, of the weights with the lowest evaluation loss, appears and is replaced in the same way.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import uuid
from collections.abc import Collection
from pathlib import Path

from llm_pretrain.errors import CheckpointError
from llm_pretrain.files import fsync_file as fsync_file
from llm_pretrain.files import fsync_folder
from llm_pretrain.files import make_folder as make_parent  # noqa: F401  # of the parts that use this module

logger = logging.getLogger(__name__)

_COMMITTED = re.compile(r"step-(\d{8,})")
_REPLACED = re.compile(r"\.step-(\d{8,})\.replaced-[0-9a-f]+")
_REPLACED_BEST = re.compile(r"\.best\.replaced-[0-9a-f]+")
_TEMPORARY = re.compile(r"\.step-\d{8,}\.(?:tmp|old)-[0-9a-f]+")

BEST = "best"
"""Name of the folder that follows the lowest evaluation loss; retention does not know it."""

MINIMUM_KEPT = 2
"""Retention never goes below this: the newest may turn out to be damaged."""


def folder_name(step: int) -> str:
    """Name of a committed folder."""
    return f"step-{step:08d}"


def temporary_folder(parent: Path, step: int, token: str) -> Path:
    """Where step `step` is written before it is committed; `token` is the same on all ranks."""
    return parent / f".{folder_name(step)}.tmp-{token}"


def check_parent(parent: Path) -> None:
    """Tell a folder that is missing, and so empty, from one whose disk is.

    Raises:
        CheckpointError: a file has its name, or a link that leads nowhere: to start from scratch there would
            be to start beside what was saved before.
    """
    if os.path.lexists(parent) and not parent.is_dir():
        raise CheckpointError(
            f"{parent}: expected a folder of checkpoints, found a file or a link that leads nowhere; bring "
            "the folder back, or start in another one"
        )


def committed_folders(parent: Path) -> dict[int, Path]:
    """Step → committed folder, in ascending order of steps. Links and foreign names do not count.

    Raises:
        OSError: the parent exists and cannot be listed.
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


def commit_folder(temporary: Path, step: int) -> Path:
    """Give a completely written temporary folder the name of its step, by one rename.

    Where the name is taken (the run fell back to an older step and comes past again), the old folder
    moves aside first and is deleted last, so that at every moment one of the two counts as step `step`.
    """
    return commit_as(temporary, folder_name(step))


def commit_as(temporary: Path, name: str) -> Path:
    """`commit_folder` under any name that `clean` knows: that of a step, or `best`."""
    target = temporary.parent / name
    fsync_folder(temporary)
    replaced = None
    if os.path.lexists(target):
        replaced = target.parent / f".{target.name}.replaced-{uuid.uuid4().hex}"
        os.rename(target, replaced)
    os.rename(temporary, target)
    fsync_folder(target.parent)
    if replaced is not None:
        discard(replaced)
    return target


def discard(path: Path) -> None:
    """Delete as much of `path` as can be deleted; what stays is cleaned up by a later save."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def clean(parent: Path) -> None:
    """Finish what earlier attempts left: undo an interrupted replacement, delete temporary folders."""
    best_folder(parent)
    committed = committed_folders(parent)
    for step, path in committed.items():
        if path.name != folder_name(step):
            os.rename(path, parent / folder_name(step))
    for entry in list(os.scandir(parent)):
        if any(each.fullmatch(entry.name) for each in (_TEMPORARY, _REPLACED, _REPLACED_BEST)):
            discard(Path(entry.path))


def best_folder(parent: Path) -> Path | None:
    """The folder `best`, an interrupted replacement of it undone; None where there is none."""
    best = parent / BEST
    if not best.is_dir() and parent.is_dir():
        replaced = [name for name in os.listdir(parent) if _REPLACED_BEST.fullmatch(name)]
        if replaced:
            os.rename(parent / replaced[0], best)
    return best if best.is_dir() else None


def multiples(steps: Collection[int], period: int, newest: int) -> list[int]:
    """Those of `steps` up to `newest` that are multiples of `period`; none where that is 0."""
    return [step for step in steps if period and step <= newest and step % period == 0]


def prune(
    parent: Path, *, newest: int, keep_last: int, unsound: Collection[int] = (), period: int = 0
) -> None:
    """Delete old folders, by renaming first; failures are logged, since the new one is already safe.

    Of the folders up to step `newest` (the one just committed), the last `keep_last` stay, at least two,
    not counting those known to be `unsound`, and the last of a multiple of `period`, to which a run may have
    to go back when stop signals have written newer ones. Later ones belong to an attempt that this run has
    not caught up with; they are left alone until it has.
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
            os.rename(parent / folder_name(step), retired)
            fsync_folder(parent)  # or a power cut may give the name back to what is half deleted
        except OSError as error:
            logger.warning("%s could not be deleted: %s", parent / folder_name(step), error)
        else:
            discard(retired)
