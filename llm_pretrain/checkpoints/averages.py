"""Where an average of the parameters stands beside them: in the optimizer's state, under one name.

So it is sharded, saved and restored as moments are. How it is kept is training's business.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

AVERAGE = "ema"
"""The state's key by parameter."""


def average_name(parameter: str) -> str:
    """Flat name of a parameter's average in a checkpoint, where it has one."""
    return f"optimizer.state.{parameter}.{AVERAGE}"


def averages(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The averages by parameter's name, both names of a tied one; empty where none are kept, or none yet."""
    state: dict[Any, dict[str, Tensor]] = optimizer.state
    named = model.named_parameters(remove_duplicate=False)
    return {name: state[p][AVERAGE] for name, p in named if p in state and AVERAGE in state[p]}
