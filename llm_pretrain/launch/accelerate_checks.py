"""Warnings about a file of Accelerate's settings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_pretrain.config.loading import validate
from llm_pretrain.errors import ConfigError
from llm_pretrain.launch.jobs import Machine

if TYPE_CHECKING:
    from llm_pretrain.config.tree import Config


def read_accelerate_file(path: Path) -> tuple[dict[str, Any], str]:
    """Settings and text of Accelerate's file; ConfigError in one line if it is no YAML or no mapping."""
    from llm_pretrain.config.yaml_text import YamlError, read_settings_text, read_yaml

    try:
        text = read_settings_text(path)
        settings = read_yaml(text)
    except YamlError as error:
        place = f"{path}:{error.line}" if error.line else path
        raise ConfigError(f"{place}: not a valid YAML file: {error.text}") from error
    except (OSError, ValueError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else "not UTF-8 text"
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
_SHARDED = {"FSDP": "fsdp", "DEEPSPEED": "deepspeed"}
_PRECISIONS = {"no": "fp32"}


def accelerate_surprises(
    settings: Mapping[str, Any], text: str, machine: Machine, config: Config | None
) -> Iterator[str]:
    """Warnings about a file, one line each: `what would happen; do how to fix it`.

    Args:
        settings: Content of the file.
        text: Text of the file; some mistakes show only in its spelling.
        machine: Machine of the launch.
        config: Configuration of the run, where it is known.
    """
    yield from _spelling(settings, text)
    yield from _processes(settings, machine)
    yield from _strategy(settings, config)
    if config is not None:
        yield from _against(settings, config)


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
    backend = _dynamo(settings)
    if backend not in ("NO", ""):
        yield (
            f"dynamo_backend: {backend} compiles the model on this path alone, and its bits are no longer "
            "torchrun's; do set NO"
        )


def _dynamo(settings: Mapping[str, Any]) -> str:
    options = settings.get("dynamo_config")
    value = options.get("dynamo_backend", "NO") if isinstance(options, Mapping) else None
    return str(value if value is not None else settings.get("dynamo_backend") or "NO").upper()


def _count(settings: Mapping[str, Any]) -> int | None:
    value = settings.get("num_processes")
    return value if type(value) is int else None


def _processes(settings: Mapping[str, Any], machine: Machine) -> Iterator[str]:
    """Number of processes that the file really starts (accelerate#2741)."""
    kind, count = str(settings.get("distributed_type", "NO")).upper(), _count(settings)
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


def _strategy(settings: Mapping[str, Any], config: Config | None) -> Iterator[str]:
    """FSDP version 1, which the script rejects; strategies that this project does not have."""
    kind = str(settings.get("distributed_type", "NO")).upper()
    if kind == "FSDP" and str(_fsdp_version(settings)) != "2":
        yield (
            f"fsdp_version: {_fsdp_version(settings)}, Accelerate's default, is not this project's FSDP, "
            "and the run stops; do set fsdp_version: 2 under fsdp_config"
        )
    elif kind == "MEGATRON_LM":
        yield "distributed_type: MEGATRON_LM takes a model of its own; do set MULTI_GPU"
    strategy = config.distributed.strategy if config else None
    if strategy and kind in _SHARDED and _SHARDED[kind] != strategy:
        yield (
            f"distributed_type: {kind} against distributed.strategy: {strategy}, and the run stops; do make "
            "them agree"
        )


def _fsdp_version(settings: Mapping[str, Any]) -> Any:
    options = settings.get("fsdp_config")
    return options.get("fsdp_version", options.get("version", 1)) if isinstance(options, Mapping) else 1


def _against(settings: Mapping[str, Any], config: Config) -> Iterator[str]:
    """Contradictions to the run's configuration, which takes precedence."""
    precision, launched = config.training.precision, str(settings.get("mixed_precision") or "no").lower()
    if launched not in ("no", "false", precision):
        yield (
            f"mixed_precision: {launched} against training.precision: {precision}, and the run stops; do set "
            f"{'no' if precision == 'fp32' else precision}"
        )
    count = _count(settings) or 1
    problems = validate(config, count, needs_data=False)
    for problem in problems:
        yield f"with num_processes: {count}, {problem}; do change one of them"
    options = settings.get("deepspeed_config")
    given = options.get("gradient_accumulation_steps") if isinstance(options, Mapping) else None
    if type(given) is int and not problems:
        derived = config.gradient_accumulation_steps(count)
        if given not in (1, derived):
            yield (
                f"gradient_accumulation_steps: {given} against the {derived} that training.global_batch_size "
                f"{config.training.global_batch_size} makes of {count} processes, and the run stops; do set "
                f"{derived}"
            )
