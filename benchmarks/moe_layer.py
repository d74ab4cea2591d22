"""Cost of a mixture-of-experts layer relative to a dense SwiGLU of equal FLOPs, on one CPU thread.

Forward and backward of T = 2048 tokens, new ones in every round as in training, so that no two rounds route
alike; in interleaved turns, by CPU time of this process, with the allocator set as training sets it. The
expert layer includes router, balance loss and counts. Not a benchmark of whole training steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.measuring import Interval, goal, interleaved, ratio
from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.launch.process import keep_freed_memory
from llm_pretrain.model.kernels.choice import Kernels
from llm_pretrain.model.layers import FeedForward
from llm_pretrain.model.moe import MoeFeedForward

GOALS = {"fp32": 1.15, "bf16": 1.25}
"""Largest ratio to the dense layer at any number of experts."""
GOAL_GROWTH = 1.15
"""Largest ratio between the ratios of the most and the fewest experts."""
TOKENS = 2048
CHOICES = ((8, 2), (16, 4), (32, 4), (32, 8), (64, 8))
"""(experts, experts per token): an expert's width is the dense width / experts per token."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmark's options."""
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--hidden_size", type=int, default=512)
    parser.add_argument("--intermediate_size", type=int, default=1408)
    parser.add_argument("--precision", choices=[*GOALS, "all"], default="all")
    parser.add_argument("--implementation", choices=["auto", "streamed", "reference"], default="auto")


def build(arguments: argparse.Namespace, num_experts: int, top_k: int) -> MoeFeedForward:
    """A layer with as many FLOPs per token in its products as the dense one (the router's aside)."""
    if arguments.intermediate_size % top_k:
        raise SystemExit(f"--intermediate_size must be a multiple of {top_k}")
    config = ModelConfig(
        hidden_size=arguments.hidden_size,
        intermediate_size=arguments.intermediate_size,
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        moe_intermediate_size=arguments.intermediate_size // top_k,
    )
    return MoeFeedForward(config, Kernels(experts=arguments.implementation))


def side(layer: nn.Module, hidden_size: int, dtype: torch.dtype | None) -> Callable[[], float]:
    """Returns what measures one forward and backward pass, on the same tokens in the same round."""
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.02)
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(4, TOKENS // 4, hidden_size)
    mask = torch.ones(4, TOKENS // 4, dtype=torch.bool)

    def loss(hidden: Tensor) -> Tensor:
        if isinstance(layer, MoeFeedForward):
            out, sums = layer(hidden, mask)
            return (out * target).sum() + 0.001 * sums.aux_loss
        return (layer(hidden) * target).sum()

    def measure() -> float:
        hidden = torch.randn(target.shape, generator=generator).requires_grad_()
        layer.zero_grad(set_to_none=True)
        start = time.process_time()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            total = loss(hidden)
        total.backward()
        return time.process_time() - start

    return measure


def measure(arguments: argparse.Namespace, dtype: torch.dtype | None) -> dict[tuple[int, int], Interval]:
    """Prints a row per number of experts; returns the ratios, and their growth under the key (0, 0)."""
    torch.manual_seed(0)
    size = arguments.hidden_size
    sides = {"dense": side(FeedForward(size, arguments.intermediate_size), size, dtype)}
    for choice in CHOICES:
        sides[str(choice)] = side(build(arguments, *choice), size, dtype)
    times = interleaved(sides, arguments.pairs)
    found = {choice: ratio(times[str(choice)], times["dense"]) for choice in CHOICES}
    milliseconds = {name: 1e3 * statistics.median(seconds) for name, seconds in times.items()}
    for choice, spread in found.items():
        name = f"{choice[0]:3d} experts, top {choice[1]}, {'bf16' if dtype else 'fp32'}"
        dense, moe = milliseconds["dense"], milliseconds[str(choice)]
        print(f"{name}  {spread.text()}, dense {dense:.1f} ms, moe {moe:.1f} ms", flush=True)
    return found | {(0, 0): ratio(times[str(CHOICES[-1])], times[str(CHOICES[0])])}


def run(arguments: argparse.Namespace) -> None:
    """Prints a row per number of experts and precision, and the goals by their worst row."""
    torch.set_num_threads(1)
    keep_freed_memory()
    for precision, dtype in (("fp32", None), ("bf16", torch.bfloat16)):
        if arguments.precision not in (precision, "all"):
            continue
        found = measure(arguments, dtype)
        growth = found.pop((0, 0))
        worst = max(found.values(), key=lambda interval: interval.high)
        description = f"experts / a dense layer of equal FLOPs, {precision}, worst number of experts,"
        print(goal(description, worst, at_most=GOALS[precision]), flush=True)
        most, fewest = CHOICES[-1][0], CHOICES[0][0]
        print(f"{most} / {fewest} experts, {precision}  {growth.text()}", flush=True)
        description = f"{most} / {fewest} experts, {precision},"
        print(goal(description, growth, at_most=GOAL_GROWTH), flush=True)
