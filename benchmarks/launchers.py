"""The Accelerate script's step against the torchrun script's: same config, one and two processes.

The two scripts' engines in the same processes, taking steps in turns, by CPU time summed over the ranks. What
both call alike (`shared_work.py`) is left out of the difference. Every process has one thread: threads that
wait for one another burn CPU time, the more the busier the machine. `--launched` also starts both scripts as
users do, in turns; each run's figure is the median of its `perf/step_seconds`, wall time, which other
processes on the machine disturb.
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
from benchmarks.measuring import ROOT, Interval
from benchmarks.reporting import report
from benchmarks.shared_work import Lap

GOAL_RATIO = 1.03
GOAL_MILLISECONDS = 0.4
WARMUP_STEPS = 3
QUICK = ["--steps", "20"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmark's options."""
    parser.add_argument("--steps", type=int, default=60, help="pairs of steps; steps of each launched run")
    parser.add_argument("--world_sizes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--configs", nargs="+", default=["tiny-dense", "quickstart"], help="of configs/")
    parser.add_argument("--launched", type=int, default=0, metavar="PAIRS", help="pairs of launched runs")
    add_store_option(parser)


def run(arguments: argparse.Namespace) -> None:
    """Prints a difference and a ratio per configuration and number of processes."""
    with token_store(arguments.store) as store:
        for config in arguments.configs:
            for world_size in arguments.world_sizes:
                case = f"`{config}`, W={world_size}"
                added, share, milliseconds = _engines(arguments, config, store, world_size)
                note = f"of a step of {milliseconds:.1f} ms"
                what = f"Accelerate script's step - torchrun script's, CPU time a rank, {case}"
                report(what, added, unit="ms", at_most=GOAL_MILLISECONDS, note=note)
                report(f"Accelerate script / torchrun script, {case}", share, at_most=GOAL_RATIO)
                if arguments.launched:
                    ratio = _launched(arguments, config, store, world_size)
                    report(f"the same, whole launches, wall time of a step, {case}", ratio)


def _launched(arguments: argparse.Namespace, config: str, store: Path, world_size: int) -> Interval:
    """Accelerate's median step over torchrun's, per pair of runs."""
    ratios = []
    for pair in range(arguments.launched):
        seconds = {}
        for launcher in sorted(SCRIPTS, reverse=bool(pair % 2)):
            with tempfile.TemporaryDirectory() as temporary:
                options = _options(arguments, config, store, Path(temporary))
                rows = launch(launch_command(launcher, world_size), options, Path(temporary)).rows
            seconds[launcher] = statistics.median(row["perf/step_seconds"] for row in rows[WARMUP_STEPS:])
        ratios.append(seconds["accelerate"] / seconds["torchrun"])
    return Interval.of(ratios)


def _engines(
    arguments: argparse.Namespace, config: str, store: Path, world_size: int
) -> tuple[Interval, Interval, float]:
    """What Accelerate adds to a rank's step: milliseconds, ratio; and the milliseconds of torchrun's step."""
    command = [sys.executable]
    if world_size > 1:  # one process started by torchrun would make Accelerate wrap the model in DDP
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world_size)]
    command += ["-m", "benchmarks.engine_pairs"]
    with tempfile.TemporaryDirectory() as temporary:
        done = subprocess.run(
            [*command, *_options(arguments, config, store, Path(temporary))],
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    laps = json.loads(done.stdout.splitlines()[-1])
    by_hand, accelerate = ([Lap(*lap) for lap in laps[name]][WARMUP_STEPS:] for name in SCRIPTS)
    added = [more.own - less.own for less, more in zip(by_hand, accelerate, strict=True)]
    ratio = Interval.of(1 + each / lap.whole for each, lap in zip(added, by_hand, strict=True))
    milliseconds = Interval.of(1e3 * each / world_size for each in added)
    return milliseconds, ratio, 1e3 * statistics.median(lap.whole for lap in by_hand) / world_size


def _options(arguments: argparse.Namespace, config: str, store: Path, folder: Path) -> list[str]:
    options = training_options(config, store, folder)
    steps = str(arguments.steps + WARMUP_STEPS)
    return [*options, "--training.max_steps", steps, "--distributed.cpu_threads", "1"]
