"""Lower bound of a training step's time on GPUs that this machine does not have, and the share of each part.

The compiled step of `gpu_step`'s cases runs on fake tensors (`make test-cuda`'s fake H100). Every kernel
takes at least as long as its matrix products at the peak of their type, and at least as long as its bytes at
the peak of the memory. The larger of the two is the kernel's bound; the step's is the sum over its kernels.

Assumptions: one GPU, one micro batch, no gradient reduction; a kernel reads each distinct input once and
writes each output once (nothing stays in the cache for the next kernel); operations that are no matrix
product cost bytes only; no launch takes time. Kernels of compiled layers and their bytes are Inductor's
own, as scheduled for capability 9.0. Attention multiplies each document's lower triangle, backward 2.5 times
as much as forward; MFU counts whole rows (`flops_per_token`), so its bound may be above 1. No kernel reaches
these peaks: a bound below a goal rules the goal out, one above does not promise it.

`--documents` takes the lengths of `gpu_step`'s documents instead of one document a row.
Needs a C++ compiler and the package triton (`make .venv-triton/.installed`), and no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np

from benchmarks.documents import Documents
from benchmarks.gpu_step import CASES, GOAL_MIXTURE
from benchmarks.machine import ROOT
from benchmarks.reporting import SkippedError, report
from llm_pretrain.tracking import MACHINES

NAMES = ["gpt2-124m", "qwen3-0.6b", "mixture", "dense of equal FLOPs"]
QUICK = ["--only", "gpt2-124m"]
GOALS = {"gpt2-124m": 0.55, "qwen3-0.6b": 0.60}
"""MFU that is aimed at; the bound must be at least as high."""
_PATHS = ("tests/cuda_without_gpu", "tests", ".venv-triton", ".")
"""Folders of the checkout from which `gpu_kernels` imports."""


class Device(NamedTuple):
    """A GPU's peaks."""

    name: str
    bf16: float
    """Dense FLOP/s of tensor cores."""
    fp32: float
    """FLOP/s without tensor cores, of the router's products."""
    bandwidth: float
    """Bytes per second."""


def _device(name: str, gpu: str) -> Device:
    found = MACHINES[gpu]
    bandwidth = found.memory_gb_per_second * 1e9
    return Device(name, found.bf16_tflops * 1e12, found.fp32_tflops * 1e12, bandwidth)


DEVICES = [
    _device("H100", "h100"),
    _device("H200", "h200"),
    _device("A100", "a100"),
    _device("RTX 4090", "4090"),
]
GOAL_DEVICE = DEVICES[0]
"""The device of the goals."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmark's options."""
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=NAMES, default=NAMES)
    parser.add_argument("--documents", action="store_true", help="documents of lognormal length")
    parser.add_argument("--kernels", type=int, default=0, metavar="N", help="also the N longest kernels")


def run(arguments: argparse.Namespace) -> None:
    """Prints a table of parts and devices per case, then the bounds beside their goals."""
    speeds: dict[str, dict[str, float]] = {}
    for counted in _count(arguments.only):
        case = next(case for case in CASES if case.name == counted["case"])
        launches = [_Launch(*row) for row in counted["launches"]]
        if arguments.documents:
            share = _document_share(case.length)
            launches = [each.of_documents(share) for each in launches]
        totals = _print_parts(case.name, launches)
        _print_kernels(launches, arguments.kernels)
        tokens = case.micro_batch_size * case.length
        speeds[case.name] = {name: tokens / seconds for name, seconds in totals.items()}
        mfu = {each.name: counted["mfu_flops"] / each.bf16 / totals[each.name] for each in DEVICES}
        figure = " · ".join(f"{mfu[name]:.1%}, {speeds[case.name][name] / 1e3:.0f}" for name in mfu)
        goal = GOALS.get(case.name)
        devices = " · ".join(each.name for each in DEVICES)
        report(
            f"{case.name}, {case.micro_batch_size} x {case.length}: bounds of MFU, k tokens/s on {devices}",
            figure,
            bound=f"≥ {goal:.0%} on {GOAL_DEVICE.name}" if goal else "",
            met=goal is None or mfu[GOAL_DEVICE.name] >= goal,
        )
    if {"mixture", "dense of equal FLOPs"} <= speeds.keys():
        quotients = {
            each.name: speeds["mixture"][each.name] / speeds["dense of equal FLOPs"][each.name]
            for each in DEVICES
        }
        report(
            "bound of the mixture's tokens/s / the dense model's",
            " · ".join(f"{quotient:.3f}" for quotient in quotients.values()),
            bound=f"≥ {GOAL_MIXTURE} on {GOAL_DEVICE.name}",
            met=quotients[GOAL_DEVICE.name] >= GOAL_MIXTURE,
        )


