"""Makes the loss or the gradient of one rank not finite, at some steps."""

from __future__ import annotations

import math
import sys
from typing import Any

from support.engines import engine_class

REASON = {"both": "nonfinite_gradient", "gradient": "nonfinite_gradient", "loss": "nonfinite_loss"}
SPOILT_RANK = 1


def spoilt(output: Any, kind: str) -> Any:
    """The output with a NaN in the loss's gradient, or an infinite loss whose gradient is finite, or both."""
    loss = output.loss_sum
    if kind == "both":
        return output._replace(loss_sum=loss * math.nan)
    if kind == "loss":
        return output._replace(loss_sum=loss + math.inf)
    loss.register_hook(lambda gradient: gradient * math.nan)
    return output


def spoil_class(engine: Any, kind: str, first: int, last: int) -> None:
    """Let an engine class's forward passes with gradients be spoilt in these steps on one rank."""
    forward = engine.forward

    def spoilt_forward(self: Any, batch: Any) -> Any:
        output = forward(self, batch)
        trains = output.loss_sum is not None and output.loss_sum.requires_grad and batch.num_loss_tokens
        if trains and self.rank == SPOILT_RANK and first <= batch.step + 1 <= last:
            return spoilt(output, kind)
        return output

    engine.forward = spoilt_forward


def spoil_launch(launcher: str, kind: str, first: int) -> None:
    """Spoil this process's engine from a step on."""
    spoil_class(engine_class(launcher), kind, first, sys.maxsize)
