"""Checks that the launcher's environment, or an Accelerate file, agrees with the configuration."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import psutil

from llm_pretrain.config.loading import from_dict, validate
from llm_pretrain.config.tree import Config
from llm_pretrain.config.yaml_text import read_yaml_file
from llm_pretrain.errors import ConfigError
from llm_pretrain.hardware import gpu_count
from llm_pretrain.text import reason_of

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
MASTER_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
_UNSUPPORTED_ZERO = ("offload_optimizer_device", "offload_param_device", "deepspeed_config_file")
"""Accelerate's DeepSpeed settings that correspond to no field of the configuration."""
_OTHER_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
"""Variables in which mpirun and srun write their number of processes."""
_WRITTEN_BY_ACCELERATE = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "FSDP_CPU_RAM_EFFICIENT_LOADING")


def obey_use_cpu() -> None:
    """Hide GPUs from torch where `accelerate launch` was told to use the CPU; before anything asks for them.

    Accelerate itself obeys it in a single process only. Its options that ask for GPUs come before its file.
    """
    settings = _launch_settings()
    if settings.get("use_cpu") is True and not settings["is_parallel"]:
        if Path("/proc/driver/nvidia/gpus").is_dir() and os.environ.get("LOCAL_RANK", "0") == "0":
            print("note: use_cpu of accelerate launch hides this machine's GPUs", file=sys.stderr)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def check_environment() -> None:
    """Stop if only some of a launcher's environment variables are set, by hand or by mpirun, and if processes
    are more than GPUs.

    If some are missing, a process may train without its peers, or wait for them forever. If all are set, but
    by no launcher, they may be left over in a shell: a note says for whom the process waits.

    Raises:
        ConfigError: names the variables that are missing, or both numbers.
    """
    needed = (*RANK_VARIABLES, *MASTER_VARIABLES)
    others = [name for name in _OTHER_SIZES if os.environ.get(name, "1") != "1"]
    given = [name for name in RANK_VARIABLES if os.environ.get(name)] or others
    missing = [name for name in needed if not os.environ.get(name)]
    found = ", ".join(f"{name}={os.environ[name]}" for name in given)
    if given and missing:
        raise ConfigError(
            f"launch: expected {', '.join(needed)} together in the environment, found {found} without "
            f"{', '.join(missing)}; set or unset all of them, or start torchrun"
        )
    is_launched = others or "TORCHELASTIC_RUN_ID" in os.environ or parent_process() is not None
    if given and not is_launched and os.environ["WORLD_SIZE"] != "1":
        advice = f"unset {', '.join(needed)} to train alone"
        print(f"note: by {found}, this process waits for the other ranks; {advice}", file=sys.stderr)
    local = {name: os.environ.get(name) or "0" for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    if not all(text.isdecimal() for text in local.values()):
        raise ConfigError(f"launch: expected numbers of this machine's ranks, found {local}")
    last, processes = map(int, local.values())
    if given and max(last + 1, processes) > (gpus := gpu_count()) > 0:
        error = ConfigError(
            f"launch: expected one process per GPU, so at most {gpus} here, found "
            f"{processes or f'LOCAL_RANK={last}'}; start fewer, show all GPUs to each, or set "
            "CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
        error.shared = last > 0  # ranks of other machines may not have it
        raise error


def check_world_size(world_size: int) -> None:
    """Stop if the size of the process group differs from the launcher's number of processes.

    `accelerate launch --cpu --num_processes 2` silently starts one process. And if each of W torchrun workers
    had a process group of size one, they would train W separate models.

    Raises:
        ConfigError: names both numbers and a command that works.
    """
    launched = _launch_settings().get("num_processes")
    asked = max(int(os.environ.get("WORLD_SIZE") or 1), launched if isinstance(launched, int) else 1)
    if asked != world_size:
        raise ConfigError(
            f"launch: {asked} processes were asked for, {world_size} joined the process group; on CPU use "
            "`accelerate launch --config_file configs/accelerate/cpu2.yaml train_pretrain_accelerate.py ...` "
            "or `torchrun --nproc_per_node N train_pretrain.py ...`"
        )


def accelerate_launch_arguments() -> list[str]:
    """Arguments of the parent process if it is `accelerate launch`, else an empty list."""
    try:
        parent = psutil.Process().parent()
        command = parent.cmdline() if parent else []
    except psutil.Error:  # another user's process
        command = []
    for index, word in enumerate(command):
        if word == "launch" and "accelerate" in " ".join(command[:index]):
            return command[index + 1 :]
        if word.endswith(("accelerate-launch", "accelerate.commands.launch")):
            return command[index + 1 :]
    return []


def default_accelerate_file() -> Path:
    """The file that `accelerate launch` reads by default, in HF_HOME or the cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    return Path(home).expanduser() / "accelerate" / "default_config.yaml"


def _launch_settings() -> dict[str, Any]:
    """`num_processes` and `use_cpu` of the parent `accelerate launch`, by its options or else its file, with
    all else of the file; `is_parallel`: its options ask for GPUs. Empty without such a parent."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--num_processes", "--num-processes", type=int, default=argparse.SUPPRESS)
    parser.add_argument("--cpu", dest="use_cpu", action="store_true", default=argparse.SUPPRESS)
    wishes = ("--multi_gpu", "--multi-gpu", "--use_fsdp", "--use-fsdp", "--use_deepspeed", "--use-deepspeed")
    parser.add_argument(*wishes, dest="is_parallel", action="store_true")
    parser.add_argument("--config_file", "--config-file")
    arguments = accelerate_launch_arguments()
    if not arguments:
        return {}
    script = next((i for i, word in enumerate(arguments) if word.endswith(".py")), len(arguments))
    known = vars(parser.parse_known_args(arguments[:script])[0])
    file, settings = known.pop("config_file"), dict[str, Any]()
    if file is None and "use_cpu" not in known:  # with --cpu, Accelerate reads no file of its own
        file = default_accelerate_file()
    if file and not str(file).startswith("/dev/"):  # an open file of the launcher's is none of this process's
        with suppress(ConfigError):
            settings = read_accelerate_file(Path(file))
    return settings | known


@contextmanager
def preserved_environment() -> Iterator[None]:
    """Restore the environment variables in which `Accelerator` records its plugin.

    Otherwise a later run in the same process (a notebook) reads the variables as a launcher's settings.
    """
    before = {name: os.environ.get(name) for name in _WRITTEN_BY_ACCELERATE}
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def check_accelerate_settings(config: Config, accumulation_steps: int) -> None:
    """Stop if `accelerate launch` or its YAML file contradicts the configuration.

    `accelerate launch` passes its settings in the environment. The values "no" and 1 are not compared, since
    they are also the defaults.

    Raises:
        ConfigError: names every contradiction, with both values.
    """
    if (stages := config.distributed.mesh(int(os.environ.get("WORLD_SIZE") or 1)).pp) > 1:
        raise ConfigError(
            f"distributed.pp_size: expected 1 with accelerate, found {stages}, which train_pretrain.py runs; "
            "start that with torchrun"
        )
    if problems := [*accelerate_problems(config, accumulation_steps, os.environ)]:
        raise ConfigError(*(f"{problem}; make them agree" for problem in problems))


def accelerate_problems(
    config: Config, accumulation_steps: int, launched: Mapping[str, str]
) -> Iterator[str]:
    """Contradictions between the configuration and the variables that `accelerate launch` sets."""
    precision, strategy = config.training.precision, config.distributed.strategy
    given = launched.get("ACCELERATE_MIXED_PRECISION", "no")
    if given not in ("no", precision):
        yield f"training.precision: {precision}, but accelerate's mixed_precision is {given}"
    given = launched.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if given not in ("1", "auto", str(accumulation_steps)):
        yield (
            f"training.global_batch_size: makes {accumulation_steps} accumulation steps, but accelerate's "
            f"gradient_accumulation_steps is {given}"
        )
    for other, variable in (("fsdp", "ACCELERATE_USE_FSDP"), ("deepspeed", "ACCELERATE_USE_DEEPSPEED")):
        if _is_on(launched, variable) and other != strategy:
            yield f"distributed.strategy: {strategy}, but accelerate runs {other}"
    yield from _unsupported_settings(config, launched)
    if strategy == "deepspeed":
        yield from _zero_problems(config, launched)


def _unsupported_settings(config: Config, launched: Mapping[str, str]) -> Iterator[str]:
    """Accelerate settings that affect the model but correspond to no field of the configuration.

    For example, a model that Accelerate compiles sums in another order than the other script's model. And a
    model that fits only with offloading would run out of memory, or offloading would silently apply.
    """
    if (backend := launched.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()) != "no":
        yield f"training.compile: compiles the model, but accelerate's dynamo_backend is {backend}, not no"
    if _is_on(launched, "ACCELERATE_USE_MEGATRON_LM"):
        yield f"distributed.strategy: {config.distributed.strategy}, but accelerate's use_megatron_lm is true"
    if _is_on(launched, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        yield from _mesh_problems(config, launched)
    if config.distributed.strategy == "deepspeed":
        for name in _UNSUPPORTED_ZERO:
            given = launched.get(f"ACCELERATE_DEEPSPEED_{name.removeprefix('deepspeed_').upper()}", "none")
            if given != "none":
                yield f"distributed.strategy: deepspeed does not support {name}, but accelerate's is {given}"
    if not _is_on(launched, "ACCELERATE_USE_FSDP"):
        return
    if config.distributed.strategy == "fsdp" and (version := launched.get("FSDP_VERSION", "1")) != "2":
        yield (
            f"distributed.strategy: fsdp is FSDP version 2, but accelerate runs fsdp_version {version} (set "
            "fsdp_version: 2 under fsdp_config, as configs/accelerate/fsdp2.yaml does)"
        )
    if _is_on(launched, "FSDP_OFFLOAD_PARAMS"):
        yield ("distributed.strategy: fsdp does not offload, but accelerate's fsdp_offload_params is true")
    if _is_on(launched, "FSDP_ACTIVATION_CHECKPOINTING") and not config.training.activation_checkpointing:
        yield (
            "training.activation_checkpointing: false, but accelerate's fsdp_activation_checkpointing is true"
        )


def _mesh_problems(config: Config, launched: Mapping[str, str]) -> Iterator[str]:
    """Differences between the mesh that Accelerate launched and the configured mesh."""
    sizes = config.distributed.mesh(int(launched.get("WORLD_SIZE") or 1))
    if sizes.dp_replicate == 1 or not sizes.is_data_parallel:
        yield (
            f"distributed.dp_replicate_size: {sizes.dp_replicate}, but accelerate has a parallelism_config, "
            "which is for replicas alone (leave it out; distributed.cp_size and the like set a mesh)"
        )
        return
    own = {"dp_replicate_size": sizes.dp_replicate, "dp_shard_size": sizes.dp_shard}
    for name in (*own, "tp_size", "cp_size", "sp_size"):
        given = launched.get(f"PARALLELISM_CONFIG_{name.upper()}", "1")
        if given not in ("1", str(own.get(name, 1))):
            ours = (
                f"distributed.{name}: {own[name]}" if name in own else "distributed: its fields set the mesh"
            )
            yield f"{ours}, but accelerate's parallelism_config_{name} is {given}, not {own.get(name, 1)}"


def _zero_problems(config: Config, launched: Mapping[str, str]) -> Iterator[str]:
    """Differences between the ZeRO settings that Accelerate launched and the configured ones."""
    zero_stage, max_norm = config.distributed.zero_stage, config.training.max_grad_norm
    stages = (str(zero_stage),) if zero_stage else ("1", "2", "3")
    if (given := launched.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", stages[0])) not in stages:
        yield f"distributed.zero_stage: {' or '.join(stages)}, but accelerate's zero_stage is {given}"
    given = launched.get("ACCELERATE_GRADIENT_CLIPPING", "auto")
    if given != "auto" and _number(given) != max_norm:
        yield f"training.max_grad_norm: {max_norm}, but accelerate's gradient_clipping is {given}"


def _is_on(launched: Mapping[str, str], variable: str) -> bool:
    return launched.get(variable, "false").lower() in ("1", "true", "yes")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def check_strategy(config: Config, distributed_type: str, world_size: int) -> None:
    """Stop if Accelerate has set up another strategy than the configured one.

    If Accelerate cannot use an FSDP plugin, for example on a CPU, it silently falls back to DDP, with the
    whole model in every process. In a notebook's kernel it keeps what an earlier training has set up.

    Args:
        config: The configuration.
        distributed_type: The type that Accelerate has set up, from `Accelerator.distributed_type`.
        world_size: Number of processes. With one process FSDP shards nothing, so it may be DDP.

    Raises:
        ConfigError: names both strategies.
    """
    strategy = config.distributed.strategy
    found = {"FSDP": "fsdp", "DEEPSPEED": "deepspeed"}.get(distributed_type, "ddp")
    if found != strategy and (world_size > 1 or "deepspeed" in (found, strategy)):
        raise ConfigError(
            f"distributed.strategy: {strategy}, but Accelerate has set up {found} ({distributed_type}); see "
            "configs/accelerate/ for files that launch each strategy, and restart a notebook's kernel"
        )


def read_accelerate_file(path: Path) -> dict[str, Any]:
    """Settings of Accelerate's file; ConfigError if it cannot be read or is no YAML mapping."""
    try:
        settings = read_yaml_file(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--accelerate_config {path}: expected a YAML file, found: {reason_of(error)}"
        ) from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: expected Accelerate's settings, found {settings!r:.60}")
    return settings


def accelerate_surprises(settings: Mapping[str, Any], config: Config | None) -> Iterator[str]:
    """Warnings about an Accelerate file, one line each, in the form `what would happen; do how to fix it`.

    Args:
        settings: Content of the file.
        config: Configuration of the run, to be compared with; None: only what none supports is told.
    """
    kind, count = _kind(settings), _count(settings)
    if kind == "MULTI_CPU" or (kind == "NO" and count > 1):  # accelerate#2741
        yield (
            f"distributed_type: {kind} starts one process whatever num_processes says; do set MULTI_GPU, "
            "without GPUs with use_cpu: true, as configs/accelerate/cpu2.yaml does"
        )
    launched = _variables(settings)
    if config is None:
        strategy = {"FSDP": "fsdp", "DEEPSPEED": "deepspeed"}.get(kind, "ddp")
        replicas = int(_number(launched.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1")) or 1)
        distributed = {"strategy": strategy, "dp_replicate_size": replicas}
        any_config = from_dict({"distributed": distributed, "training": {"activation_checkpointing": True}})
        problems = [*_unsupported_settings(any_config, launched)]
        if launched["ACCELERATE_MIXED_PRECISION"] == "fp8":
            problems += ["mixed_precision: fp8, but FP8 products come of training.float8"]
    elif wrong := validate(config, count, needs_data=False):
        yield from (f"with num_processes: {count}, {problem}; do change one of them" for problem in wrong)
        return
    else:
        problems = accelerate_problems(config, config.gradient_accumulation_steps(count), launched)
    for problem in problems:
        yield f"{problem}, and the run stops; do make them agree"


def _variables(settings: Mapping[str, Any]) -> dict[str, str]:
    """The environment variables that `accelerate launch` derives from a file and sets for the script."""
    kind = _kind(settings)
    found = {
        "WORLD_SIZE": _count(settings),
        "ACCELERATE_MIXED_PRECISION": settings.get("mixed_precision") or "no",
        "ACCELERATE_DYNAMO_BACKEND": _section(settings, "dynamo_config").get("dynamo_backend") or "no",
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


def _kind(settings: Mapping[str, Any]) -> str:
    return str(settings.get("distributed_type", "NO")).upper()


def _count(settings: Mapping[str, Any]) -> int:
    value = settings.get("num_processes")
    return value if type(value) is int else 1
