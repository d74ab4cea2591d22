"""Leaves the work that two loops share out of their difference: forward and backward pass, optimizer's step.

Where two ways to train make the same calls on the same shapes, their time adds nothing but its noise to the
difference of the ways, and that noise is larger than what is looked for. Knows no loop.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.nn import Module
from torch.optim import Optimizer


class Lap(NamedTuple):
    """CPU seconds of this process: all of a lap, and those outside what is left out."""

    whole: float
    own: float

    @classmethod
    def mean(cls, laps: Sequence[Lap]) -> Lap:
        """The mean of at least one."""
        return cls(*map(statistics.fmean, zip(*laps, strict=True)))

    @classmethod
    def sum(cls, laps: Sequence[Lap]) -> Lap:
        """The sum, over ranks for one."""
        return cls(*map(sum, zip(*laps, strict=True)))


class Stopwatch:
    """Takes laps; while it is entered, autograd's backward pass is left out of `Lap.own`."""

    def __init__(self) -> None:
        self._since, self._left_out = time.process_time(), 0.0
        self._backward = patch.object(torch.autograd, "backward", self._apart(torch.autograd.backward))

    def __enter__(self) -> Stopwatch:
        self._backward.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._backward.stop()

    def leave_out(self, model: Module, optimizer: Optimizer) -> None:
        """Leave out this model's forward pass and this optimizer's step; call before either is wrapped."""
        model.forward = self._apart(model.forward)
        optimizer.step = self._apart(optimizer.step)  # type: ignore[method-assign]  # an instance's own

    def lap(self) -> Lap:
        """The time since the last lap."""
        before, self._since = self._since, time.process_time()
        left_out, self._left_out = self._left_out, 0.0
        return Lap(self._since - before, self._since - before - left_out)

    def _apart(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def apart(*arguments: Any, **options: Any) -> Any:
            before = time.process_time()
            result = call(*arguments, **options)
            self._left_out += time.process_time() - before
            return result

        return apart
