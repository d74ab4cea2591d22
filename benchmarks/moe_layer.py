"""Cost of a mixture-of-experts layer relative to a dense SwiGLU of equal FLOPs, on one CPU thread.

Forward and backward of T = 2048 tokens, in interleaved pairs, by CPU time of this process, with the allocator
set as a training process sets it. The expert layer includes router, balance loss and counts. Not a benchmark
of whole training steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.measuring import Spread, goal
from llm_pretrain.config import ModelConfig
from llm_pretrain.model.decoder import MoeFeedForward
from llm_pretrain.model.layers import FeedForward
from llm_pretrain.training.process import keep_freed_memory

GOAL_RATIO = 1.3
TOKENS = 2048
CHOICES = ((8, 2), (64, 8))
"""(experts, experts per token): an expert's width is the dense width / experts per token."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmark's options."""
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--hidden_size", type=int, default=512)
    parser.add_argument("--intermediate_size", type=int, default=1408)


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


def ratio(
    arguments: argparse.Namespace, num_experts: int, top_k: int, dtype: torch.dtype | None
) -> tuple[Spread, float, float]:
    """The pairs' ratios, and the dense and the expert layer's median milliseconds."""
    torch.manual_seed(0)
    dense_layer, moe_layer = build(arguments, num_experts, top_k)
    hidden = torch.randn(4, TOKENS // 4, arguments.hidden_size, requires_grad=True)
    target = torch.randn_like(hidden)
    mask = torch.ones(4, TOKENS // 4, dtype=torch.bool)

    def dense_step() -> Tensor:
        return (dense_layer(hidden) * target).sum()

    def moe_step() -> Tensor:
        out, sums = moe_layer(hidden, mask)
        return (out * target).sum() + 0.001 * sums.aux_loss

    sides = [(dense_step, [hidden, *dense_layer.parameters()]), (moe_step, [hidden, *moe_layer.parameters()])]
    times: tuple[list[float], list[float]] = ([], [])
    for pair in range(arguments.pairs + 2):
        measured = {side: seconds(*sides[side], dtype) for side in ((0, 1) if pair % 2 else (1, 0))}
        if pair >= 2:
            times[0].append(measured[0])
            times[1].append(measured[1])
    ratios = Spread.of(moe / dense for dense, moe in zip(*times, strict=True))
    return ratios, 1e3 * statistics.median(times[0]), 1e3 * statistics.median(times[1])


def run(arguments: argparse.Namespace) -> None:
    """Prints a row per number of experts and precision."""
    torch.set_num_threads(1)
    keep_freed_memory()
    for dtype in (None, torch.bfloat16):
        precision, worst = "bf16" if dtype else "fp32", 0.0
        for num_experts, top_k in CHOICES:
            found, dense, moe = ratio(arguments, num_experts, top_k, dtype)
            name = f"{num_experts:3d} experts, top {top_k}, {precision}"
            print(f"{name}  {found.text()}, dense {dense:.1f} ms, moe {moe:.1f} ms", flush=True)
            worst = max(worst, found.median)
        description = f"experts at most {GOAL_RATIO} times a dense layer of equal FLOPs, {precision}"
        print(goal(description, worst <= GOAL_RATIO), flush=True)
