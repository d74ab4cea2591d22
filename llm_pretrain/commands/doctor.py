"""`llm-pretrain doctor`: facts about this machine, and warnings about settings and an Accelerate file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from llm_pretrain.config.loading import load_config, multiplies_in_bf16
from llm_pretrain.errors import printable
from llm_pretrain.hardware import package_version, unused_gpu
from llm_pretrain.launch.checks import accelerate_surprises, default_accelerate_file, read_accelerate_file
from llm_pretrain.launch.jobs import Machine, this_machine
from llm_pretrain.text import size_text

EXAMPLES = """\
exit code: 0 where nothing would surprise, 1 with warnings, 2 where a file cannot be read

examples:
  llm-pretrain doctor
  llm-pretrain doctor --accelerate_config configs/accelerate/cpu2.yaml
  llm-pretrain doctor --config configs/quickstart.yaml --accelerate_config my_cluster.yaml
"""

_PACKAGES = ("torch", "accelerate", "transformers", "tokenizers", "datasets", "safetensors", "numpy")
_OPTIONAL = ("sentencepiece", "wandb", "tensorboard", "gguf", "deepspeed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", action="append", metavar="FILE", help="the run's configuration, to be compared with"
    )
    parser.add_argument(
        "--accelerate_config", metavar="FILE",
        help="Accelerate's file (default: the one that `accelerate launch` would find)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Print facts, then warnings; returns 1 if there are warnings, else 0."""
    config = None
    if arguments.config:
        files = [word for file in arguments.config for word in ("--config", file)]
        config = load_config(files, needs_data=False)
    named = arguments.accelerate_config
    path = Path(named) if named else default_accelerate_file()
    settings = read_accelerate_file(path) if named or path.exists() else {}
    machine = this_machine()
    for name, value in machine_facts(machine):
        print(f"{name:<14}{printable(value)}")
    shown = (
        f"{path}: {settings.get('distributed_type', 'NO')}, {settings.get('num_processes', '?')} processes"
    )
    print(f"{'accelerate':<14}{printable(shown if settings else f'no file at {path}: its defaults count')}")
    warnings = []
    if config is not None:
        from llm_pretrain.training.machine import machine_warnings

        warnings += machine_warnings(config, machine.gpus, max(machine.gpus, 1))
    elif problem := unused_gpu():
        warnings.append(problem)
    warnings += accelerate_surprises(settings, config) if settings else []
    for warning in warnings:
        print(printable(f"warning: {warning}"))
    if not warnings:
        print("nothing here would surprise a run")
    return 1 if warnings else 0


def machine_facts(machine: Machine) -> Iterator[tuple[str, str]]:
    """Name and text of each fact about this machine."""
    import torch

    from llm_pretrain.launch.process import default_threads, exported_threads
    from llm_pretrain.training.machine import free_bytes

    yield "llm_pretrain", package_version("llm_pretrain") or "not installed, run from its folder"
    yield "python", f"{sys.version.split()[0]} ({sys.executable})"
    for package in _PACKAGES:
        yield package, package_version(package) or "not installed"
    extras = [f"{package} {package_version(package)}" for package in _OPTIONAL if package_version(package)]
    yield "extras", ", ".join(extras) or "none"
    names = [torch.cuda.get_device_name(i) for i in range(machine.gpus)]
    yield "devices", f"{machine.gpus} x {names[0]}" if names else "CPU only"
    yield "bf16", "yes" if multiplies_in_bf16() else "no: emulated, and slower than fp32"
    own = exported_threads()
    by = "OMP_NUM_THREADS" if own else "cores / processes"
    yield "threads", f"{default_threads(1)} for one process of a run, by {by}; {machine.cores} cores"
    yield "disk", f"{size_text(free_bytes(Path('runs')))} free for {Path('runs').resolve()}"
