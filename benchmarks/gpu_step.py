"""Tokens per second and MFU of `minimind-26m` in bf16 on one GPU, through both scripts.

With and without `training.deterministic`, runs in turns; a run's figure is its median step after the warm-up.
Tokens are loss tokens; MFU is against the datasheet's dense bf16 peak. Skipped where there is no CUDA device.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import torch

from benchmarks.launching import (
    SCRIPTS,
    Launched,
    add_store_option,
    launch,
    launch_command,
    token_store,
    training_options,
)
from benchmarks.measuring import Spread

WARMUP_STEPS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmark's options."""
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="steps of a run after its warm-up")
    parser.add_argument("--config", default="minimind-26m", help="a preset of configs/")
    parser.add_argument("--micro_batch_size", type=int, default=32)
    parser.add_argument("--global_batch_size", type=int, default=256)
    add_store_option(parser)


def run(arguments: argparse.Namespace) -> None:
    """Prints a row per script and setting, and what Accelerate and determinism cost."""
    if not torch.cuda.is_available():
        print("skipped: no CUDA device")
        return
    cases = [(launcher, deterministic) for deterministic in (False, True) for launcher in SCRIPTS]
    runs: dict[tuple[str, bool], list[dict[str, float]]] = {case: [] for case in cases}
    with token_store(arguments.store) as store:
        for repeat in range(arguments.repeats):
            for case in cases if repeat % 2 else reversed(cases):
                runs[case].append(_medians(_launch(arguments, store, *case)))
    for (launcher, deterministic), found in runs.items():
        name = f"{launcher}{', deterministic' if deterministic else ''}"
        tokens = Spread.of(each["perf/tokens_per_second"] / 1e3 for each in found)
        mfu = [each["perf/mfu"] for each in found if "perf/mfu" in each]
        utilisation = f", MFU {Spread.of(mfu).text()}" if mfu else ""
        memory = found[0]["perf/memory_bytes"] / 2**30
        print(f"{name:<26} {tokens.text('k tokens/s', 1)}{utilisation}, {memory:.1f} GiB")
    seconds = {case: [each["perf/step_seconds"] for each in found] for case, found in runs.items()}
    for text, one, other in (
        ("accelerate / torchrun", ("accelerate", False), ("torchrun", False)),
        ("deterministic / not", ("torchrun", True), ("torchrun", False)),
    ):
        ratios = [a / b for a, b in zip(seconds[one], seconds[other], strict=True)]
        print(f"{text:<26} {Spread.of(ratios).text()} of a step")


def _launch(arguments: argparse.Namespace, store: Path, launcher: str, deterministic: bool) -> Launched:
    with tempfile.TemporaryDirectory() as temporary:
        options = training_options(arguments.config, store, Path(temporary))
        options += ["--training.max_steps", str(arguments.steps + WARMUP_STEPS)]
        options += ["--training.precision", "bf16", "--training.deterministic", str(deterministic).lower()]
        for name in ("micro_batch_size", "global_batch_size"):
            options += [f"--training.{name}", str(getattr(arguments, name))]
        return launch(launch_command(launcher, 1, on_gpu=True), options, Path(temporary))


def _medians(launched: Launched) -> dict[str, float]:
    """Median of every perf/… figure over the steps after the warm-up."""
    rows = launched.rows[WARMUP_STEPS:]
    names = [name for name, value in rows[0].items() if name.startswith("perf/") and value is not None]
    return {name: statistics.median(row[name] for row in rows) for name in names}
