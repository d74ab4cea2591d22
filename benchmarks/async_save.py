"""What the training loop loses by a save that it waits for, and by one that is written in the background.

The loop that users run, `pretrain` with the torchrun engine, on a dense model of about 100M parameters in two
layers; one process, one thread of the machine's cores. Blocks of steps with no save, a synchronous
one and a background one take turns; what a save costs is its block's time less that of the block without. Two
clocks: the wall's, which other processes disturb, and the training thread's CPU time, which knows of no
waiting: not for a disk, nor for Python's lock. `in save()` is the part that the loop spends inside the call.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import train_pretrain
from benchmarks.launching import add_store_option, token_store, training_options
from benchmarks.measuring import Spread, goal
from llm_pretrain.config import load_config
from llm_pretrain.distributed.process import prepare_process
from llm_pretrain.model import count_parameters
from llm_pretrain.training import pretrain, trainer
from llm_pretrain.training.checkpointing import CheckpointManager
from llm_pretrain.training.run_state import Progress

GOAL_SHARE = 0.05
WARMUP_STEPS = 2
KINDS = ("none", "sync", "async")
SIZE = {
    "hidden_size": 1536,
    "intermediate_size": 8192,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 128,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmark's options."""
    parser.add_argument("--pairs", type=int, default=5, help="blocks of each kind")
    parser.add_argument("--steps", type=int, default=12, help="steps of a block; a background save must fit")
    parser.add_argument("--sequence_length", type=int, default=256)
    parser.add_argument("--folder", type=Path, help="where to save (default: a temporary folder)")
    add_store_option(parser)


@dataclass
class Block:
    """Seconds of a block: by the wall's clock, of the training thread, inside the save, waiting for it."""

    kind: str
    wall: float = 0.0
    thread: float = 0.0
    saving: float = 0.0
    saving_thread: float = 0.0
    waiting: float = 0.0


@dataclass
class Plan:
    """Which block follows which, and what was measured of each."""

    steps: int
    kinds: list[str]
    blocks: list[Block] = field(default_factory=list)


class PlannedSaving(CheckpointManager):
    """Saves as the plan says, at the beginning of a block, and takes the time at its end."""

    plan: Plan

    def __init__(self, config: Any, *others: Any):
        background = replace(config, checkpoint=replace(config.checkpoint, async_save=True))
        super().__init__(background, *others)
        self._synchronous = CheckpointManager(config, *others)

    def is_due(self, step: int) -> bool:
        return step >= WARMUP_STEPS and (step - WARMUP_STEPS) % self.plan.steps == 0

    def save(self, progress: Progress, *, last: bool = False) -> None:
        self._end_block()
        number = (progress.step - WARMUP_STEPS) // self.plan.steps
        if last or number >= len(self.plan.kinds):
            return
        block = Block(self.plan.kinds[number])
        self._begin = time.perf_counter(), time.thread_time()
        if block.kind != "none":
            (self._synchronous.save if block.kind == "sync" else super().save)(progress)
        block.saving, block.saving_thread = self._since()
        self.plan.blocks.append(block)

    def _end_block(self) -> None:
        if not self.plan.blocks or self.plan.blocks[-1].wall:
            return
        block, before = self.plan.blocks[-1], time.perf_counter()
        self.wait()
        block.waiting = time.perf_counter() - before
        block.wall, block.thread = self._since()

    def _since(self) -> tuple[float, float]:
        return time.perf_counter() - self._begin[0], time.thread_time() - self._begin[1]


def run(arguments: argparse.Namespace) -> None:
    """Prints what either kind of save costs the loop, and their ratio."""
    plan = Plan(arguments.steps, ["sync", "async", *KINDS * arguments.pairs])  # the first two warm up
    with token_store(arguments.store) as store, _folder(arguments.folder) as folder:
        config = load_config(_options(arguments, store, folder, plan))
        prepare_process(config)
        engine = train_pretrain.TorchrunEngine(config)
        PlannedSaving.plan = plan
        trainer.CheckpointManager = PlannedSaving  # type: ignore[misc]
        try:
            with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
                pretrain(config, engine)
        finally:
            trainer.CheckpointManager = CheckpointManager  # type: ignore[misc]
    size = count_parameters(replace(config.model, vocab_size=config.model.vocab_size or 4096)).total
    print(
        f"model                     {size / 1e6:.0f}M parameters, {arguments.pairs} rounds of 3 blocks of "
        f"{plan.steps} steps"
    )
    _report(plan.blocks[2:])


def _report(blocks: list[Block]) -> None:
    rounds = [blocks[number : number + len(KINDS)] for number in range(0, len(blocks), len(KINDS))]
    for clock in ("wall", "thread"):
        lost: dict[str, list[float]] = {"sync": [], "async": []}
        for none, sync, background in rounds:
            lost["sync"].append(getattr(sync, clock) - getattr(none, clock))
            lost["async"].append(getattr(background, clock) - getattr(none, clock))
        without = Spread.of(getattr(each[0], clock) for each in rounds)
        print(f"{clock}: a block without a save {without.text('s', 2)}")
        for kind, values in lost.items():
            print(f"  lost by {kind:5}           {Spread.of(values).text('s')}")
        share = statistics.median(lost["async"]) / statistics.median(lost["sync"])
        print(f"  async / sync            {share:.1%}")
    sync, background = ([each[place] for each in rounds] for place in (1, 2))
    saves = Spread.of(block.saving for block in sync)
    print(f"in save(), sync           {saves.text('s')}")
    print(f"in save(), async          {Spread.of(block.saving for block in background).text('s')}")
    print(f"  of that CPU             {Spread.of(block.saving_thread for block in background).text('s')}")
    print(f"waiting at the next one   {Spread.of(block.waiting for block in background).text('s')}")
    paired = statistics.median(each[2].wall - each[0].wall for each in rounds)
    print(
        goal(
            f"async loses less than {GOAL_SHARE:.0%} of a synchronous save",
            paired < GOAL_SHARE * saves.median,
        )
    )


@contextmanager
def _folder(path: Path | None) -> Iterator[Path]:
    if path is None:
        with tempfile.TemporaryDirectory() as temporary:
            yield Path(temporary)
        return
    run = path / "async_save"
    shutil.rmtree(run, ignore_errors=True)
    yield run
    shutil.rmtree(run, ignore_errors=True)


def _options(arguments: argparse.Namespace, store: Path, folder: Path, plan: Plan) -> list[str]:
    options = training_options("tiny-dense", store, folder)
    steps = WARMUP_STEPS + plan.steps * len(plan.kinds)
    options += ["--training.max_steps", str(steps + 1), "--logging.report", "false"]
    options += ["--training.sequence_length", str(arguments.sequence_length), "--training.precision", "bf16"]
    options += ["--training.micro_batch_size", "1", "--training.global_batch_size", "1"]
    options += ["--model.tie_word_embeddings", "true", "--distributed.cpu_threads", "1"]
    for name, value in SIZE.items():
        options += [f"--model.{name}", str(value)]
    return options
