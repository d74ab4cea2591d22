"""Seconds from the start of a training process to the end of its first step, `tiny-dense`, one process.

The total is measured from outside, up to the console's line of the first step. Its parts are measured in
further, interleaved runs by CPU time of the process, and what imports cost by `python -X importtime`. Last,
a store of 10^9 tokens: its first step after the imports, and the memory of order and packing index.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.launching import add_store_option, environment, launch, token_store, training_options
from benchmarks.measuring import ROOT, Spread, goal
from benchmarks.startup_store import write_large_store

QUICK = ["--repeats", "2"]
GOAL_SECONDS = 6.0
LARGE_GOAL_SECONDS = 3.0
LARGE_GOAL_BYTES = 200e6
_IMPORT_LINE = re.compile(r"import time:\s*(\d+) \|\s*(\d+) \|\s*(\S+)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmark's options."""
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--config", default="tiny-dense", help="a preset of configs/")
    parser.add_argument(
        "--tokens", type=int, default=10**9, help="of a large store, written for this; 0 leaves it out"
    )
    parser.add_argument("--folder", type=Path, help="where the large store is written for the time being")
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
            parts.append(measured_parts(arguments.config, store)["cpu"])
        imports = _child(["-X", "importtime", "train_pretrain.py"], arguments.config, store)[1]
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
    if arguments.tokens:
        _large(arguments)


def _large(arguments: argparse.Namespace) -> None:
    """A store that is too large to be packed at every start: the run that builds its index, and the next."""
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        large = Path(temporary) / "large"
        with token_store(arguments.store) as store:
            documents = write_large_store(large, store / "tokenizer", arguments.tokens)
        print(f"store of {arguments.tokens:,} tokens in {documents:,} documents", flush=True)
        for length, name in product((1024, 64), ("index is built", "index is there")):
            found = measured_parts(arguments.config, large, *_ONE_SEQUENCE, str(length))
            cpu = sum(found["cpu"].values()) - sum(found["cpu"][part] for part in _IMPORTS)
            print(
                f"  length {length:<4} {name:<15} "
                f"first step {found['after_imports']:.2f} s after the imports ({cpu:.2f} s CPU, "
                f"data {found['cpu']['data']:.2f}), order and index {found['data_memory'] / 1e6:.0f} MB"
            )
            for text, met in (
                (f"{LARGE_GOAL_SECONDS:.0f} s", found["after_imports"] <= LARGE_GOAL_SECONDS),
                (f"{LARGE_GOAL_BYTES / 1e6:.0f} MB", found["data_memory"] <= LARGE_GOAL_BYTES),
            ):
                print(goal(f"large store, length {length}, {name}: at most {text}", met))
        size = sum(file.stat().st_size for file in (large / "index").glob("*.bin"))
        print(f"  index on disk   {size / 1e6:.0f} MB")


_IMPORTS = ("interpreter", "import torch", "other imports")


_ONE_SEQUENCE = ("--training.micro_batch_size", "1", "--training.global_batch_size", "1")
_ONE_SEQUENCE += ("--distributed.cpu_threads", "1", "--training.sequence_length")
"""Of the length that follows, by one thread: the step itself costs next to nothing."""


def measured_parts(config: str, store: Path, *options: str) -> dict[str, Any]:
    """What `startup_parts` says of one run of the preset `config`."""
    return json.loads(_child(["-m", "benchmarks.startup_parts"], config, store, *options)[0])


def import_costs(trace: str) -> dict[str, float]:
    """Own seconds of imported modules, by package (torch by its parts), from `-X importtime`."""
    costs: dict[str, float] = defaultdict(float)
    for own, _, name in _IMPORT_LINE.findall(trace):
        pieces = name.split(".")
        costs[".".join(pieces[: 2 if pieces[0] in ("torch", "llm_pretrain") else 1])] += int(own) / 1e6
    return costs


def _options(config: str, store: Path, folder: Path) -> list[str]:
    return [*training_options(config, store, folder), "--training.max_steps", "1"]


def _child(command: list[str], config: str, store: Path, *options: str) -> tuple[str, str]:
    """Last line of the standard output, and the standard error, of a Python process that trains one step."""
    with tempfile.TemporaryDirectory() as temporary:
        done = subprocess.run(
            [sys.executable, *command, *_options(config, store, Path(temporary)), *options],
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout.splitlines()[-1], done.stderr
