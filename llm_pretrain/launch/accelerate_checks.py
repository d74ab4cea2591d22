"""Warnings about an Accelerate configuration file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llm_pretrain.config.distributed_config import DistributedConfig
from llm_pretrain.config.loading import validate
from llm_pretrain.config.tree import Config, TrainingConfig
from llm_pretrain.errors import ConfigError
from llm_pretrain.launch.checks import accelerate_problems, unsupported_settings
from llm_pretrain.launch.jobs import Machine
from llm_pretrain.text import reason_of


def read_accelerate_file(path: Path) -> tuple[dict[str, Any], str]:
    """Settings and text of Accelerate's file; ConfigError if it cannot be read or is no YAML mapping."""
    from llm_pretrain.config.yaml_text import YamlError, read_settings_text, read_yaml

    try:
        text = read_settings_text(path)
        settings = read_yaml(text)
    except YamlError as error:
        place = f"{path}:{error.line}" if error.line else path
        raise ConfigError(f"{place}: not a valid YAML file: {error.text}") from error
    except (OSError, ValueError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"--accelerate_config {path}: expected a text file, found: {reason}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: expected Accelerate's settings, found {settings!r:.60}")
    return settings, text


_KEYS = {
    *("compute_environment", "distributed_type", "mixed_precision", "use_cpu", "debug", "num_processes"),
    *("machine_rank", "num_machines", "gpu_ids", "main_process_ip", "main_process_port", "rdzv_backend"),
    *("same_network", "main_training_function", "enable_cpu_affinity", "fp8_config", "deepspeed_config"),
    *("fsdp_config", "parallelism_config", "megatron_lm_config", "ipex_config", "mpirun_config"),
    *("downcast_bf16", "tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "command_file"),
    *("commands", "tpu_vm", "tpu_env", "dynamo_config", "dynamo_backend", "fp16"),
}
"""Keys that Accelerate accepts, older names included."""
_LOADER_KEYS = {
    "even_batches",
    "dispatch_batches",
    "split_batches",
    "use_seedable_sampler",
    "dataloader_config",
}
_ACCUMULATION_KEYS = {"gradient_accumulation_steps", "gradient_accumulation_plugin", "sync_with_dataloader"}


def accelerate_surprises(
    settings: Mapping[str, Any], text: str, machine: Machine, config: Config | None
) -> Iterator[str]:
    """Warnings about a file, one line each, in the form `what would happen; do how to fix it`.

    Args:
        settings: Content of the file.
        text: Text of the file; some mistakes show only in the spelling.
        machine: Machine of the launch.
        config: Configuration of the run; None if it is not known.
    """
    yield from _spelling(settings, text)
    yield from _processes(settings, machine)
    launched, count = _variables(settings), _count(settings) or 1
    if config is None:
        strategy = "fsdp" if _kind(settings) == "FSDP" else "ddp"
        config = Config(
            training=TrainingConfig(activation_checkpointing=True),
            distributed=DistributedConfig(strategy=strategy),
        )
        problems = unsupported_settings(config, launched)
    else:
        if wrong := validate(config, count, needs_data=False):
            yield from (f"with num_processes: {count}, {problem}; do change one of them" for problem in wrong)
            return
        problems = accelerate_problems(config, config.gradient_accumulation_steps(count), launched)
    yield from (f"{problem}, and the run stops; do make them agree" for problem in problems)


def _variables(settings: Mapping[str, Any]) -> dict[str, str]:
    """The environment variables that `accelerate launch` derives from the file and sets for the script."""
    kind, count = _kind(settings), _count(settings) or 1
    backend = _section(settings, "dynamo_config").get("dynamo_backend") or settings.get("dynamo_backend")
    found = {
        "WORLD_SIZE": count,
        "ACCELERATE_MIXED_PRECISION": settings.get("mixed_precision") or "no",
        "ACCELERATE_DYNAMO_BACKEND": backend or "no",
        "ACCELERATE_USE_CPU": settings.get("use_cpu"),
        "ACCELERATE_USE_FSDP": kind == "FSDP",
        "ACCELERATE_USE_DEEPSPEED": kind == "DEEPSPEED",
        "ACCELERATE_USE_MEGATRON_LM": kind == "MEGATRON_LM",
        "ACCELERATE_USE_PARALLELISM_CONFIG": bool(settings.get("parallelism_config")),
    }
    both = _section(settings, "fsdp_config") | _section(settings, "parallelism_config")
    found |= {key.upper(): value for key, value in both.items()}
    for key, value in _section(settings, "deepspeed_config").items():
        name = key if key.startswith(("gradient_", "deepspeed_")) else f"deepspeed_{key}"
        found[f"ACCELERATE_{name.upper()}"] = value
    return {name: str(value).lower() for name, value in found.items()}


def _section(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A section of a file; empty if the section is missing or no mapping."""
    found = settings.get(name)
    return {str(key): value for key, value in found.items()} if isinstance(found, Mapping) else {}


def _spelling(settings: Mapping[str, Any], text: str) -> Iterator[str]:
    if re.search(r"^mixed_precision:\s*(no|off|false)\s*(#.*)?$", text, re.MULTILINE | re.IGNORECASE):
        yield 'mixed_precision: no without quotes is false to Accelerate, which stops; do write "no"'
    for key in sorted(set(map(str, settings)) - _KEYS):
        if key in _LOADER_KEYS:
            advice = "leave it out: the script sets even_batches false and feeds every rank by itself"
        elif key in _ACCUMULATION_KEYS:
            advice = "leave it out: accumulation follows from training.global_batch_size, in whole windows"
        else:
            advice = "leave it out"
        yield f"{key} is no setting of Accelerate's files, and `accelerate launch` stops at it; do {advice}"
    if settings.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        found = settings["compute_environment"]
        yield f"compute_environment: {found} is launched elsewhere than here; do set LOCAL_MACHINE"


def _kind(settings: Mapping[str, Any]) -> str:
    return str(settings.get("distributed_type", "NO")).upper()


def _count(settings: Mapping[str, Any]) -> int | None:
    value = settings.get("num_processes")
    return value if type(value) is int else None


def _processes(settings: Mapping[str, Any], machine: Machine) -> Iterator[str]:
    """Warnings about the number of processes that the file really starts (accelerate#2741)."""
    kind, count = _kind(settings), _count(settings)
    on_cpu = machine.gpus == 0
    works = "distributed_type: MULTI_GPU with use_cpu: true, as configs/accelerate/cpu2.yaml does"
    if kind == "MULTI_CPU":
        yield f"distributed_type: MULTI_CPU starts one process whatever num_processes says; do set {works}"
    elif kind == "NO" and (count or 1) > 1:
        mend = works if on_cpu else "distributed_type: MULTI_GPU"
        yield f"distributed_type: NO starts one process whatever num_processes says; do set {mend}"
    elif kind != "NO" and count is None:
        yield f"num_processes is not set, and `accelerate launch` stops without it for {kind}; do set it"
    if settings.get("use_cpu") is True and not on_cpu:
        yield f"use_cpu: true leaves {machine.gpus} GPUs here unused; do set use_cpu: false"
    on_gpus = not on_cpu and not settings.get("use_cpu") and _machines(settings) == 1
    if on_gpus and (count or 1) > machine.gpus:
        yield f"num_processes: {count} on {machine.gpus} GPUs; do set at most {machine.gpus}"
    if on_cpu and kind == "MULTI_GPU" and count and count > machine.cores:
        yield f"num_processes: {count} on {machine.cores} cores wait for one another; do set fewer"
    if _machines(settings) > 1 and not settings.get("main_process_ip"):
        yield f"num_machines: {_machines(settings)} without main_process_ip; do name the first one's address"


def _machines(settings: Mapping[str, Any]) -> int:
    value = settings.get("num_machines", 1)
    return value if type(value) is int else 1
