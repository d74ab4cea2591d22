"""Seconds from the start of a training process to the end of its first step, `tiny-dense`, one process.

The total is measured from outside, up to the console's line of the first step. Its parts are measured in
further, interleaved runs by CPU time of the process, and what imports cost by `python -X importtime`.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from benchmarks.launching import add_store_option, environment, launch, token_store, training_options
from benchmarks.measuring import ROOT, Spread, goal

GOAL_SECONDS = 6.0
_IMPORT_LINE = re.compile(r"import time:\s*(\d+) \|\s*(\d+) \|\s*(\S+)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmark's options."""
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--config", default="tiny-dense", help="a preset of configs/")
    add_store_option(parser)


def run(arguments: argparse.Namespace) -> None:
    """Prints the total, its parts and the most expensive imports."""
    launches, parts = [], []
    with token_store(arguments.store) as store:
        for _ in range(arguments.repeats):
            with tempfile.TemporaryDirectory() as temporary:
                options = _options(arguments.config, store, Path(temporary))
                script = [sys.executable, str(ROOT / "train_pretrain.py")]
                launches.append(launch(script, options, Path(temporary)))
            parts.append(json.loads(_child(["-m", "benchmarks.startup_parts"], arguments, store)[0]))
        imports = _child(["-X", "importtime", "train_pretrain.py"], arguments, store)[1]
    seconds = Spread.of(each.first_step_seconds for each in launches)
    print(f"first step ends after {seconds.text('s', 2)}")
    cpu = Spread.of(each.first_step_cpu_seconds for each in launches)
    print(f"CPU time until then   {cpu.text('s', 2)}")
    for name in parts[0]:
        print(f"  {name:<12} {Spread.of(each[name] for each in parts).text('s CPU')}")
    print("imports of the whole run, a module's own seconds (slowed down by the tracing):")
    for name, own in sorted(import_costs(imports).items(), key=lambda item: -item[1])[:10]:
        print(f"  {name:<28} {own:.3f}")
    print(goal(f"first step at most {GOAL_SECONDS:.0f} s after the start", seconds.median <= GOAL_SECONDS))


def import_costs(trace: str) -> dict[str, float]:
    """Own seconds of imported modules, by package (torch by its parts), from `-X importtime`."""
    costs: dict[str, float] = defaultdict(float)
    for own, _, name in _IMPORT_LINE.findall(trace):
        pieces = name.split(".")
        costs[".".join(pieces[: 2 if pieces[0] in ("torch", "llm_pretrain") else 1])] += int(own) / 1e6
    return costs


def _options(config: str, store: Path, folder: Path) -> list[str]:
    return [*training_options(config, store, folder), "--training.max_steps", "1"]


def _child(command: list[str], arguments: argparse.Namespace, store: Path) -> tuple[str, str]:
    """Last line of the standard output, and the standard error, of a Python process that trains one step."""
    with tempfile.TemporaryDirectory() as temporary:
        done = subprocess.run(
            [sys.executable, *command, *_options(arguments.config, store, Path(temporary))],
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout.splitlines()[-1], done.stderr
