"""What the training loop adds to a step: everything besides batch, forward, backward, clipping and optimizer.

The loop that users run, `pretrain` with the torchrun engine, in turns with a bare loop that trains a copy of
the model: it assembles the same batches, without a data loader and without digests, and does the arithmetic
of the objective. One process, one thread, its CPU time; trackers are off, rows and console as configured.
The difference is taken over stretches of `logging_steps` steps, each with one row.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from pathlib import Path

import torch
from torch.nn import Module
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.utils.data import DataLoader

import train_pretrain
from benchmarks.launching import add_store_option, token_store, training_options
from benchmarks.measuring import Interval, goal
from llm_pretrain.config import Config, load_config
from llm_pretrain.data import Batch, train_samples
from llm_pretrain.model import Decoder
from llm_pretrain.training import prepare_process, pretrain
from llm_pretrain.training.loop import windows
from llm_pretrain.training.optimizers import build_optimizer

GOAL_MILLISECONDS = 0.15
GOAL_SHARE = 0.01
WARMUP_STEPS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmark's options."""
    parser.add_argument("--steps", type=int, default=400, help="steps to measure")
    parser.add_argument("--config", default="tiny-dense", help="a preset of configs/")
    parser.add_argument("--micro_batch_size", type=int, default=4)
    parser.add_argument("--global_batch_size", type=int, default=4)
    parser.add_argument("--sequence_length", type=int, default=64)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--logging_steps", type=int, default=10, help="steps per row; the default of a run")
    add_store_option(parser)


class NoHash:
    """Stands where SHA-256 does, and hashes nothing."""

    def __init__(self, *_: object):
        pass

    def update(self, *_: object) -> None:
        """Takes bytes."""

    def digest(self) -> bytes:
        """Nothing, as long as a SHA-256."""
        return bytes(32)


class BareLoop:
    """Batch, forward, backward, clipping and optimizer of the same objective, and nothing else."""

    def __init__(self, config: Config, model: Module, optimizer: Optimizer):
        self.model, self.optimizer = model, optimizer
        self.max_norm = config.training.max_grad_norm
        self.in_bf16 = config.training.precision == "bf16"
        self.micro, self.whole = config.training.micro_batch_size, config.training.global_batch_size
        self.samples, self.next_sample = train_samples(config), 0

    def step(self) -> None:
        """One optimizer step."""
        first, self.next_sample = self.next_sample, self.next_sample + self.whole
        numbers = (range(each, each + self.micro) for each in range(first, first + self.whole, self.micro))
        # a digest of the samples is the loop's doing; the assembly itself is anyone's
        sha256, hashlib.sha256 = hashlib.sha256, NoHash
        micro_batches = [self.samples.__getitems__(each) for each in numbers]
        hashlib.sha256 = sha256
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

    `bare` and `loop` are CPU seconds per step. The loop's begins where it asks for batches and ends where it
    asks for the next ones.
    """

    def __init__(self, config: Config):
        super().__init__(config)
        self.bare: list[float] = []
        self.loop: list[float] = []

    def prepare(self, model: Module, optimizer: Optimizer, batches: DataLoader) -> Iterable[Batch]:
        assert isinstance(model, Decoder)
        copied = copy.deepcopy(model)
        bare = BareLoop(self.config, copied, build_optimizer(copied, self.config.optimizer))
        return self._in_turns(super().prepare(model, optimizer, batches), bare)

    def _in_turns(self, own: Iterable[Batch], bare: BareLoop) -> Iterator[Batch]:
        """This rank's batches; a window's first one is fetched after a step of the bare loop."""
        remaining = windows(own, self.accumulation_steps)
        for _ in range(self.config.training.max_steps):
            before = time.process_time()
            bare.step()
            bare_done = time.process_time()
            yield from next(remaining)
            self.loop.append(time.process_time() - bare_done)
            self.bare.append(bare_done - before)


def run(arguments: argparse.Namespace) -> None:
    """Prints both loops' steps and what the one adds to the other."""
    with token_store(arguments.store) as store, tempfile.TemporaryDirectory() as temporary:
        config = load_config(_options(arguments, store, Path(temporary)))
        prepare_process(config)
        engine = MeasuredEngine(config)
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            pretrain(config, engine)
    first, stretch = WARMUP_STEPS, arguments.logging_steps
    starts = range(first, first + arguments.steps - stretch + 1, stretch)
    bare, loop = (
        [1e3 * statistics.fmean(times[start : start + stretch]) for start in starts]
        for times in (engine.bare, engine.loop)
    )
    _report(bare, loop, arguments)


def _report(bare: list[float], loop: list[float], arguments: argparse.Namespace) -> None:
    """Print the figures; the times are milliseconds per step, by stretches."""
    pairs = list(zip(bare, loop, strict=True))
    added = Interval.of(ours - theirs for theirs, ours in pairs)
    share = Interval.of(ours / theirs - 1 for theirs, ours in pairs)
    stretches = f"{len(pairs)} x {arguments.logging_steps} steps"
    print(f"bare step            {statistics.median(bare):.3f} ms, {stretches}")
    print(f"added by the loop    {added.text('ms')}")
    print(f"share of a bare step {share.median:.2%} ({share.low:.2%} to {share.high:.2%})")
    if arguments.config == "minimind-26m":
        print(goal(f"at most {GOAL_SHARE:.0%} of a step", share.high <= GOAL_SHARE))
    else:
        print(goal(f"at most {GOAL_MILLISECONDS} ms", added.high <= GOAL_MILLISECONDS))


def _options(arguments: argparse.Namespace, store: Path, folder: Path) -> list[str]:
    options = training_options(arguments.config, store, folder)
    # one step more: a step's time is known when the next one asks for its batches
    options += ["--training.max_steps", str(arguments.steps + WARMUP_STEPS + 1)]
    for name in ("micro_batch_size", "global_batch_size", "sequence_length", "precision"):
        options += [f"--training.{name}", str(getattr(arguments, name))]
    options += ["--logging.logging_steps", str(arguments.logging_steps)]
    return [*options, "--distributed.cpu_threads", "1"]
