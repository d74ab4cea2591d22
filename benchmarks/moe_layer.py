"""Cost of a mixture-of-experts layer relative to a dense SwiGLU of equal FLOPs, on one CPU thread.

Forward and backward of T = 2048 tokens, in interleaved pairs, in processor time of this process; the
figure is the median of the pairs' ratios. The expert layer includes router, balance loss and counts.
Not a benchmark of whole training steps.

    python benchmarks/moe_layer.py [--pairs 15] [--hidden_size 512] [--intermediate_size 1408]

glibc gives large freed blocks back to the system and pays for their pages again at the next step; the
environment MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000 measures without that.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from llm_pretrain.config import ModelConfig
from llm_pretrain.model.decoder import MoeFeedForward
from llm_pretrain.model.layers import FeedForward

TOKENS = 2048
CHOICES = ((8, 2), (64, 8))
"""(experts, experts per token): an expert's width is the dense width / experts per token."""


def build(arguments: argparse.Namespace, num_experts: int, top_k: int) -> tuple[FeedForward, MoeFeedForward]:
    """The two layers, with the same FLOPs per token in their products (the router's aside)."""
    if arguments.intermediate_size % top_k:
        raise SystemExit(f"--intermediate_size must be a multiple of {top_k}")
    config = ModelConfig(
        hidden_size=arguments.hidden_size,
        intermediate_size=arguments.intermediate_size,
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        moe_intermediate_size=arguments.intermediate_size // top_k,
    )
    dense, moe = FeedForward(config.hidden_size, config.intermediate_size), MoeFeedForward(config)
    for parameter in (*dense.parameters(), *moe.parameters()):
        torch.nn.init.normal_(parameter, std=0.02)
    return dense, moe


def seconds(step: Callable[[], Tensor], parameters: list[Tensor], dtype: torch.dtype | None) -> float:
    """Processor time of one forward and backward pass."""
    for parameter in parameters:
        parameter.grad = None
    start = time.process_time()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        loss = step()
    loss.backward()
    return time.process_time() - start


def ratio(arguments: argparse.Namespace, num_experts: int, top_k: int, dtype: torch.dtype | None) -> str:
    """Median ratio and its quartiles over the pairs, and both layers' median milliseconds."""
    torch.manual_seed(0)
    dense, moe = build(arguments, num_experts, top_k)
    hidden = torch.randn(4, TOKENS // 4, arguments.hidden_size, requires_grad=True)
    target = torch.randn_like(hidden)
    mask = torch.ones(4, TOKENS // 4, dtype=torch.bool)

    def dense_step() -> Tensor:
        return (dense(hidden) * target).sum()

    def moe_step() -> Tensor:
        out, sums = moe(hidden, mask)
        return (out * target).sum() + 0.001 * sums.aux_loss

    sides = [(dense_step, [hidden, *dense.parameters()]), (moe_step, [hidden, *moe.parameters()])]
    times: tuple[list[float], list[float]] = ([], [])
    for pair in range(arguments.pairs + 2):
        measured = {side: seconds(*sides[side], dtype) for side in ((0, 1) if pair % 2 else (1, 0))}
        if pair >= 2:
            times[0].append(measured[0])
            times[1].append(measured[1])
    low, middle, high = statistics.quantiles([m / d for d, m in zip(*times, strict=True)], n=4)
    name = "bf16" if dtype else "fp32"
    return (
        f"{num_experts:3d} experts, top {top_k}, {name}: {middle:.3f} ({low:.3f} to {high:.3f}), "
        f"dense {statistics.median(times[0]) * 1e3:.1f} ms, moe {statistics.median(times[1]) * 1e3:.1f} ms"
    )


def cpu_name() -> str:
    """The processor's model, where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown CPU"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--hidden_size", type=int, default=512)
    parser.add_argument("--intermediate_size", type=int, default=1408)
    arguments = parser.parse_args()
    if arguments.pairs < 2:
        parser.error("--pairs: expected at least 2, which quartiles need")
    torch.set_num_threads(1)
    revision = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    malloc = {name: value for name, value in os.environ.items() if name.startswith("MALLOC_")}
    commit = revision.stdout.strip() or "unknown"
    print(f"commit {commit}, torch {torch.__version__}, {cpu_name()}, malloc {malloc or 'as it is'}")
    for dtype in (None, torch.bfloat16):
        for num_experts, top_k in CHOICES:
            print(ratio(arguments, num_experts, top_k, dtype), flush=True)


if __name__ == "__main__":
    main()
