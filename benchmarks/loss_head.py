"""The loss head in chunks against whole logits: processor time and peak memory, on one CPU thread.

Projection, cross-entropy, z-loss and their gradients for T = 2048 tokens of width 512. Time in interleaved
rounds by CPU time of this process, with the allocator set as a training process sets it. Memory in a process
of its own per side: the most that was resident, less what was resident before the pass, with labels, weight
and states in place. Three sides: `fused`, `full` (our own code for whole logits), and `torch` (`linear`,
`cross_entropy`, and `logsumexp` for the z-loss), as a plain training loop has it. Goals are judged against
`full`, the harder one in memory and time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.measuring import ROOT, goal, interleaved, ratio
from llm_pretrain.launch.process import keep_freed_memory
from llm_pretrain.model.decoder import OutputHead
from llm_pretrain.model.kernels.choice import Kernels
from llm_pretrain.model.kernels.layers import at_least_fp32

GOAL_TIME, GOAL_MEMORY = 1.05, 0.45
TOKENS, HIDDEN, COEFFICIENT = 2048, 512, 1e-4
VOCABULARIES = (6400, 32000)
SIDES = ("fused", "full", "torch")
DTYPES = {"fp32": None, "bf16": torch.bfloat16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmark's options."""
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--memory_of", nargs=3, metavar=("SIDE", "V", "PRECISION"), help=argparse.SUPPRESS)


def build(side: str, vocab_size: int, precision: str) -> Callable[[], None]:
    """One forward and backward pass of a side."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, TOKENS // 4, HIDDEN, generator=generator).requires_grad_()
    labels = torch.randint(0, vocab_size, (4, TOKENS // 4), generator=generator)
    mask = torch.ones(labels.shape, dtype=torch.bool)
    kernels = Kernels(loss="full" if side == "torch" else side, z_loss_coef=COEFFICIENT)  # pyright: ignore[reportArgumentType] (a side's name is a kernel's)
    head = OutputHead(HIDDEN, vocab_size, kernels)
    torch.nn.init.normal_(head.weight, std=0.02, generator=generator)
    dtype = DTYPES[precision]

    def objective() -> Tensor:
        if side != "torch":
            sums = head(hidden, labels, mask)
            return sums.loss + COEFFICIENT * sums.z_loss
        logits = at_least_fp32(F.linear(hidden, head.weight)).flatten(0, 1)
        loss = F.cross_entropy(logits, labels.flatten(), reduction="sum")
        return loss + COEFFICIENT * logits.logsumexp(-1).square().sum()

    def step() -> None:
        hidden.grad = head.weight.grad = None
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            total = objective()
        (total / TOKENS).backward()

    return step


def resident_bytes(name: str) -> int:
    """`VmRSS` or `VmHWM` of this process."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(name))
    return int(line.split()[1]) * 1024


def print_memory(side: str, vocab_size: str, precision: str) -> None:
    """In a process of its own: bytes that one pass adds at its peak."""
    warm = build(side, 64, precision)  # what the first products and passes load stays out of the figure
    warm()
    step = build(side, int(vocab_size), precision)
    before = resident_bytes("VmRSS")
    step()
    print(f"added {resident_bytes('VmHWM') - before} bytes")


def memory(side: str, vocab_size: int, precision: str) -> float:
    """MiB that a pass takes at its peak, by a process of its own."""
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "loss_head",
        "--memory_of",
        side,
        str(vocab_size),
        precision,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    output = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout
    return int(output.partition("added ")[2].split()[0]) / 2**20


def run(arguments: argparse.Namespace) -> None:
    """Prints a row per vocabulary and precision, and the goals at 32,000 in fp32."""
    torch.set_num_threads(1)
    if arguments.memory_of:
        print_memory(*arguments.memory_of)
        return
    keep_freed_memory()
    for precision in DTYPES:
        for vocab_size in VOCABULARIES:
            times = interleaved({side: build(side, vocab_size, precision) for side in SIDES}, arguments.pairs)
            found = {side: ratio(times["fused"], times[side]) for side in SIDES[1:]}
            peak = {side: memory(side, vocab_size, precision) for side in SIDES}
            print(
                f"V = {vocab_size:6d}, {precision}  time of fused / full {found['full'].text()}, "
                f"/ torch {found['torch'].text()}; peak MiB "
                + ", ".join(f"{side} {peak[side]:.0f}" for side in SIDES)
                + f" ({peak['fused'] / peak['full']:.2f} of full)",
                flush=True,
            )
            if vocab_size == VOCABULARIES[-1] and precision == "fp32":
                print(goal("time over whole logits', V = 32000, fp32,", found["full"], at_most=GOAL_TIME))
                share = peak["fused"] / peak["full"]
                print(goal(f"peak memory at most {GOAL_MEMORY} of whole logits'", share <= GOAL_MEMORY))
