"""`llm-pretrain doctor`: facts about this machine, and warnings about it and about a file of Accelerate."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_pretrain.commands._launching import Machine, this_machine
from llm_pretrain.config import multiplies_in_bf16, validate
from llm_pretrain.errors import ConfigError, printable

if TYPE_CHECKING:
    from llm_pretrain.config import Config

EXAMPLES = """\
exit code: 0 where nothing would surprise, 1 with warnings, 2 where a file cannot be read

examples:
  llm-pretrain doctor
  llm-pretrain doctor --accelerate_config configs/accelerate/cpu2.yaml
  llm-pretrain doctor --config configs/quickstart.yaml --accelerate_config my_cluster.yaml
"""

_PACKAGES = ("torch", "accelerate", "transformers", "tokenizers", "datasets", "safetensors", "numpy")
_OPTIONAL = ("sentencepiece", "wandb", "tensorboard", "gguf", "deepspeed")
_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
_BYTES_PER_PARAMETER = 12 + 2
"""A checkpoint has fp32 weights and two AdamW moments; the exported weights have half precision."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--config", action="append", metavar="FILE", help="the run's configuration, to be compared with"
    )
    parser.add_argument(
        "--accelerate_config", metavar="FILE",
        help="Accelerate's file (default: the one that `accelerate launch` would find)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Print facts, then warnings; returns 1 if there are warnings, else 0."""
    from llm_pretrain.config import load_config
    from llm_pretrain.distributed.launch_checks import default_accelerate_file

    config = None
    if arguments.config:
        files = [word for file in arguments.config for word in ("--config", file)]
        config = load_config(files, needs_data=False)
    named = arguments.accelerate_config
    path = Path(named) if named else default_accelerate_file()
    settings, text = {}, ""
    if named or path.exists():
        settings, text = _read_accelerate(path)
    machine = this_machine()
    for name, value in machine_facts(machine):
        print(f"{name:<14}{printable(value)}")
    shown = (
        f"{path}: {settings.get('distributed_type', 'NO')}, {settings.get('num_processes', '?')} processes"
    )
    print(f"{'accelerate':<14}{printable(shown if settings else f'no file at {path}: its defaults count')}")
    warnings = [*_machine_surprises(machine.gpus, config)]
    if settings:
        warnings += surprises(settings, text, machine, config)
    for warning in warnings:
        print(printable(f"warning: {warning}"))
    if not warnings:
        print("nothing here would surprise a run")
    return 1 if warnings else 0


def _read_accelerate(path: Path) -> tuple[dict[str, Any], str]:
    """Settings and text of Accelerate's file; ConfigError in one line if it is no YAML or no mapping."""
    from llm_pretrain.config import YamlError, read_settings_text, read_yaml

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


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _requirements() -> list[str]:
    """What pyproject.toml asks for; nothing where the package runs from its folder."""
    try:
        return metadata.requires("llm_pretrain") or []
    except metadata.PackageNotFoundError:
        return []


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version.partition("+")[0])]


def machine_facts(machine: Machine) -> Iterator[tuple[str, str]]:
    """Facts about this machine by name."""
    import torch

    from llm_pretrain.distributed.process import default_threads, exported_threads

    yield "llm_pretrain", _version("llm_pretrain") or "not installed, run from its folder"
    yield "python", f"{sys.version.split()[0]} ({sys.executable})"
    for package in _PACKAGES:
        yield package, _version(package) or "not installed"
    extras = [f"{package} {_version(package)}" for package in _OPTIONAL if _version(package)]
    yield "extras", ", ".join(extras) or "none"
    names = [torch.cuda.get_device_name(i) for i in range(machine.gpus)]
    yield "devices", f"{machine.gpus} x {names[0]}" if names else "CPU only"
    yield "bf16", "yes" if multiplies_in_bf16() else "no: emulated, and slower than fp32"
    yield "back-ends", ", ".join(_backends()) or "none: one process only"
    own = exported_threads()
    by = "OMP_NUM_THREADS" if own else "cores / processes"
    yield "threads", f"{default_threads(1)} for one process of a run, by {by}; {machine.cores} cores"
    yield "disk", f"{_free(Path('runs')) / 1e9:.1f} GB free for {Path('runs').resolve()}"


