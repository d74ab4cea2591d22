"""Real tokens per second of a whole training loop, ours and others', on the same documents.

Documents of lognormal length (median 250 tokens, sigma 0.8) at sequence length 340: tokens that bear loss
count, padding does not. The loops take optimizer steps in turns in one process, by its CPU time on one
thread; LitGPT, which needs an environment of its own, in another, by that one's. A loop's step holds
everything it does: batches, logging, the optimizer.

Sides: `trainer_padded` is transformers.Trainer, a document a row, cut at the length and padded to the longest
of its batch; `trainer_packed` joins documents as its run_clm.py does, without isolating them, and `litgpt`
likewise; `bare` is forward, backward, clipping and AdamW of our model and nothing else. All have our settings
of AdamW. Peak memory is the largest resident size of a process that runs one loop only.

What a peer trains on in a step is its mean over the whole corpus, so that a lucky batch decides nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.documents import Documents, make_store
from benchmarks.launching import environment
from benchmarks.machine import ROOT
from benchmarks.measuring import Interval, Spread
from benchmarks.peers import default_litgpt_python, has_litgpt
from benchmarks.reporting import report
from llm_pretrain.hardware import usable_cores

QUICK = ["--micro_batch_size", "4", "--pairs", "7", "--warmup", "1", "--without_litgpt"]
PEERS = ("trainer_padded", "trainer_packed", "litgpt", "bare")
GOALS = {
    ("fp32", "trainer_padded"): 1.4,
    ("bf16", "trainer_padded"): 1.4,
    ("defaults", "trainer_padded"): 2.3,
    ("fp32", "trainer_packed"): 1.05,
    ("bf16", "trainer_packed"): 1.05,
}
"""(case, peer): our tokens per second over its, at least."""

CASES = {
    "fp32": {"ours": "fp32", **dict.fromkeys(PEERS, "fp32")},
    "bf16": {"ours": "bf16", **dict.fromkeys(PEERS, "bf16")},
    "defaults": {"ours": None, "trainer_padded": "fp32"},
}
"""Sides of each case and their precision; None is our default, fp32 is Trainer's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmark's options."""
    parser.add_argument("--config", default="minimind3-64m", help="a preset of configs/ with a vocab_size")
    parser.add_argument("--moe", action="store_true", help="minimind3-moe against Qwen3-MoE, without goals")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--pairs", type=int, default=9, help="steps of each side to measure, at least 7")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--micro_batch_size", type=int, default=8, help="Trainer's default is 8")
    parser.add_argument("--sequence_length", type=int, default=340)
    parser.add_argument("--documents", type=int, default=4000)
    parser.add_argument("--wall", action="store_true", help="all cores, by the wall's clock (idle machines)")
    parser.add_argument("--skip_memory", action="store_true", help="no peak memory")
    parser.add_argument("--litgpt_python", default=default_litgpt_python(), help="interpreter with litgpt")
    parser.add_argument("--without_litgpt", action="store_true")


def run(arguments: argparse.Namespace) -> None:
    """Prints tokens per second of each side, the ratios and the peaks of memory."""
    if arguments.moe:
        arguments.config = "minimind3-moe"
    peers = [name for name in arguments.peers if name != "litgpt"]
    if "litgpt" in arguments.peers and not (arguments.without_litgpt or arguments.moe):
        if has_litgpt(arguments.litgpt_python):
            peers.append("litgpt")
        else:
            print("litgpt: skipped, not in this environment: name an interpreter with --litgpt_python")
    with tempfile.TemporaryDirectory() as temporary:
        settings = _settings(arguments, Path(temporary))
        for case in arguments.cases:
            sides = {name: each for name, each in CASES[case].items() if name in ("ours", *peers)}
            _report_speed(arguments, case, _measure(settings, sides))
        if not arguments.skip_memory:
            for case in arguments.cases:
                _report_memory(arguments, settings, case)


def _settings(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What a case's process needs to know; makes the documents' store."""
    from llm_pretrain.config.loading import load_config

    preset = load_config(["--config", str(ROOT / "configs" / f"{arguments.config}.yaml")])
    vocab_size = preset.model.vocab_size
    if vocab_size is None:
        raise SystemExit(f"--config: expected a preset that sets model.vocab_size, found {arguments.config}")
    documents = Documents.lognormal(arguments.documents, vocab_size)
    make_store(folder / "store", documents, vocab_size)
    cores = usable_cores()
    names = ("config", "pairs", "warmup", "micro_batch_size", "sequence_length", "documents")
    return {name: getattr(arguments, name) for name in names} | {
        "vocab_size": vocab_size,
        "store": str(folder / "store"),
        "folder": str(folder),
        "python": arguments.litgpt_python,
        "clock": "perf_counter" if arguments.wall else "process_time",
        "threads": cores if arguments.wall else 1,
    }


def _measure(settings: dict[str, Any], sides: dict[str, str | None], **changes: Any) -> dict[str, Any]:
    """Run a case in a process of its own; its folders are new every time."""
    with tempfile.TemporaryDirectory(dir=settings["folder"]) as folder:
        given = settings | {"sides": sides, "folder": folder} | changes
        command = [sys.executable, "-m", "benchmarks.whole_run_case", json.dumps(given)]
        threads = {"OMP_NUM_THREADS": str(settings["threads"])}
        done = subprocess.run(
            command, cwd=ROOT, env=environment() | threads, capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _report_speed(arguments: argparse.Namespace, case: str, found: dict[str, Any]) -> None:
    sides = found["sides"]
    for name, side in sides.items():
        speed = Spread.of(side["tokens"] / each for each in side["seconds"])
        step = statistics.median(side["seconds"])
        print(f"{case:8} {name:15} {speed.text('tokens/s', 0)}, a step {step:.2f} s", flush=True)
    for name, side in sides.items():
        if name == "ours":
            continue
        own, other = sides["ours"], side
        pairs = zip(own["seconds"], other["seconds"], strict=True)
        speed = Interval.of(own["tokens"] / a / (other["tokens"] / b) for a, b in pairs)
        wanted = None if arguments.moe else GOALS.get((case, name))
        report(f"real tokens/s of ours / {name}, `{arguments.config}`, {case}", speed, at_least=wanted)


def _report_memory(arguments: argparse.Namespace, settings: dict[str, Any], case: str) -> None:
    """Peaks of both loops, each in three processes by itself."""
    peaks: dict[str, list[float]] = {"ours": [], "trainer_padded": []}
    for _ in range(1 if arguments.moe else 3):
        for name in peaks:
            one = _measure(settings, {name: CASES[case][name]}, pairs=4, warmup=0)
            peaks[name].append(one["peak_gib"])
    text = ", ".join(f"{name} {Spread.of(each).text('GiB', 2)}" for name, each in peaks.items())
    quotient = max(peaks["ours"]) / min(peaks["trainer_padded"])
    bound = "" if arguments.moe else "≤ Trainer's"
    figure = f"{text}; ours / Trainer's {quotient:.3f} at its worst"
    report(f"peak memory, `{arguments.config}`, {case}", figure, bound=bound, met=quotient <= 1)
