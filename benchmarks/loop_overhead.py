"""What the training loop adds to a step: everything besides forward, backward, clipping and optimizer.

The loop that users run, `pretrain` with the torchrun engine, in turns with a bare loop that trains a copy of
the model on the same batches; one process, one thread, its CPU time. Two figures: the ratio of the two steps,
and the loop's own milliseconds, measured inside the loop by subtracting its arithmetic. Batch assembly counts
as the loop's, every step writes a row and a line on the console; trackers are off.
"""

from __future__ import annotations

import argparse
import copy
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.utils.data import DataLoader

import train_pretrain
from benchmarks.launching import add_store_option, token_store, training_options
from benchmarks.measuring import Spread, goal
from llm_pretrain.config import Config, load_config
from llm_pretrain.data import Batch
from llm_pretrain.training import Judge, StepResult, prepare_process, pretrain
from llm_pretrain.training.loop import windows
from llm_pretrain.training.optimizers import build_optimizer

GOAL_SHARE = 0.01
WARMUP_STEPS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmark's options."""
    parser.add_argument("--steps", type=int, default=30, help="steps to measure")
    parser.add_argument("--config", default="minimind-26m", help="a preset of configs/")
    parser.add_argument("--micro_batch_size", type=int, default=4)
    parser.add_argument("--global_batch_size", type=int, default=4)
    parser.add_argument("--sequence_length", type=int, default=512)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    add_store_option(parser)


class BareLoop:
    """Forward, backward, clipping and optimizer of the same objective, and nothing else."""

    def __init__(self, config: Config, model: Module, optimizer: Optimizer):
        self.model, self.optimizer = model, optimizer
        self.max_norm = config.training.max_grad_norm
        self.in_bf16 = config.training.precision == "bf16"

    def step(self, micro_batches: list[Batch]) -> None:
        """One optimizer step."""
        num_loss_tokens = sum(batch.num_loss_tokens for batch in micro_batches)
        for batch in micro_batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.in_bf16):
                loss_sum = self.model(**batch.model_inputs()).loss_sum
            (loss_sum / num_loss_tokens).backward()
        clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class MeasuredEngine(train_pretrain.TorchrunEngine):
    """The torchrun engine, which between two steps of the loop lets the bare loop take one.

    All times are CPU seconds per step: `bare`, `assembly` of the batches, `loop` for the rest of the loop's
    step; `engine` and `arithmetic` are the parts of `loop` in `train_step` and in its arithmetic.
    """

    def __init__(self, config: Config):
        super().__init__(config)
        self.times: dict[str, list[float]] = {
            name: [] for name in ("bare", "assembly", "loop", "engine", "arithmetic")
        }
        self._engine_seconds = self._arithmetic_seconds = 0.0

    def prepare(self, model: Module, optimizer: Optimizer, batches: DataLoader) -> Iterable[Batch]:
        copied = copy.deepcopy(model)
        bare = BareLoop(self.config, copied, build_optimizer(copied, self.config.optimizer))
        own = super().prepare(model, optimizer, batches)
        forward, clip = self.model.forward, train_pretrain.clip_grad_norm_
        self.model.forward = self._arithmetic(forward)  # type: ignore[method-assign]
        train_pretrain.clip_grad_norm_ = self._arithmetic(clip)
        optimizer.step = self._arithmetic(optimizer.step)  # type: ignore[method-assign]
        optimizer.zero_grad = self._arithmetic(optimizer.zero_grad)  # type: ignore[method-assign]
        return self._in_turns(own, bare)

    def train_step(self, micro_batches: Any, judge: Judge) -> StepResult:
        backward, before = torch.Tensor.backward, time.process_time()
        torch.Tensor.backward = self._arithmetic(backward)  # type: ignore[method-assign]
        try:
            return super().train_step(micro_batches, judge)
        finally:
            torch.Tensor.backward = backward  # type: ignore[method-assign]
            self._engine_seconds = time.process_time() - before

    def _in_turns(self, own: Iterable[Batch], bare: BareLoop) -> Iterator[Batch]:
        """This rank's batches; a window's first one is handed over after the bare loop's step on them."""
        remaining = windows(own, self.accumulation_steps)
        while True:
            before = time.process_time()
            window = next(remaining, None)
            if window is None:
                return
            assembled = time.process_time()
            bare.step(window)
            bare_done = time.process_time()
            self._arithmetic_seconds = 0.0
            yield from window
            done = time.process_time()
            for name, seconds in (
                ("assembly", assembled - before),
                ("bare", bare_done - assembled),
                ("loop", done - bare_done),
                ("engine", self._engine_seconds),
                ("arithmetic", self._arithmetic_seconds),
            ):
                self.times[name].append(seconds)

    def _arithmetic(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            before = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._arithmetic_seconds += time.process_time() - before

        return timed


def run(arguments: argparse.Namespace) -> None:
    """Prints the ratio of the two loops' steps and where the loop's own time goes."""
    with token_store(arguments.store) as store, tempfile.TemporaryDirectory() as temporary:
        config = load_config(_options(arguments, store, Path(temporary)))
        prepare_process(config)
        engine = MeasuredEngine(config)
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            pretrain(config, engine)
    times = {name: [1e3 * each for each in values[WARMUP_STEPS:]] for name, values in engine.times.items()}
    _report(times, has_goal=arguments.config == "minimind-26m")


def _report(times: dict[str, list[float]], *, has_goal: bool) -> None:
    """Print the figures; `times` are milliseconds per step."""
    rows = [dict(zip(times, column, strict=True)) for column in zip(*times.values(), strict=True)]
    ratio = Spread.of((row["assembly"] + row["loop"]) / row["bare"] for row in rows)
    own = Spread.of(row["assembly"] + row["loop"] - row["arithmetic"] for row in rows)
    print(f"bare step                 {Spread.of(times['bare']).text('ms', 1)} over {len(rows)} pairs")
    print(f"the loop's step / bare    {ratio.text()}")
    print(f"the loop's own time       {own.text('ms', 2)}")
    print(f"  batch assembly          {Spread.of(times['assembly']).text('ms', 2)}")
    inside = Spread.of(row["engine"] - row["arithmetic"] for row in rows)
    print(f"  counts, objective, sums {inside.text('ms', 2)}")
    rest = Spread.of(row["loop"] - row["engine"] for row in rows)
    print(f"  row, console, the rest  {rest.text('ms', 2)}")
    share = own.median / statistics.median(times["bare"])
    print(f"its share of a bare step  {share:.2%}")
    if has_goal:
        print(goal(f"the loop's own time at most {GOAL_SHARE:.0%} of a step", share <= GOAL_SHARE))


def _options(arguments: argparse.Namespace, store: Path, folder: Path) -> list[str]:
    options = training_options(arguments.config, store, folder)
    # one step more: a step's time is known when the next one asks for its batches
    options += ["--training.max_steps", str(arguments.steps + WARMUP_STEPS + 1)]
    for name in ("micro_batch_size", "global_batch_size", "sequence_length", "precision"):
        options += [f"--training.{name}", str(getattr(arguments, name))]
    return [*options, "--distributed.cpu_threads", "1"]
