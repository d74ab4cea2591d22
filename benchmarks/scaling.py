"""Real tokens per second of both scripts on one and on two processes, from their metrics.jsonl.

Whole launches in turns, wall time: needs an idle machine with a core for each process. The global batch stays
the same, so that both do the same work. A launch's figure is its median step after the warm-up.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from benchmarks.launching import (
    SCRIPTS,
    add_store_option,
    launch,
    launch_command,
    token_store,
    training_options,
)
from benchmarks.measuring import Interval, Spread, ratio
from benchmarks.reporting import report

QUICK = ["--steps", "8", "--launchers", "torchrun"]
WARMUP_STEPS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmark's options."""
    parser.add_argument("--pairs", type=int, default=7, help="launches of each, at least 7 for an interval")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--world_sizes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--launchers", nargs="+", choices=list(SCRIPTS), default=list(SCRIPTS))
    parser.add_argument("--config", default="quickstart", help="a preset of configs/")
    add_store_option(parser)


def run(arguments: argparse.Namespace) -> None:
    """Prints tokens per second of each, and each world size's over one process's."""
    cases = [(name, size) for name in arguments.launchers for size in arguments.world_sizes]
    speeds: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    with token_store(arguments.store) as store:
        for pair in range(arguments.pairs):
            for case in cases if pair % 2 else reversed(cases):
                speeds[case].append(_speed(arguments, store, *case))
    first = arguments.world_sizes[0]
    for (name, size), found in speeds.items():
        print(f"{name} W={size}  {Spread.of(found).text('tokens/s', 0)}", flush=True)
        if size != first:
            report(
                f"tokens/s of {name} at W={size} / W={first}, `{arguments.config}`",
                ratio(found, speeds[name, first]),
                note=f"{Interval.of(found).median:,.0f} tokens/s",
            )


def _speed(arguments: argparse.Namespace, store: Path, launcher: str, world_size: int) -> float:
    """Loss tokens per second of one launch."""
    with tempfile.TemporaryDirectory() as temporary:
        options = training_options(arguments.config, store, Path(temporary))
        options += ["--training.max_steps", str(arguments.steps + WARMUP_STEPS)]
        options += ["--distributed.cpu_threads", "1", "--logging.report", "false"]
        rows = launch(launch_command(launcher, world_size), options, Path(temporary)).rows
    return statistics.median(row["perf/tokens_per_second"] for row in rows[WARMUP_STEPS:])
