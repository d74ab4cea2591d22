"""What `accelerate launch` or its YAML asks for, held against the configuration, which decides.

Reads the environment in which Accelerate hands its settings over; imports no accelerate, changes nothing.
"""

from __future__ import annotations

import os

from llm_pretrain.config import Config
from llm_pretrain.errors import ConfigError


def check_accelerate_settings(config: Config, accumulation_steps: int) -> None:
    """Stop when `accelerate launch` or its YAML asks for something other than the configuration.

    Accelerate hands its settings over in the environment, where "no" and 1 are also its defaults; those
    leave the decision to the configuration.

    Raises:
        ConfigError: every disagreement, with both values.
    """
    environment, precision = os.environ.get, config.training.precision
    problems = []
    launched = environment("ACCELERATE_MIXED_PRECISION", "no")
    if launched not in ("no", precision):
        problems.append(f"training.precision: {precision}, but accelerate's mixed_precision is {launched}")
    launched = environment("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if launched not in ("1", str(accumulation_steps)):
        problems.append(
            f"training.global_batch_size: makes {accumulation_steps} accumulation steps, but accelerate's "
            f"gradient_accumulation_steps is {launched}"
        )
    strategies = [
        name
        for name, variable in (("fsdp", "ACCELERATE_USE_FSDP"), ("deepspeed", "ACCELERATE_USE_DEEPSPEED"))
        if environment(variable, "false").lower() in ("1", "true")
    ]
    for launched in strategies:
        if launched != config.distributed.strategy:
            problems.append(
                f"distributed.strategy: {config.distributed.strategy}, but accelerate runs {launched}"
            )
    if problems:
        raise ConfigError(*(f"{problem}; make them agree" for problem in problems))
