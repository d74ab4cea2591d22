"""Writes the file with which `accelerate launch` really starts as many processes as it is asked for.

`--cpu --num_processes 2` and `MULTI_CPU` start a single one without a word. Nothing is started here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from llm_pretrain.errors import ConfigError

_COMMON = {
    "compute_environment": "LOCAL_MACHINE",
    "num_machines": 1,
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "no",  # the configuration decides, and the script tells Accelerate
    "rdzv_backend": "static",
    "same_network": True,
}


def settings_for(
    strategy: str, zero_stage: int | None, world_size: int, *, on_gpu: bool, scripts: Path
) -> dict[str, Any]:
    """The settings of a launch file.

    Args:
        strategy, zero_stage: As in the configuration. A sharded strategy takes its settings from the
            project's own file for it, `configs/accelerate/` beside the scripts.
        world_size: Processes.
        on_gpu: Whether there are GPUs to use.
        scripts: Folder with the scripts.

    Raises:
        ConfigError: the strategy's file is missing.
    """
    own: dict[str, Any] = {"num_processes": world_size}
    if strategy == "ddp":
        kind = "MULTI_GPU" if world_size > 1 else "NO"
        return _COMMON | {"distributed_type": kind, "use_cpu": not on_gpu} | own
    if on_gpu:  # without one each file knows best: with `use_cpu: true` DeepSpeed would become DDP
        own["use_cpu"] = False
    name = "fsdp2.yaml" if strategy == "fsdp" else f"zero{zero_stage or 2}.yaml"
    file = scripts / "configs" / "accelerate" / name
    try:
        return dict(yaml.safe_load(file.read_text("utf-8"))) | own
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"distributed.strategy: {strategy} through Accelerate needs the settings in {file}, which "
            f"cannot be read: {error.strerror if isinstance(error, OSError) else 'no YAML mapping'}"
        ) from None


def write_settings(settings: dict[str, Any], file: Path) -> Path:
    """Write a launch file; returns it."""
    file.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    return file
