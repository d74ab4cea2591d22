"""Starts the two scripts as users do and times them from outside; also finds or makes the data they need."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.machine import ROOT, python_path
from llm_pretrain.config.loading import load_config, resolve_model
from llm_pretrain.config.tree import Config
from llm_pretrain.runs.rows import read_metrics

SCRIPTS = {"torchrun": "train_pretrain.py", "accelerate": "train_pretrain_accelerate.py"}
VOCAB_SIZE = 4096
DEFAULT_STORE = ROOT / "data" / "stores" / "stdlib"
NO_EXTRAS = ["--evaluation.eval_steps", "0", "--checkpoint.save_steps", "0", "--logging.logging_steps", "1"]
NO_EXTRAS += ["--logging.wandb_mode", "disabled", "--schedule.warmup_steps", "0"]
"""Options that leave the steps alone to be measured; a run still saves at its end."""


@dataclass(frozen=True)
class Launched:
    """One run of a script, seen from outside.

    Args:
        rows: Its metrics.jsonl.
        first_step_seconds: From starting the process to the console's line of its first step.
        first_step_cpu_seconds: CPU time of the process (not of its children) at that moment.
    """

    rows: list[dict[str, Any]]
    first_step_seconds: float
    first_step_cpu_seconds: float


def add_store_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--store`."""
    parser.add_argument(
        "--store", type=Path, help="token store (default: data/stores/stdlib, or one made on the spot)"
    )


@contextmanager
def token_store(path: Path | None) -> Iterator[Path]:
    """The store at `path`, or the default one, or a temporary one of the standard library's text."""
    if path or (DEFAULT_STORE / "store.json").exists():
        yield (path or DEFAULT_STORE).resolve()
        return
    with tempfile.TemporaryDirectory() as temporary:
        tokenizer, store = f"{temporary}/tokenizer", f"{temporary}/store"
        command = [sys.executable, "-m", "llm_pretrain"]
        _check(
            [*command, "tokenizer", "--input=stdlib", f"--vocab_size={VOCAB_SIZE}", f"--output={tokenizer}"]
        )
        _check([*command, "prepare", "--input=stdlib", f"--tokenizer={tokenizer}", f"--output={store}"])
        yield Path(store)


def preset_without_data(name: str) -> Config:
    """A preset of configs/ for what needs no data; VOCAB_SIZE where the data would say."""
    config = load_config(["--config", str(ROOT / "configs" / f"{name}.yaml")], needs_data=False)
    return resolve_model(config, config.model.vocab_size or VOCAB_SIZE)


def training_options(config: str, store: Path, folder: Path) -> list[str]:
    """Options of a script: a preset of configs/, this store, this run folder, nothing but steps."""
    source = f'[{{"store": "{store}"}}]'
    preset = str(ROOT / "configs" / f"{config}.yaml")
    return ["--config", preset, "--data.sources", source, "--run.output_dir", str(folder), *NO_EXTRAS]


def launch_command(launcher: str, world_size: int, *, on_gpu: bool = False) -> list[str]:
    """Command up to the script's options."""
    script = str(ROOT / SCRIPTS[launcher])
    if launcher == "torchrun":
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
        return [sys.executable, script] if world_size == 1 else [*run, str(world_size), script]
    run = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(world_size)]
    if world_size == 1:
        return [*run, *([] if on_gpu else ["--cpu"]), script]
    config = str(ROOT / "configs" / "accelerate" / "cpu2.yaml")
    return [*run, "--config_file", config, "--main_process_port", "0", script]


def environment() -> dict[str, str]:
    """This process's environment, without what a launcher would take for its own."""
    drop = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in drop and not name.startswith(("ACCELERATE_", "TORCHELASTIC_"))
    }
    return kept | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def launch(
    command: list[str], options: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None
) -> Launched:
    """Run a script to its end, with `variables` added to the environment.

    Raises:
        SystemExit: it failed; its output is shown.
    """
    started, output, first = time.perf_counter(), [], None
    process = subprocess.Popen(
        [*command, *options],
        cwd=ROOT,
        env=environment() | dict(variables or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if first is None and line.startswith("step "):
            times = psutil.Process(process.pid).cpu_times()
            first = (time.perf_counter() - started, times.user + times.system)
        output.append(line)
    if process.wait() or first is None:
        raise SystemExit(f"{' '.join(command)} left with exit code {process.returncode}:\n{''.join(output)}")
    return Launched(read_metrics(folder / "metrics.jsonl"), *first)


def _check(command: list[str]) -> None:
    """Run a command of ours quietly; show its output if it fails."""
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
