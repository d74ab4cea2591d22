"""`llm-pretrain doctor`: what is on this machine, and what in its settings would surprise a run.

It looks and says; it changes nothing, starts no process and trains nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from llm_pretrain.config import multiplies_in_bf16

if TYPE_CHECKING:
    from llm_pretrain.config import Config

HELP = "look for what on this machine would surprise a run"

EXAMPLES = """\
exit code: 0 where nothing would surprise, 1 with warnings, 2 where a file cannot be read

examples:
  llm-pretrain doctor
  llm-pretrain doctor --accelerate_config configs/accelerate/cpu2.yaml
  llm-pretrain doctor --config configs/quickstart.yaml --accelerate_config my_cluster.yaml
"""

_PACKAGES = ("torch", "accelerate", "transformers", "tokenizers", "datasets", "safetensors", "numpy")
_OPTIONAL = ("sentencepiece", "wandb", "tensorboard", "gguf", "lm-eval", "deepspeed")
_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
_BYTES_PER_PARAMETER = 12 + 2
"""A checkpoint: fp32 weights and two moments. Beside it the weights in half precision."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument(
        "--config", action="append", metavar="FILE", help="the run's configuration, to be compared with"
    )
    parser.add_argument(
        "--accelerate_config", metavar="FILE",
        help="Accelerate's file (default: the one that `accelerate launch` would find)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Print facts, then warnings; 0 where there are none, else 1."""
    from llm_pretrain.commands._accelerate_file import Machine, read_file, surprises
    from llm_pretrain.config import load_config
    from llm_pretrain.training import default_accelerate_file

    config = None
    if arguments.config:
        files = [word for file in arguments.config for word in ("--config", file)]
        config = load_config(files, needs_data=False)
    named = arguments.accelerate_config
    path = Path(named) if named else default_accelerate_file()
    settings, text = read_file(path) if named or path.exists() else ({}, "")
    gpus, cores = _gpus(), _cores()
    for name, value in _facts(gpus, cores):
        print(f"{name:<14}{value}")
    shown = (
        f"{path}: {settings.get('distributed_type', 'NO')}, {settings.get('num_processes', '?')} processes"
    )
    print(f"{'accelerate':<14}{shown if settings else f'no file at {path}: its defaults count'}")
    warnings = [*_machine_surprises(gpus, config)]
    if settings:
        warnings += surprises(settings, text, Machine(gpus, cores), config)
    for warning in warnings:
        print(f"warning: {warning}")
    if not warnings:
        print("nothing here would surprise a run")
    return 1 if warnings else 0


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _facts(gpus: int, cores: int) -> Iterator[tuple[str, str]]:
    """What is here, by name."""
    import torch

    yield "llm_pretrain", _version("llm_pretrain") or "not installed, run from its folder"
    yield "python", f"{sys.version.split()[0]} ({sys.executable})"
    for package in _PACKAGES:
        yield package, _version(package) or "not installed"
    extras = [f"{package} {_version(package)}" for package in _OPTIONAL if _version(package)]
    yield "extras", ", ".join(extras) or "none"
    names = [torch.cuda.get_device_name(i) for i in range(gpus)]
    yield "devices", f"{gpus} x {names[0]}" if gpus else "CPU only"
    yield "bf16", "yes" if multiplies_in_bf16() else "no: emulated, and slower than fp32"
    yield "back-ends", ", ".join(_backends()) or "none: one process only"
    threads = os.environ.get("OMP_NUM_THREADS")
    yield (
        "threads",
        f"{cores} cores, OMP_NUM_THREADS {threads or 'not set'} (distributed.cpu_threads decides)",
    )
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
    """Free bytes where `folder` is or would be made."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _machine_surprises(gpus: int, config: Config | None) -> Iterator[str]:
    """Surprises that no file is to blame for."""
    for package in _PACKAGES:
        if _version(package) is None:
            yield f"{package} is not installed; do pip install it, as `make setup` does"
    version = tuple(
        int(part) for part in (_version("torch") or "0").split("+")[0].split(".")[:2] if part.isdigit()
    )
    if version < (2, 10):
        yield "torch is older than 2.10, which opens weights unsafely (GHSA-63cw-57p8-fm3p); do upgrade it"
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
    if config is not None:
        yield from _config_surprises(gpus, config)


def _config_surprises(gpus: int, config: Config) -> Iterator[str]:
    """What the run asks for and the machine has not."""
    from llm_pretrain.model import count_parameters

    precision = config.training.precision
    if precision == "bf16" and not multiplies_in_bf16():
        yield "training.precision: bf16 is emulated here and slower than fp32; do set fp32"
    if precision == "fp16" and not gpus:
        yield (
            "training.precision: fp16 needs a GPU through Accelerate, which stops (torchrun's path emulates "
            "it); do set bf16 or fp32"
        )
    if config.model.vocab_size is None:
        return
    copies = config.checkpoint.keep_last + 1  # the next one is whole before the oldest goes
    needed = copies * _BYTES_PER_PARAMETER * count_parameters(config.model).total
    if (free := _free(config.run.folder)) < needed:
        yield (
            f"{config.run.folder}: {copies} checkpoints and weights take {needed / 1e9:.1f} GB, "
            f"{free / 1e9:.1f} GB are free; do lower checkpoint.keep_last or set run.output_dir"
        )
