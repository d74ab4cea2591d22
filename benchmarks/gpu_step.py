"""Tokens per second and MFU of whole runs on one GPU, by preset and by choice of kernels.

The torchrun script as users start it, on documents of lognormal length that fill packed sequences, in
bf16. A run's figure is the interval of its steps' `perf/tokens_per_second` after the warm-up; tokens are loss
tokens, MFU is against the datasheet's dense bf16 peak. The mixture (1.08B parameters, 0.19B active) is
compared with a dense model whose feed-forward is as wide as the experts that one token sees: equal active
FLOPs. Needs CUDA, and is skipped with exit code 0 where there is none, so that `all` runs
anywhere; written for one H200, and takes about 10 minutes. `--profile` adds a table of where a
step's time goes.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.documents import Documents, make_store
from benchmarks.launching import (
    environment,
    launch,
    launch_command,
    preset_without_data,
    training_options,
)
from benchmarks.machine import ROOT
from benchmarks.measuring import Interval
from benchmarks.reporting import SkippedError, report

WARMUP_STEPS = 10
EXPERTS = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4}
MOE = EXPERTS | {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 576}
DENSE = EXPERTS | {"intermediate_size": 8 * 576}


class Case(NamedTuple):
    """A run: preset, its shape where it differs, batch, and settings of `training`."""

    name: str
    preset: str
    length: int
    micro_batch_size: int
    model: dict[str, int] = {}  # noqa: RUF012 (never written to)
    training: dict[str, str] = {}  # noqa: RUF012
    at_least: float | None = None
    """Thousands of tokens per second."""
    documents: int = 6000
    """Documents of the store for a profile."""


CASES = [
    Case("gpt2-124m", "gpt2-124m", 1024, 64, at_least=500.0),
    Case("gpt2-124m, compile off", "gpt2-124m", 1024, 64, training={"compile": "off"}),
    Case("gpt2-124m, sdpa", "gpt2-124m", 1024, 64, training={"attention_implementation": "sdpa"}),
    Case("gpt2-124m, varlen", "gpt2-124m", 1024, 64, training={"attention_implementation": "varlen"}),
    Case("gpt2-124m, flex", "gpt2-124m", 1024, 64, training={"attention_implementation": "flex"}),
    Case("gpt2-124m, full logits", "gpt2-124m", 1024, 32, training={"loss_implementation": "full"}),
    Case("gpt2-124m, fused head", "gpt2-124m", 1024, 64, training={"loss_implementation": "fused"}),
    Case("qwen3-0.6b", "qwen3-0.6b", 4096, 8, training={"activation_checkpointing": "false"}, at_least=70.0),
    Case("mixture", "gpt2-124m", 1024, 32, model=MOE),
    Case("dense of equal FLOPs", "gpt2-124m", 1024, 32, model=DENSE),
]
GOAL_MIXTURE = 0.7


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmark's options."""
    parser.add_argument("--steps", type=int, default=30, help="steps of a run after its warm-up")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cases whose names begin so")
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--profile", action="store_true", help="a table of each case's kernels by time")


def run(arguments: argparse.Namespace) -> None:
    """Prints a row per case, and the mixture's speed over the dense model's."""
    if not torch.cuda.is_available():
        raise SkippedError("needs a CUDA device, found none; run it on a GPU")
    speeds: dict[str, list[float]] = {}
    stores: dict[int, Path] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for case in CASES:
            if arguments.only and not any(case.name.startswith(name) for name in arguments.only):
                continue
            try:
                speeds[case.name] = _measure(arguments, case, Path(temporary), stores)
            except (
                SystemExit
            ) as failed:  # an extra that is not there, too little memory: the others still run
                print(f"{case.name}: FAILED, {str(failed).strip().splitlines()[-1]}", flush=True)
    if {"mixture", "dense of equal FLOPs"} <= speeds.keys():
        pairs = zip(speeds["mixture"], speeds["dense of equal FLOPs"], strict=True)
        quotient = Interval.of(one / other for one, other in pairs)
        report("tokens/s of the mixture / the dense model", quotient, at_least=GOAL_MIXTURE)


def _measure(arguments: argparse.Namespace, case: Case, folder: Path, stores: dict[int, Path]) -> list[float]:
    """Run a case and report it; its thousands of tokens per second by step."""
    store = _store(arguments, case, folder, stores)
    with tempfile.TemporaryDirectory(dir=folder) as run_folder:
        options = case_options(case, store, Path(run_folder) / "run")
        options += ["--training.max_steps", str(arguments.steps + WARMUP_STEPS)]
        rows = launch(launch_command("torchrun", 1), options, Path(run_folder) / "run").rows[WARMUP_STEPS:]
        speeds = [row["perf/tokens_per_second"] / 1e3 for row in rows]
        used = [row["perf/mfu"] for row in rows if row.get("perf/mfu") is not None]
        note = f"MFU {statistics.median(used):.1%}, " if used else ""
        note += f"{rows[-1]['perf/memory_bytes'] / 2**30:.1f} GiB"
        report(
            f"{case.name}, {case.micro_batch_size} x {case.length}",
            Interval.of(speeds), unit="k tokens/s", digits=1, note=note, at_least=case.at_least,
        )  # fmt: skip
        if arguments.profile:
            _profile(case)
    return speeds


def case_options(case: Case, store: Path, folder: Path) -> list[str]:
    """The script's options for a case."""
    options = training_options(case.preset, store, folder)
    size = str(case.micro_batch_size)
    options += ["--training.micro_batch_size", size, "--training.global_batch_size", size]
    options += ["--training.sequence_length", str(case.length), "--training.precision", "bf16"]
    for section, settings in (("model", case.model), ("training", case.training)):
        for name, value in settings.items():
            options += [f"--{section}.{name}", str(value)]
    return [*options, "--logging.report", "false"]


def case_vocabulary(case: Case) -> int:
    """The preset's vocabulary size; some other where the data would say."""
    size = preset_without_data(case.preset).model.vocab_size
    assert size is not None, case.preset
    return size


def _store(arguments: argparse.Namespace, case: Case, folder: Path, stores: dict[int, Path]) -> Path:
    """Documents in the preset's vocabulary, made once for each."""
    size = case_vocabulary(case)
    if size not in stores:
        stores[size] = folder / f"store-{size}"
        make_store(stores[size], Documents.lognormal(arguments.documents, size), size)
    return stores[size]


def _profile(case: Case) -> None:
    """Print memory, speed and the kernels of a few steps, in a process of their own."""
    command: list[Any] = [sys.executable, "-m", "benchmarks.gpu_profile", case.name]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True,
        check=False,
    )  # fmt: skip
    print(done.stdout, flush=True)
    if done.returncode:
        print(f"profile: FAILED with exit code {done.returncode}", flush=True)
