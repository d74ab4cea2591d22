"""What `accelerate launch` or its YAML asks for, held against the configuration, which decides.

Reads the environment in which Accelerate hands its settings over, and leaves it as it was found; what is
done with the settings is the script's business.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from llm_pretrain.config import Config
from llm_pretrain.errors import ConfigError

_NOT_OURS = ("offload_optimizer_device", "offload_param_device", "deepspeed_config_file")
"""Settings of Accelerate's for DeepSpeed that no field of the configuration stands for."""
_WRITTEN_BY_ACCELERATE = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "FSDP_CPU_RAM_EFFICIENT_LOADING")


def launch_settings() -> dict[str, str | None]:
    """What the launcher left where Accelerate will write, for `restore_launch_settings`."""
    return {name: os.environ.get(name) for name in _WRITTEN_BY_ACCELERATE}


def restore_launch_settings(settings: dict[str, str | None]) -> None:
    """Take back what Accelerate notes in the environment: which plugin it was given.

    The next training of the same process, a notebook's, would take it for what a launcher asked for.
    """
    for name, value in settings.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


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
    if (before := _strategy_before()) and "deepspeed" in (strategy, before):
        raise ConfigError(
            f"distributed.strategy: {strategy}, but Accelerate has set up {before} in this process "
            "before, and keeps to it; restart the notebook's kernel"
        )
    problems += _foreign_problems(config)
    if strategy == "deepspeed":
        problems += _zero_problems(config)
    if problems:
        raise ConfigError(*(f"{problem}; make them agree" for problem in problems))


def _strategy_before() -> str | None:
    """Whether an earlier training of this process ran DeepSpeed; None where there was none."""
    state = sys.modules.get("accelerate.state")
    if state is None or not state.is_initialized():
        return None
    # its constructor would read the environment again, which may be what is refused here
    kind = state.AcceleratorState._shared_state["distributed_type"]
    return "deepspeed" if kind.value == "DEEPSPEED" else "ddp or fsdp"


def _foreign_problems(config: Config) -> Iterator[str]:
    """What accelerate would do to the model, or leave undone, for which the configuration has no word.

    A compiled model sums in another order than the other script's, and one that does not fit without
    offloading would run out of memory instead of saying why.
    """
    environment = os.environ.get
    if (backend := environment("ACCELERATE_DYNAMO_BACKEND", "no").lower()) != "no":
        yield f"launch: nothing is compiled here, but accelerate's dynamo_backend is {backend}"
    for name in ("parallelism_config", "megatron_lm"):
        if _is_on(f"ACCELERATE_USE_{name.upper()}"):
            yield f"distributed.strategy: {config.distributed.strategy}, but accelerate was told use_{name}"
    if not _is_on("ACCELERATE_USE_FSDP"):
        return
    if _is_on("FSDP_OFFLOAD_PARAMS"):
        yield "distributed.strategy: fsdp knows no offloading, but accelerate's fsdp_offload_params is true"
    if _is_on("FSDP_ACTIVATION_CHECKPOINTING") and not config.training.activation_checkpointing:
        yield (
            "training.activation_checkpointing: false, but accelerate's fsdp_activation_checkpointing is true"
        )


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
