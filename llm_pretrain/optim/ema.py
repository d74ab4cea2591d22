"""Exponential moving average (EMA) of the parameters, kept as optimizer state under the key `ema`.

As optimizer state, the average is sharded, saved and restored like the moments. Evaluation, samples and
exported weights use the average.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from llm_pretrain.optim.param_groups import to_local

AVERAGE = "ema"
"""Key of the average in a parameter's optimizer state."""
DECAY = "ema_decay"
"""Key of the decay in a parameter group; a resumed run takes the decay from its configuration."""


def keep_ema(optimizer: Optimizer, decay: float) -> None:
    """Update the average of every parameter at the end of every optimizer step.

    average ← d · average + (1 - d) · parameter, with d = min(decay, (1 + t) / (10 + t)) and t the parameter's
    steps including this one. The average starts as the parameter after the first step. The smaller d of early
    steps (as in TensorFlow's ExponentialMovingAverage) make the average forget the start: at step t it covers
    about the last t / 10 steps, up to 1 / (1 - decay) steps. A skipped step changes nothing, even if
    the decision stays on the device (`found_inf`).
    """
    optimizer.defaults[DECAY] = decay
    for group in optimizer.param_groups:
        group[DECAY] = decay
    optimizer.register_step_post_hook(_update)


@torch.no_grad()
def _update(optimizer: Optimizer, *_: Any) -> None:
    found_inf = getattr(optimizer, "found_inf", None)
    for group in optimizer.param_groups:
        weight: Tensor | None = None
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if not state:
                continue  # the parameter never had a gradient
            if AVERAGE not in state:
                state[AVERAGE] = parameter.detach().clone()
                continue
            if weight is None:  # all parameters of a group have the same step count
                weight = _weight(state["step"], group[DECAY], found_inf)
            to_local(state[AVERAGE]).lerp_(to_local(parameter), weight)


def _weight(step: Tensor, decay: float, found_inf: Tensor | None) -> Tensor:
    """Weight of the parameter in its average, on the device; 0 in a skipped step."""
    weight = 1 - ((1 + step) / (10 + step)).clamp(max=decay)
    return weight if found_inf is None else weight * (found_inf == 0).to(weight).reshape(())


@contextmanager
def ema_parameters(optimizer: Optimizer) -> Iterator[None]:
    """Exchange parameters and averages for the block, and exchange them back afterwards, bit for bit.

    The exchange is in place, so references stay valid. Parameters without an average do not change.
    Do not step or save a checkpoint inside the block.
    """
    pairs = [
        (to_local(parameter), to_local(optimizer.state[parameter][AVERAGE]))
        for group in optimizer.param_groups
        for parameter in group["params"]
        if AVERAGE in optimizer.state.get(parameter, {})
    ]
    spare = _spare(pairs)  # allocated once: the exchange back must not run out of memory
    changed: list[tuple[Tensor, Tensor]] = []
    try:
        for pair in pairs:
            _exchange(*pair, spare)
            changed.append(pair)
        yield
    finally:
        for pair in changed:
            _exchange(*pair, spare)


@torch.no_grad()
def _exchange(left: Tensor, right: Tensor, spare: Tensor) -> None:
    kept = spare[: left.numel()].view(left.shape).copy_(left)
    left.copy_(right)
    right.copy_(kept)


def _spare(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    largest = max((left for left, _ in pairs), key=Tensor.numel, default=torch.empty(0))
    return torch.empty(largest.numel(), dtype=largest.dtype, device=largest.device)


def average_name(parameter: str) -> str:
    """Flat name of a parameter's average in a checkpoint."""
    return f"optimizer.state.{parameter}.{AVERAGE}"
