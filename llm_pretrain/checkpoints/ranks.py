"""All ranks act, then all agree on how it went: one rank's failure is every rank's error.

Needs no process group, only a function that gathers values; with one rank it is a plain call.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from llm_pretrain.errors import CheckpointError, PretrainError

T = TypeVar("T")


class Ranks:
    """The processes that save and restore together.

    Args:
        rank: This process's number.
        world_size: Number of processes.
        gather_objects: Gives every rank the list of all ranks' values, in their order; a barrier.
    """

    def __init__(self, rank: int, world_size: int, gather_objects: Callable[[Any], list]):
        self.rank = rank
        self.world_size = world_size
        self._gather = gather_objects

    def all_results(self, doing: str, action: Callable[[], T]) -> list[T]:
        """Every rank acts and gets the results of all.

        Raises:
            PretrainError: the error of the first rank that failed, the same on every rank. What the
                file system refuses becomes a CheckpointError that says `doing`, the rank and the path. A
                bug is raised as it is where it happened, and ends the other ranks as no CheckpointError
                would, which some callers live with.
        """
        value: T | None = None
        failure: PretrainError | None = None
        bug: Exception | None = None
        try:
            value = action()
        except PretrainError as error:
            failure = error
        except OSError as error:
            failure = CheckpointError(f"{doing} failed on rank {self.rank}: {one_line(error)}")
        except Exception as error:
            bug = error
            failure = PretrainError(f"{doing} failed on rank {self.rank}: {one_line(error)}")
        gathered = self._gather((value, failure))
        if bug is not None:
            raise bug  # ours: the traceback is shown where it happened
        for _, first in gathered:
            if first is not None:
                first.shared = True
                raise first
        return [value for value, _ in gathered]

    def each(self, doing: str, action: Callable[[], T]) -> T:
        """Every rank acts and keeps its own result, which is not sent anywhere."""
        results: list[T] = []
        self.all_results(doing, lambda: results.append(action()))
        return results[0]

    def first(self, doing: str, action: Callable[[], T]) -> T:
        """Rank 0 acts and every rank gets its result."""
        return self.all_results(doing, action if self.rank == 0 else lambda: None)[0]  # type: ignore[return-value]  # rank 0's result is a T


def one_line(error: BaseException) -> str:
    """The error's text without line breaks, with its type where the text alone says too little."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError):
        return text + _free_space(error)
    return f"{type(error).__name__}: {text}"


def _free_space(error: OSError) -> str:
    """What is left of a full disk, which a later look at it may not show."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not isinstance(error.filename, str):
        return ""
    try:
        return f" ({shutil.disk_usage(Path(error.filename).parent).free} bytes free)"
    except OSError:
        return ""