class _Launch(NamedTuple):
    """A kernel and how many times a step launches it; the other fields are those of `gpu_kernels.Launch`."""

    times: int
    part: str
    name: str
    flops: float
    in_bf16: bool
    mfu_flops: float
    bytes: float

    def of_documents(self, share: float) -> _Launch:
        """The same with `share` of the FLOPs, if it is attention over documents; else unchanged."""
        return self._replace(flops=self.flops * share) if "varlen" in self.name else self

    def seconds(self, device: Device) -> float:
        """Lower bound of the time of all its launches in a step."""
        peak = device.bf16 if self.in_bf16 else device.fp32
        return self.times * max(self.flops / peak, self.bytes / device.bandwidth)


def _count(names: list[str]) -> list[dict[str, Any]]:
    """The lines of `gpu_kernels`, run in a process that loads the fake device before torch."""
    paths = [str(ROOT / path) for path in _PATHS] + [os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu_kernels", *names],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"gpu_roofline: counting failed with exit code {done.returncode}; see above")
    counted = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if counted and "skipped" in counted[0]:
        raise SkippedError(counted[0]["skipped"])
    return counted


def _document_share(length: int) -> float:
    """Attention FLOPs of documents cut at `length`, as a share of those of rows of one document each.

    Both are proportional to the sum of the squared lengths, at an equal number of tokens.
    """
    pieces = [
        np.minimum(length, whole - start)
        for whole in Documents.lognormal(20_000, 1000).lengths
        for start in range(0, whole, length)
    ]
    sizes = np.array(pieces, dtype=np.float64)
    return float((sizes**2).sum() / sizes.sum() / length)


def _print_parts(name: str, launches: list[_Launch]) -> dict[str, float]:
    """Print milliseconds and per cent of each part, with and without matrix products.

    Returns:
        The step's seconds by name of the device.
    """
    parts: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for each in launches:
        for device in DEVICES:
            kind = "products" if each.flops else "memory"
            parts[f"{each.part}: {kind}"][device.name] += each.seconds(device)
    totals = {each.name: sum(times[each.name] for times in parts.values()) for each in DEVICES}
    print(f"\n| {name} | " + " | ".join(f"{each.name}, ms (%)" for each in DEVICES) + " |")
    print("|---|" + "---|" * len(DEVICES))
    for part, times in sorted(parts.items(), key=lambda item: -item[1][GOAL_DEVICE.name]):
        cells = [
            f"{times[each.name] * 1e3:.2f} ({times[each.name] / totals[each.name]:.1%})" for each in DEVICES
        ]
        print(f"| {part} | " + " | ".join(cells) + " |")
    print("| whole step | " + " | ".join(f"{totals[each.name] * 1e3:.2f}" for each in DEVICES) + " |")
    print(flush=True)
    return totals


def _print_kernels(launches: list[_Launch], count: int) -> None:
    """Print the `count` launches that take longest on `GOAL_DEVICE`."""
    longest = sorted(launches, key=lambda each: -each.seconds(GOAL_DEVICE))[:count]
    for each in longest:
        print(
            f"{each.seconds(GOAL_DEVICE) * 1e3:8.3f} ms {each.times:4d} times {each.bytes / 2**20:8.1f} MiB "
            f"{each.flops / 1e9:7.1f} GFLOP  {each.part}: {each.name}"
        )
