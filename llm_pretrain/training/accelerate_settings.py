"""What `accelerate launch` or its YAML asks for, held against the configuration, which decides.

Reads the environment in which Accelerate hands its settings over; imports no accelerate, changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from llm_pretrain.config import Config
from llm_pretrain.errors import ConfigError

_NOT_OURS = ("offload_optimizer_device", "offload_param_device", "deepspeed_config_file")
"""Settings of Accelerate's for DeepSpeed that no field of the configuration stands for."""


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
    if launched not in ("1", "auto", str(accumulation_steps)):
        problems.append(
            f"training.global_batch_size: makes {accumulation_steps} accumulation steps, but accelerate's "
            f"gradient_accumulation_steps is {launched}"
        )
    strategy = config.distributed.strategy
    for launched, variable in (("fsdp", "ACCELERATE_USE_FSDP"), ("deepspeed", "ACCELERATE_USE_DEEPSPEED")):
        if _is_on(variable) and launched != strategy:
            problems.append(f"distributed.strategy: {strategy}, but accelerate runs {launched}")
    if strategy == "deepspeed":
        problems += _zero_problems(config)
    if problems:
        raise ConfigError(*(f"{problem}; make them agree" for problem in problems))


def _zero_problems(config: Config) -> Iterator[str]:
    """Where what was launched is not the ZeRO that the configuration describes.

    What is not of this project (offloading, a configuration file of DeepSpeed's own) would be taken over or
    dropped without a word.
    """
    environment, zero_stage = os.environ.get, config.distributed.zero_stage
    if _is_on("ACCELERATE_USE_CPU"):  # as cpu2.yaml says
        yield (
            "distributed.strategy: deepspeed, but accelerate was told use_cpu, which makes it ddp "
            "(configs/accelerate/zero2.yaml runs on a CPU too)"
        )
    launched = environment("ACCELERATE_DEEPSPEED_ZERO_STAGE")
    if launched is not None and launched != str(zero_stage or launched):
        yield f"distributed.zero_stage: {zero_stage}, but accelerate's zero_stage is {launched}"
    if launched not in (None, "1", "2", "3"):
        yield f"distributed.zero_stage: 1, 2 or 3, but accelerate's zero_stage is {launched}"
    launched, max_norm = environment("ACCELERATE_GRADIENT_CLIPPING", "auto"), config.training.max_grad_norm
    if launched != "auto" and _number(launched) != max_norm:
        yield f"training.max_grad_norm: {max_norm}, but accelerate's gradient_clipping is {launched}"
    for name in _NOT_OURS:
        launched = environment(f"ACCELERATE_DEEPSPEED_{name.removeprefix('deepspeed_').upper()}", "none")
        if launched != "none":
            yield f"distributed.strategy: deepspeed knows no {name}, but accelerate's is {launched}"


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() in ("1", "true", "yes")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
