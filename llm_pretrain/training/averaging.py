"""An exponential moving average of the parameters, kept as optimizer state; training itself never reads it.

Evaluation, samples and exported weights do. Where it stands in a checkpoint is in `checkpoints`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from llm_pretrain.checkpoints import AVERAGE
from llm_pretrain.training.sharding import own_part

DECAY = "ema_decay"
"""The groups' setting, which a resumed run takes from its configuration."""


def keep_average(optimizer: Optimizer, decay: float) -> None:
    """Let every step of the optimizer end by moving each parameter's average towards the parameter.

    With t the parameter's steps, this one included: average ← d · average + (1 - d) · parameter, where
    d = min(decay, (1 + t) / (10 + t)); it starts as the parameter after the first step. The smaller decay of
    the first steps, after TensorFlow's ExponentialMovingAverage, keeps the start out of the average as it
    leaves: at step t it looks back over about a tenth of the t steps so far, until that is more than
    1 / (1 - decay). A step that was skipped moves nothing, also where only the device knows
    (`found_inf`).
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
                continue  # it has never had a gradient
            if AVERAGE not in state:
                state[AVERAGE] = parameter.detach().clone()
                continue
            if weight is None:  # a group's parameters have taken the same steps
                weight = _weight(state["step"], group[DECAY], found_inf)
            own_part(state[AVERAGE]).lerp_(own_part(parameter), weight)


def _weight(step: Tensor, decay: float, found_inf: Tensor | None) -> Tensor:
    """The parameter's weight in its average, on the device; 0 in a step that moved nothing."""
    weight = 1 - ((1 + step) / (10 + step)).clamp(max=decay)
    return weight if found_inf is None else weight * (found_inf == 0).to(weight).reshape(())


@contextmanager
def averaged(optimizer: Optimizer) -> Iterator[None]:
    """Let the parameters be their averages in the block, and afterwards themselves again, to the bit.

    In place, so that whatever holds or shards them goes on holding them. Where there is no average nothing
    changes. In the block the averages are not where they belong: neither step nor save a checkpoint.
    """
    pairs = [
        (own_part(parameter), own_part(optimizer.state[parameter][AVERAGE]))
        for group in optimizer.param_groups
        for parameter in group["params"]
        if AVERAGE in optimizer.state.get(parameter, {})
    ]
    spare = _spare(pairs)  # all that the way back needs: it must not fail for want of memory
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
