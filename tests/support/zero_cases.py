"""Runs under DDP and DeepSpeed's ZeRO, one after another in the same two connected processes.

`run_cases` forks a process that imports DeepSpeed and forks the ranks. Each case leaves a run's folder of its
name, and its error, if it had one, in `NAME-RANK.error`. What they must look like is the tests' to say.

DeepSpeed keeps its communication for as long as a process lives, so all cases share one process group.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.engines import engine_class, reset_accelerate
from support.faults import Fault, Patch, after, replacing
from support.fork_server import Request, fork_server, free_port
from support.launching import run_options
from support.stepping import masked

import llm_pretrain.training.trainer as loop
from llm_pretrain.config.loading import load_config
from llm_pretrain.distributed import deepspeed
from llm_pretrain.launch.process import prepare_process

WORLD_SIZE, STEPS, SAVED = 2, 6, 3
MASKED_STEP, DIVERGING_STEP = 1, 4
"""The step whose batches have no token that counts, and the one whose gradient is infinite, from 0."""
HANG_SECONDS = 180
"""A case takes two seconds, and many times that where other programs share the cores."""


def _divided_twice(self: Any, config: Any) -> None:
    backward = self.accelerator.backward
    self.accelerator.backward = lambda loss: backward(loss / self.accelerator.gradient_accumulation_steps)


DIVIDED_TWICE = after("__init__", _divided_twice)
OWN_NORM = replacing(deepspeed.clip_as_torch, lambda *_: None)


def zero(stage: int) -> tuple[str, ...]:
    """Options of a stage of ZeRO."""
    return "--distributed.strategy", "deepspeed", "--distributed.zero_stage", str(stage)


@dataclass(frozen=True)
class Case:
    """One run: what it changes of the tiny preset, whose checkpoint it goes on from, its mistakes."""

    options: tuple[str, ...] = ()
    preset: str = "tiny-dense"
    after: str | None = None
    faults: tuple[Fault, ...] = ()
    diverges: bool = False


MOE, BF16 = "tiny-moe", ("--training.precision", "bf16")
CASES = {
    "ddp": Case(),
    "zero1": Case(zero(1)),
    "zero2": Case(zero(2)),
    "zero3": Case(zero(3)),
    "ddp moe": Case(preset=MOE),
    "zero3 moe": Case(zero(3), MOE),
    "zero1 resumed": Case(zero(1), after="zero1"),
    "zero3 resumed": Case(zero(3), MOE, after="zero3 moe"),
    "zero3 then ddp": Case(preset=MOE, after="zero3 moe"),
    "ddp then zero1": Case(zero(1), after="ddp"),
    "diverges": Case(zero(2), diverges=True),
    "divided twice": Case(zero(1), faults=(DIVIDED_TWICE,)),
    "own norm": Case(zero(1), faults=(OWN_NORM,)),
    "ddp bf16": Case(BF16, MOE),
    "zero1 bf16": Case((*zero(1), *BF16), MOE),
}
"""bf16 comes last: DeepSpeed's autocast, once on, leaves a mark in the process."""


def options(case: Case, store: Path, folder: Path) -> list[str]:
    return run_options(
        case.preset,
        store,
        f"training.max_steps={STEPS} checkpoint.save_steps={SAVED} evaluation.eval_steps={STEPS} "
        f"evaluation.max_batches=2 distributed.timeout_seconds={HANG_SECONDS} logging.report=false",
        *case.options,
        folder=folder,
    )


def run_cases(store: Path, folder: Path) -> None:
    """Run all cases in two processes."""
    output = folder / "output"
    request = Request(
        "support.zero_cases:fork_ranks",
        [str(store), str(folder)],
        variables={"DS_ACCELERATOR": "cpu"},
        output=str(output),
        folder=str(folder),
    )
    assert fork_server().run(request, 1200) == [0], output.read_text()[-4000:]


def run_case(case: Case, rank: int, store: Path, folder: Path) -> None:
    """Run one case on this rank."""
    if case.after is not None and rank == 0:
        source = folder.parent / case.after / "checkpoints" / f"step-{SAVED:08d}"
        shutil.copytree(source, folder / "checkpoints" / source.name)
    reset_accelerate()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    windows = loop.windows
    chosen = engine_class("accelerate")
    with Patch.context() as patch:
        for fault in case.faults:
            fault(patch, chosen)
        config = load_config(options(case, store, folder))
        prepare_process(config)
        engine: Any = chosen(config)
        if dist.is_initialized():
            dist.barrier()  # the checkpoint to go on from is there
        if case.diverges and rank == 1:
            engine.objective = diverging(engine.objective)
        loop.windows = lambda batches, size: without_tokens(windows(batches, size))
        try:
            loop.pretrain(config, engine)
        except Exception as error:
            folder.with_name(f"{folder.name}-{rank}.error").write_text(f"{type(error).__name__}: {error}")
            engine.accelerator.free_memory()
        finally:
            loop.windows = windows
    gc.collect()


def without_tokens(windows: Iterator[list[Any]]) -> Iterator[list[Any]]:
    """One step in which no token counts."""
    for window in windows:
        yield [masked(batch) for batch in window] if window[0].step == MASKED_STEP else window


def diverging(objective: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The objective, infinite once: steps have three micro batches, and one step runs none."""
    calls = iter(range(10**6))
    return lambda *a: objective(*a) * (torch.inf if next(calls) == 3 * (DIVERGING_STEP - 1) + 1 else 1.0)


def fork_ranks(store: str, folder: str) -> int:
    """Import DeepSpeed once and fork the ranks; 0 when both came to their end."""
    import_module("deepspeed")
    gc.collect()
    gc.freeze()  # or the collections after a case go over all imports again and again
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ |= {"WORLD_SIZE": str(WORLD_SIZE), "LOCAL_WORLD_SIZE": str(WORLD_SIZE)}
    children = []
    for rank in range(WORLD_SIZE):
        child = os.fork()
        if not child:
            run_rank(rank, Path(store), Path(folder))
            os._exit(0)
        children.append(child)
    return int(any(os.waitpid(child, 0)[1] for child in children))


def run_rank(rank: int, store: Path, folder: Path) -> None:
    """Run the cases as this rank."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    for category in (UserWarning, FutureWarning):  # what a user would see
        warnings.simplefilter("error", category)
    dist.destroy_process_group = lambda *_: None
    for name, case in CASES.items():
        print(f"rank {rank}: {name} {time.perf_counter():.1f}", flush=True)
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        run_case(case, rank, store, folder / name)
    faulthandler.cancel_dump_traceback_later()
