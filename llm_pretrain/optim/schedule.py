"""The learning rate as a pure function of the step, without state."""

from __future__ import annotations

import math
from typing import assert_never

from torch.optim import Optimizer

from llm_pretrain.config.tree import Config


def learning_rate(config: Config, step: int) -> float:
    """Learning rate of the step that follows `step` finished ones, `offset_steps` later in the schedule.

    Linear warm-up to the peak over `warmup_steps`, then the schedule's shape. After the decay the rate stays
    at `min_learning_rate`. `wsd` (warm-up, stable, decay; arXiv:2404.06395, section 4) holds the peak, and
    decays linearly over the last `decay_steps` steps of the schedule.
    """
    schedule, peak = config.schedule, config.optimizer.learning_rate
    step += schedule.offset_steps
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    if schedule.name == "constant":
        return peak
    decay_steps = decay_length(config)
    is_last = schedule.name == "wsd"
    end = config.training.max_steps + schedule.offset_steps
    decay_start = end - decay_steps if is_last else schedule.warmup_steps
    progress = min(max((step - decay_start) / decay_steps, 0.0), 1.0)
    if schedule.name == "cosine":
        share = 0.5 * (1 + math.cos(math.pi * progress))
    elif schedule.name in ("linear", "wsd"):
        share = 1.0 - progress
    else:
        assert_never(schedule.name)
    return schedule.min_learning_rate + (peak - schedule.min_learning_rate) * share


def decay_length(config: Config) -> int:
    """Steps of the decay: as configured, else all after the warm-up (`wsd`: at most the last fifth)."""
    steps = config.training.max_steps + config.schedule.offset_steps
    steps_left = max(1, steps - config.schedule.warmup_steps)
    default = min(max(1, steps // 5), steps_left) if config.schedule.name == "wsd" else steps_left
    return config.schedule.decay_steps or default


def set_learning_rate(optimizer: Optimizer, value: float) -> None:
    """Set every group's learning rate: `value` times the group's `lr_ratio` (1 if the group has none)."""
    for group in optimizer.param_groups:
        group["lr"] = value * group.get("lr_ratio", 1.0)
