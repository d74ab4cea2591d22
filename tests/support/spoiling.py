"""Makes the loss or the gradient of one rank not finite, at some steps.

As a script, `spoiling.py LAUNCHER KIND FIRST LAST OPTIONS…` trains with rank 1 spoilt from step FIRST to
LAST, counted from 1.
"""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from typing import Any

KINDS = ("both", "gradient", "loss")
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


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent.parent))
    launcher, kind, first, last = sys.argv[1:5]
    names = {"torchrun": ("train_pretrain", "TorchrunEngine")}
    names["accelerate"] = ("train_pretrain_accelerate", "AccelerateEngine")
    script = importlib.import_module(names[launcher][0])
    spoil_class(getattr(script, names[launcher][1]), kind, int(first), int(last))
    script.exit_process(script.main(sys.argv[5:]))
