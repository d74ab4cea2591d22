"""Facts about this machine, and warnings about problems that a run would meet."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from llm_pretrain.config.loading import multiplies_in_bf16
from llm_pretrain.hardware import package_version
from llm_pretrain.launch.jobs import Machine
from llm_pretrain.text import size_text

if TYPE_CHECKING:
    from llm_pretrain.config.tree import Config

_PACKAGES = ("torch", "accelerate", "transformers", "tokenizers", "datasets", "safetensors", "numpy")
_OPTIONAL = ("sentencepiece", "wandb", "tensorboard", "gguf", "deepspeed")
_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")


def _requirements() -> list[str]:
    """The requirements in pyproject.toml; empty if the package is not installed."""
    try:
        return metadata.requires("llm_pretrain") or []
    except metadata.PackageNotFoundError:
        return []


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version.partition("+")[0])]


def machine_facts(machine: Machine) -> Iterator[tuple[str, str]]:
    """Name and text of each fact about this machine."""
    import torch

    from llm_pretrain.launch.process import default_threads, exported_threads

    yield "llm_pretrain", package_version("llm_pretrain") or "not installed, run from its folder"
    yield "python", f"{sys.version.split()[0]} ({sys.executable})"
    for package in _PACKAGES:
        yield package, package_version(package) or "not installed"
    extras = [f"{package} {package_version(package)}" for package in _OPTIONAL if package_version(package)]
    yield "extras", ", ".join(extras) or "none"
    names = [torch.cuda.get_device_name(i) for i in range(machine.gpus)]
    yield "devices", f"{machine.gpus} x {names[0]}" if names else "CPU only"
    yield "bf16", "yes" if multiplies_in_bf16() else "no: emulated, and slower than fp32"
    yield "back-ends", ", ".join(_backends()) or "none: one process only"
    own = exported_threads()
    by = "OMP_NUM_THREADS" if own else "cores / processes"
    yield "threads", f"{default_threads(1)} for one process of a run, by {by}; {machine.cores} cores"
    yield "disk", f"{size_text(free_bytes(Path('runs')))} free for {Path('runs').resolve()}"


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


def free_bytes(folder: Path) -> int:
    """Free bytes on the disk of `folder`; the folder need not exist."""
    return shutil.disk_usage(_existing(folder)).free


def _existing(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def machine_surprises(gpus: int, config: Config | None) -> Iterator[str]:
    """Warnings about packages, back-ends, environment variables and the output folder."""
    from llm_pretrain.launch.process import exported_setting, exported_threads

    lowest = dict(each.split(">=") for each in _requirements() if ";" not in each)  # ";" marks an extra
    for package in _PACKAGES:
        if (version := package_version(package)) is None:
            yield f"{package} is not installed; do pip install it, as `make setup` does"
        elif _numbers(version) < _numbers(lowest.get(package, "0")):
            yield f"{package} {version} is older than {lowest[package]}, the lowest tested; do upgrade it"
    if xla := package_version("torch_xla"):
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