def _backends() -> list[str]:
    import torch

    if not torch.distributed.is_available():
        return []
    found = {
        "gloo": torch.distributed.is_gloo_available(),
        "nccl": torch.distributed.is_nccl_available(),
        "mpi": torch.distributed.is_mpi_available(),
    }
    return [name for name, available in found.items() if available]


def _free(folder: Path) -> int:
    """Free bytes on the disk of `folder`, which need not exist."""
    return shutil.disk_usage(_existing(folder)).free


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _machine_surprises(gpus: int, config: Config | None) -> Iterator[str]:
    """Warnings about packages, back-ends, environment variables and the output folder."""
    from llm_pretrain.distributed.process import exported_setting, exported_threads

    lowest = dict(each.split(">=") for each in _requirements() if ";" not in each)  # none of an extra
    for package in _PACKAGES:
        if (version := _version(package)) is None:
            yield f"{package} is not installed; do pip install it, as `make setup` does"
        elif _numbers(version) < _numbers(lowest.get(package, "0")):
            yield f"{package} {version} is older than {lowest[package]}, the lowest tested; do upgrade it"
    if xla := _version("torch_xla"):
        yield (
            f"torch_xla {xla} is installed, but TPUs are untested here and both scripts would train on the "
            "CPU; do train on CUDA GPUs or expect the CPU"
        )
    if gpus and "nccl" not in _backends():
        yield "GPUs without the nccl back-end; do install torch's CUDA build"
    if left := [name for name in _LAUNCHED if name in os.environ]:
        yield (
            f"{', '.join(left)} in the environment make any script believe a launcher started it; do unset "
            f"{' '.join(left)}"
        )
    if set_ := sorted(name for name in os.environ if name.startswith("ACCELERATE_")):
        yield f"{', '.join(set_)} in the environment outrank Accelerate's file; do unset {' '.join(set_)}"
    if (given := exported_setting()) and exported_threads() is None:
        yield f"OMP_NUM_THREADS {given!r:.40} is no number of threads, and runs ignore it; do unset it"
    folder = config.run.folder if config else Path("runs")
    if not os.access(_existing(folder), os.W_OK):
        yield f"{folder}: no run can write there; do set run.output_dir"
    if config is not None:
        yield from _config_surprises(gpus, config)


def _config_surprises(gpus: int, config: Config) -> Iterator[str]:
    """Warnings about settings that this machine does not support."""
    from llm_pretrain.data import shared_memory_problem
    from llm_pretrain.model import count_parameters

    precision = config.training.precision
    if precision == "bf16" and not multiplies_in_bf16():
        yield "training.precision: bf16 is emulated here and slower than fp32; do set fp32"
    if precision == "fp16" and not gpus:
        yield (
            "training.precision: fp16 needs a GPU through Accelerate, which stops (torchrun's path emulates "
            "it); do set bf16 or fp32"
        )
    if (gpus or config.data.num_workers) and (problem := shared_memory_problem(config, max(gpus, 1))):
        yield problem
    if config.model.vocab_size is None:
        return
    copies = config.checkpoint.keep_last + 1  # the next one is whole before the oldest goes
    needed = copies * _BYTES_PER_PARAMETER * count_parameters(config.model).total
    if (free := _free(config.run.folder)) < needed:
        yield (
            f"{config.run.folder}: {copies} checkpoints and weights take {needed / 1e9:.1f} GB, "
            f"{free / 1e9:.1f} GB are free; do lower checkpoint.keep_last or set run.output_dir"
        )


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


def surprises(
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
