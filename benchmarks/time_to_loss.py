"""Steps and time to a loss on the embedded corpus: the quickstart's recipe against AdamW at its best rate.

Both train the quickstart's model on the same tokens, one process and one thread. AdamW, initialised as usual,
gets its best peak rate on a factor-2 grid, which grows until the best has a worse neighbour on each side, and
the better of linear and cosine decay to zero, for --steps. The recipe is the preset as it stands, but for its
length: --share of AdamW's steps, its schedule as long. It reaches AdamW's loss in that share of the steps if
it ends no higher, in the mean over seeds. A step's time is measured with both optimizers in turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from benchmarks.engine_pairs import Steps
from benchmarks.launching import add_store_option, token_store
from benchmarks.measuring import Interval, interleaved, ratio
from benchmarks.reporting import report
from benchmarks.training_runs import preset_config, train
from llm_pretrain.config import resolve_model
from llm_pretrain.data import open_stores
from train_pretrain import TorchrunEngine

PRESET = "quickstart"
GOAL_STEPS = 0.6
GOAL_TIME = 0.7
FIRST_RATES = (1e-3, 2e-3, 4e-3)

QUICK = ["--quick"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmark's options."""
    parser.add_argument("--seeds", type=int, default=3, help="of the two runs that are compared")
    parser.add_argument("--steps", type=int, default=400, help="AdamW's")
    parser.add_argument("--share", type=float, default=0.5, help="of them that the recipe takes")
    parser.add_argument("--pairs", type=int, default=9, help="of steps, for their times")
    parser.add_argument("--precision", choices=["auto", "fp32", "bf16"], default="auto")
    parser.add_argument("--rate", type=float, help="AdamW's best, where it is known: no grid")
    parser.add_argument("--decay", choices=["linear", "cosine"], help="likewise")
    parser.add_argument("--quick", action="store_true", help="40 steps at one rate, one seed, without goals")
    add_store_option(parser)


class Runs:
    """Final losses of the two sides, each training run once."""

    def __init__(self, store: Path, steps: int, share: float, precision: str):
        self.store, self.steps, self.precision = store, steps, precision
        self.recipe_steps = max(2, int(steps * share))
        self._adamw: dict[tuple[float, str, int], float] = {}

    def adamw(self, rate: float, decay: str, seed: int = 0) -> float:
        """Loss after AdamW's steps."""
        key = (rate, decay, seed)
        if key not in self._adamw:
            self._adamw[key] = self._final(
                f"AdamW {rate:g} {decay}", adamw_options(rate, decay), self.steps, seed
            )
        return self._adamw[key]

    def recipe(self, seed: int) -> float:
        """Loss after the recipe's steps."""
        return self._final("the recipe", [], self.recipe_steps, seed)

    def best_rate(self, decay: str, rates: tuple[float, ...] = FIRST_RATES) -> float:
        """On a factor-2 grid that begins with `rates` and grows until the best lies inside it."""
        grid = sorted(rates)
        while True:
            best = min(grid, key=lambda rate: self.adamw(rate, decay))
            if best == grid[0]:
                grid.insert(0, best / 2)
            elif best == grid[-1]:
                grid.append(best * 2)
            else:
                return best

    def _final(self, name: str, options: list[str], steps: int, seed: int) -> float:
        result = train(PRESET, self.store, [*options, *self.run_options(steps, seed)])
        print(
            f"{name}, seed {seed}: {result.final_loss:.4f} after {steps} steps, "
            f"{result.cpu_seconds:.0f} s CPU",
            flush=True,
        )
        return result.final_loss

    def run_options(self, steps: int, seed: int) -> list[str]:
        """Length, seed and precision of a run, evaluated on the whole split before and after it."""
        options = ["--training.max_steps", str(steps), "--run.seed", str(seed), "--data.seed", str(seed)]
        options += ["--evaluation.eval_steps", str(steps), "--evaluation.max_batches", "null"]
        return [*options, "--training.precision", self.precision]


def adamw_options(rate: float, decay: str) -> list[str]:
    """Over the preset: AdamW for everything, GPT-2's initial values, a decay to zero over the whole run."""
    return [
        *("--optimizer.name", "adamw", "--optimizer.learning_rate", str(rate)),
        *("--optimizer.weight_decay", "0.1", "--optimizer.adam_beta2", "0.95", "--optimizer.ema_decay", "0"),
        *("--model.zero_init_residual", "false"),
        *("--schedule.name", decay, "--schedule.min_learning_rate", "0", "--schedule.decay_steps", "null"),
        *("--schedule.warmup_steps", "20"),
    ]


def run(arguments: argparse.Namespace) -> None:
    """Prints every training's loss, the ratios of steps and of time, and the goals."""
    steps, seeds = (40, 1) if arguments.quick else (arguments.steps, arguments.seeds)
    with token_store(arguments.store) as store:
        runs = Runs(store, steps, arguments.share, arguments.precision)
        decay = arguments.decay or "linear"
        rate = arguments.rate or (2e-3 if arguments.quick else runs.best_rate(decay))
        if not arguments.decay and not arguments.quick:
            decay = min(("linear", "cosine"), key=lambda name: runs.adamw(rate, name))
        losses = [(runs.adamw(rate, decay, seed), runs.recipe(seed)) for seed in range(seeds)]
        steps_ratio = runs.recipe_steps / steps
        times = step_times(runs, adamw_options(rate, decay), arguments.pairs)
    adamw, recipe = (statistics.fmean(side) for side in zip(*losses, strict=True))
    has_goals, reached = not arguments.quick, recipe <= adamw
    report(f"AdamW's loss after {steps} steps, {rate:g}, {decay}, mean of {seeds}", f"{adamw:.4f}")
    report(
        f"the recipe's loss after {runs.recipe_steps} steps",
        f"{recipe:.4f}: steps to AdamW's loss {'≤' if reached else '>'} {steps_ratio:.3f} of AdamW's",
        bound=f"≤ {GOAL_STEPS} of the steps" if has_goals else "",
        met=not has_goals or (reached and steps_ratio <= GOAL_STEPS),
    )
    per_step = ratio(times["recipe"], times["adamw"])
    report("a step of the recipe / of AdamW", per_step)
    whole = Interval.of(steps_ratio * r / a for r, a in zip(times["recipe"], times["adamw"], strict=True))
    if has_goals and reached:
        report("the recipe's time to AdamW's loss / AdamW's", whole, at_most=GOAL_TIME)
    else:
        report("time of the recipe's steps / AdamW's", whole)


def step_times(runs: Runs, adamw: list[str], pairs: int) -> dict[str, list[float]]:
    """CPU seconds of a step of both sides, in turns, on the same batches."""
    with tempfile.TemporaryDirectory() as temporary:
        sides = {}
        for name, own in (("adamw", adamw), ("recipe", [])):
            options = [*own, *runs.run_options(runs.steps, 0)]
            config = preset_config(PRESET, runs.store, Path(temporary) / name, options)
            config = resolve_model(config, open_stores(config)[0].vocab_size)
            sides[name] = Steps(config, TorchrunEngine(config))
        return interleaved({name: side.step for name, side in sides.items()}, pairs)
