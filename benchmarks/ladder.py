"""A ladder's prediction against runs: of a plan for several times its largest run's compute, by seeds.

The commands are those of users: `ladder`, `plan`, and `train` for each seed, as many side by side as there
are cores. A folder that is given keeps everything, and the same command continues it. With the defaults two
cores need two hours.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.launching import add_store_option, token_store
from benchmarks.machine import ROOT, python_path
from benchmarks.reporting import SkippedError, report
from llm_pretrain.__main__ import main
from llm_pretrain.config.loading import load_config
from llm_pretrain.config.tree import PredictedLoss
from llm_pretrain.forecast.measurements import read_ladder, read_progress
from llm_pretrain.launch.jobs import this_machine
from llm_pretrain.runs.rows import read_metrics
from llm_pretrain.text import duration

BUDGET = "1.42e14"
"""Of the default ladder: 15 minutes of two fast cores, 26 of slow ones, and the same runs on both."""
GOALS = {8.0: 1.5, 30.0: 3.0}
"""Largest error in % up to so many times the compute."""
QUIET = ["--logging.wandb_mode", "disabled", "--checkpoint.keep_best", "false"]
QUIET += ["--distributed.cpu_threads", "1"]

QUICK = ["--quick"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmark's options."""
    add_store_option(parser)
    parser.add_argument("--budget", default=BUDGET, help=f"of the ladder (default: {BUDGET} FLOPs)")
    parser.add_argument("--times", type=float, default=8.0, help="compute of the run, in the largest rung's")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="keep everything there (default: a temporary one)")
    parser.add_argument("--quick", action="store_true", help="skip: no ladder is quick")
    parser.add_argument("options", nargs="*", help="of the ladder, after --: -- --config minimind-26m")


def run(arguments: argparse.Namespace) -> None:
    """Prints the ladder's time, and each seed's last loss beside the prediction."""
    if arguments.quick:
        raise SkippedError("takes two hours of two cores; run it without --quick")
    with tempfile.TemporaryDirectory() as temporary, token_store(arguments.store) as store:
        folder = (arguments.folder or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        _call("ladder", "--input", store, "--budget", arguments.budget, "--output", folder / "ladder",
              *arguments.options)  # fmt: skip
        report(f"a ladder of {arguments.budget}, wall time", duration(time.monotonic() - started))
        largest = max(point.flops for point in read_ladder(folder / "ladder").points)
        plan = folder / "plan.yaml"
        _call("plan", "--ladder", folder / "ladder", "--flops", arguments.times * largest,
              "--world-size", 1, "--output", plan)  # fmt: skip
        with ThreadPoolExecutor(this_machine().cores) as pool:
            losses = list(pool.map(lambda seed: _train(plan, folder, seed), range(arguments.seeds)))
        _report(load_config(["--config", str(plan)]).evaluation.prediction[-1], losses, arguments.times)


def _call(*words: object) -> None:
    """A command in this process; raises SystemExit with its code where it fails."""
    if code := main([str(word) for word in words]):
        raise SystemExit(code)


def _train(plan: Path, folder: Path, seed: int) -> float:
    """Last evaluation loss of the planned run with a seed, continued or already trained."""
    own = folder / f"seed-{seed}"
    if read_progress(own).status.get("state") != "finished":
        options = ["--config", str(plan), "--run.output_dir", str(own), *QUIET]
        options += ["--run.seed", str(seed), "--data.seed", str(seed)]
        with (folder / f"seed-{seed}.log").open("ab") as log:
            subprocess.run(
                [sys.executable, "-m", "llm_pretrain", "train", "--nproc", "1", *options],
                cwd=ROOT, env=os.environ | {"PYTHONPATH": python_path()}, stdout=log, stderr=log, check=True,
            )  # fmt: skip
    return read_metrics(own / "metrics.jsonl")[-1]["eval/loss"]


def _report(predicted: PredictedLoss, losses: list[float], times: float) -> None:
    errors = [100 * (predicted.loss / loss - 1) for loss in losses]
    most = next((goal for reach, goal in GOALS.items() if times <= reach), None)
    report(
        f"loss at {times:g} times the compute, predicted {predicted.loss:.4f} "
        f"({predicted.low:.4f} to {predicted.high:.4f})",
        ", ".join(f"{loss:.4f}" for loss in losses),
        note="the prediction is " + ", ".join(f"{error:+.1f} %" for error in errors) + " off",
        bound=f"≤ {most} % each" if most else "",
        met=most is None or max(map(abs, errors)) <= most,
    )
    inside = sum(predicted.low <= loss <= predicted.high for loss in losses)
    report("runs inside the interval", f"{inside} of {len(losses)}")
