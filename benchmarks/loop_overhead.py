"""What the training loop adds to a step: everything besides batch, forward, backward, clipping and optimizer.

The loop that users run, `pretrain` with the torchrun engine, in turns with a bare loop that trains a copy of
the model: it assembles the same batches, without a data loader and without digests, and does the arithmetic
of the objective. One process, one thread, its CPU time; trackers are off, rows and console as configured.
The difference is taken over stretches of `logging_steps` steps, each with one row.

The model's forward pass, autograd's backward pass and the optimizer's step are the same calls on the same
shapes in both loops, and take a hundred times what is measured: their time is left out of both, so that its
noise does not drown the difference. That of whole steps is printed beside it.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

import torch
from torch.nn import Module
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.utils.data import DataLoader

import train_pretrain
from benchmarks.launching import add_store_option, token_store, training_options
from benchmarks.measuring import Interval
from benchmarks.reporting import report
from benchmarks.shared_work import Lap, Stopwatch
from llm_pretrain.config.loading import load_config
from llm_pretrain.config.tree import Config
from llm_pretrain.data.assembly import Batch
from llm_pretrain.data.loader import train_samples
from llm_pretrain.launch.process import prepare_process
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.optim.build import build_optimizer
from llm_pretrain.training.trainer import pretrain, windows

GOAL_MILLISECONDS = 0.15
GOAL_PERCENT = 1.0
WARMUP_STEPS = 10
QUICK = ["--steps", "400"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmark's options."""
    parser.add_argument("--steps", type=int, default=1000, help="steps to measure")
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
        in_bf16 = config.training.precision == "bf16"
        self.autocast = torch.autocast("cpu", torch.bfloat16) if in_bf16 else nullcontext()
        self.micro, self.whole = config.training.micro_batch_size, config.training.global_batch_size
        self.samples, self.next_sample = train_samples(config), 0

    def step(self) -> None:
        """One optimizer step."""
        first, self.next_sample = self.next_sample, self.next_sample + self.whole
        numbers = (range(each, each + self.micro) for each in range(first, first + self.whole, self.micro))
        # a digest of the samples is the loop's doing; the assembly itself is anyone's
        sha256, hashlib.sha256 = hashlib.sha256, NoHash
        micro_batches = list(self.samples.batches(numbers))
        hashlib.sha256 = sha256
        num_loss_tokens = sum(batch.num_loss_tokens for batch in micro_batches)
        for batch in micro_batches:
            with self.autocast:
                loss_sum = self.model(**batch.model_inputs()).loss_sum
            (loss_sum / num_loss_tokens).backward()
        clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class MeasuredEngine(train_pretrain.TorchrunEngine):
    """The torchrun engine, which between two steps of the loop lets the bare loop take one.

    `bare` and `loop` are laps of one step each. The loop's begins where it asks for batches and ends where it
    asks for the next ones.
    """

    def __init__(self, config: Config, stopwatch: Stopwatch):
        super().__init__(config)
        self.stopwatch = stopwatch
        self.bare: list[Lap] = []
        self.loop: list[Lap] = []

    def prepare(
        self,
        model: Decoder,
        optimizer: Optimizer,
        batches: DataLoader,
        initialize: Callable[[Decoder], None],
    ) -> Iterable[Batch]:
        own = super().prepare(model, optimizer, batches, initialize)
        copied = copy.deepcopy(model)
        bare = BareLoop(
            self.config,
            copied,
            build_optimizer(copied, self.config.optimizer, self.config.training.precision),
        )
        for shared in ((model, optimizer), (copied, bare.optimizer)):
            self.stopwatch.leave_out(*shared)
        return self._in_turns(own, bare)

    def _in_turns(self, own: Iterable[Batch], bare: BareLoop) -> Iterator[Batch]:
        """This rank's batches; a window's first one is fetched after a step of the bare loop."""
        remaining = windows(own, self.accumulation_steps)
        for _ in range(self.config.training.max_steps):
            self.stopwatch.lap()
            bare.step()
            self.bare.append(self.stopwatch.lap())
            yield from next(remaining)
            self.loop.append(self.stopwatch.lap())


def run(arguments: argparse.Namespace) -> None:
    """Prints both loops' steps and what the one adds to the other."""
    with token_store(arguments.store) as store, tempfile.TemporaryDirectory() as temporary:
        config = load_config(_options(arguments, store, Path(temporary)))
        prepare_process(config)
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), Stopwatch() as stopwatch:
            engine = MeasuredEngine(config, stopwatch)
            pretrain(config, engine)
    stretch = arguments.logging_steps
    starts = range(WARMUP_STEPS, WARMUP_STEPS + arguments.steps - stretch + 1, stretch)
    bare, loop = (
        [Lap.mean(laps[start : start + stretch]) for start in starts] for laps in (engine.bare, engine.loop)
    )
    _report(bare, loop, arguments)


def _report(bare: list[Lap], loop: list[Lap], arguments: argparse.Namespace) -> None:
    """Print the figures of the laps, each the mean of a stretch."""
    pairs = list(zip(bare, loop, strict=True))
    added = [ours.own - theirs.own for theirs, ours in pairs]
    step = 1e3 * statistics.median(lap.whole for lap in bare)
    is_small = arguments.config != "minimind-26m"
    what = f"added to a bare step of `{arguments.config}`, a row every {arguments.logging_steps} steps"
    whole = Interval.of(1e3 * (ours.whole - theirs.whole) for theirs, ours in pairs)
    note = f"{len(pairs)} stretches; whole steps of {step:.1f} ms differ by {whole.text('ms')}"
    most = GOAL_MILLISECONDS if is_small else None
    report(what, Interval.of(1e3 * each for each in added), unit="ms", at_most=most, note=note)
    share = Interval.of(100 * each / lap.whole for each, lap in zip(added, bare, strict=True))
    most = None if is_small else GOAL_PERCENT
    report(f"share of a bare step of `{arguments.config}`", share, unit="%", at_most=most)


def _options(arguments: argparse.Namespace, store: Path, folder: Path) -> list[str]:
    options = training_options(arguments.config, store, folder)
    # one step more: a step's time is known when the next one asks for its batches
    options += ["--training.max_steps", str(arguments.steps + WARMUP_STEPS + 1)]
    for name in ("micro_batch_size", "global_batch_size", "sequence_length", "precision"):
        options += [f"--training.{name}", str(getattr(arguments, name))]
    options += ["--logging.logging_steps", str(arguments.logging_steps)]
    return [*options, "--distributed.cpu_threads", "1"]
