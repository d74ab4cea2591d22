"""Warnings about a configuration on this machine, for `doctor` and the start of a run."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from llm_pretrain.checkpoints.folders import committed_folders
from llm_pretrain.config.loading import multiplies_in_bf16
from llm_pretrain.config.tree import Config
from llm_pretrain.data.loader import most_workers, shared_memory_problem
from llm_pretrain.hardware import unused_gpu
from llm_pretrain.model.sizes import count_parameters
from llm_pretrain.text import size_text

_BYTES_PER_PARAMETER = 12 + 2
"""A checkpoint has fp32 weights and two AdamW moments; the exported weights have half precision."""


def machine_warnings(config: Config, gpus: int, ranks: int) -> Iterator[str]:
    """One line for each setting that works with `ranks` processes here, but not as one would expect."""
    precision, workers = config.training.precision, config.data.num_workers or 0
    if problem := unused_gpu():
        yield problem
    if precision == "bf16" and not multiplies_in_bf16():
        times = (
            "" if gpus else f" {_product_seconds(torch.bfloat16) / _product_seconds(torch.float32):.0f} times"
        )
        yield (
            f"training.precision: bf16 is emulated here, where a matrix product takes{times} longer than in "
            "fp32; do set fp32 or auto"
        )
    if precision == "fp16" and not gpus:
        yield (
            "training.precision: fp16 needs a GPU through Accelerate, which stops (torchrun's path emulates "
            "it); do set bf16 or fp32"
        )
    if workers > (most := most_workers(ranks)):
        yield f"data.num_workers: {workers} are more than a process's share of the cores; it starts {most}"
    if (gpus or workers) and (problem := shared_memory_problem(config, ranks)):
        yield problem
    if config.model.vocab_size is None:
        return
    written = len(committed_folders(config.run.folder / "checkpoints"))
    copies = config.checkpoint.keep_last + 1 - written  # a new one is whole before the oldest is deleted
    needed = copies * _BYTES_PER_PARAMETER * count_parameters(config.model).total
    if (free := free_bytes(config.run.folder)) < needed:
        yield (
            f"{config.run.folder}: {copies} more checkpoints and weights take {size_text(needed)}, "
            f"{size_text(free)} are free; do lower checkpoint.keep_last or set run.output_dir"
        )


def _product_seconds(dtype: torch.dtype) -> float:
    factors = torch.ones(64, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        torch.mm(*factors)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def free_bytes(folder: Path) -> int:
    """Free bytes on the disk of `folder`; the folder need not exist."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
