"""One action at a time in a thread beside the training, and the channel on which it speaks to other ranks.

The thread's collectives must not mix with the training's, so they have a process group of their own: over
gloo, whose collectives need no GPU. What is done in the background is the caller's business.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch

from llm_pretrain.config import Config

T = TypeVar("T")
distributed: Any = torch.distributed
"""Untyped, because what is documented of it is not all exported in pyright's eyes."""


class Channel:
    """A second process group over all ranks, for one thread at a time."""

    def __init__(self, timeout: timedelta):
        self._group = distributed.new_group(backend="gloo", timeout=timeout)

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank; also a barrier."""
        gathered = [None] * distributed.get_world_size(self._group)
        distributed.all_gather_object(gathered, value, group=self._group)
        return gathered

    def close(self) -> None:
        """Leave the group; before the default one is left, when every rank's thread has ended."""
        distributed.destroy_process_group(self._group)


def open_channel(config: Config, world_size: int, timeout: timedelta) -> Channel | None:
    """The channel for background saves, where the configuration asks for them and others are there."""
    if world_size == 1 or not config.checkpoint.async_save:
        return None
    return Channel(timeout)


def close_channel(channel: Channel | None) -> None:
    """Leave the channel, if there is one."""
    if channel is not None:
        channel.close()


class Background(Generic[T]):
    """An action that runs in a thread, and what became of it: its result, or its `error`.

    The thread is a daemon: a process that ends without waiting for it takes it along.
    """

    def __init__(self, action: Callable[[], T]):
        self._action = action
        self._results: list[T] = []
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="background-save", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether the action has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the action's end, at most `seconds`; whether it has ended."""
        self._thread.join(seconds)
        return self.is_done

    def result(self) -> T:
        """Wait for the action, and give its result or raise its error."""
        self._thread.join()
        if self.error is not None:
            raise self.error
        return self._results[0]

    def _run(self) -> None:
        try:
            self._results.append(self._action())
        except BaseException as error:  # raised where the result is taken
            self.error = error
