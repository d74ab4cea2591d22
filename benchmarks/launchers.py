"""The Accelerate script's step against the torchrun script's: same config, one and two processes.

Two measurements. `launched`: both scripts started as users do, in turns; each run's figure is the median of
its `perf/step_seconds` (wall time, so other processes on the machine disturb it). `engines`: the two scripts'
engines in the same processes, taking steps in turns, by CPU time summed over the ranks. Every process has one
thread: threads that wait for one another burn CPU time, the more the busier the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.launching import (
    SCRIPTS,
    add_store_option,
    environment,
    launch,
    launch_command,
    token_store,
    training_options,
)
from benchmarks.measuring import ROOT, Spread, goal

GOAL_RATIO = 1.03
WARMUP_STEPS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmark's options."""
    parser.add_argument("--pairs", type=int, default=5, help="pairs of launched runs")
    parser.add_argument("--steps", type=int, default=15, help="steps of each run, pairs of steps of engines")
    parser.add_argument("--world_sizes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--config", default="quickstart", help="a preset of configs/")
    parser.add_argument("--only", choices=["launched", "engines"], help="one of the two measurements")
    add_store_option(parser)


def run(arguments: argparse.Namespace) -> None:
    """Prints a ratio per measurement and number of processes."""
    with token_store(arguments.store) as store:
        for world_size in arguments.world_sizes:
            ratios: list[Spread] = []
            if arguments.only != "launched":
                ratio, more = _engines(arguments, store, world_size)
                ratios.append(ratio)
                print(
                    f"W={world_size} engines, CPU time of a step    {ratio.text()}, {more:+.2f} ms a rank",
                    flush=True,
                )
            if arguments.only != "engines":
                ratios.append(_launched(arguments, store, world_size))
                print(f"W={world_size} launched, wall time of a step  {ratios[-1].text()}", flush=True)
            met = all(ratio.median <= GOAL_RATIO for ratio in ratios)
            print(goal(f"Accelerate at most {GOAL_RATIO} times torchrun, W={world_size}", met), flush=True)


def _launched(arguments: argparse.Namespace, store: Path, world_size: int) -> Spread:
    """Accelerate's median step over torchrun's, per pair of runs."""
    ratios = []
    for pair in range(arguments.pairs):
        seconds = {}
        for launcher in sorted(SCRIPTS, reverse=bool(pair % 2)):
            with tempfile.TemporaryDirectory() as temporary:
                options = _options(arguments, store, Path(temporary), arguments.steps + WARMUP_STEPS)
                rows = launch(launch_command(launcher, world_size), options, Path(temporary)).rows
            seconds[launcher] = statistics.median(row["perf/step_seconds"] for row in rows[WARMUP_STEPS:])
        ratios.append(seconds["accelerate"] / seconds["torchrun"])
    return Spread.of(ratios)


def _engines(arguments: argparse.Namespace, store: Path, world_size: int) -> tuple[Spread, float]:
    """Accelerate's step over torchrun's, per pair of steps in the same processes; their difference in ms."""
    steps = arguments.steps + WARMUP_STEPS
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", str(world_size), "-m", "benchmarks.engine_pairs"]
    with tempfile.TemporaryDirectory() as temporary:
        done = subprocess.run(
            [*command, *_options(arguments, store, Path(temporary), steps)],
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    seconds = json.loads(done.stdout.splitlines()[-1])
    pairs = list(zip(seconds["accelerate"], seconds["torchrun"], strict=True))[WARMUP_STEPS:]
    difference = statistics.median(one - other for one, other in pairs) / world_size
    return Spread.of(one / other for one, other in pairs), 1e3 * difference


def _options(arguments: argparse.Namespace, store: Path, folder: Path, steps: int) -> list[str]:
    options = training_options(arguments.config, store, folder)
    return [*options, "--training.max_steps", str(steps), "--distributed.cpu_threads", "1"]
