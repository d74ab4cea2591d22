"""Runs under DDP and DeepSpeed's ZeRO, one after another in the same two connected processes.

Run as `python zero_cases.py STORE FOLDER`; it forks the ranks. Each case leaves a run's folder of its name in
FOLDER, and its error, if it had one, in `NAME-RANK.error`. What they must look like is the tests' to say.

DeepSpeed keeps its communication for as long as a process lives, so all cases share one process group.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.engines import SCRIPTS, reset_accelerate
from support.mutation import ROOT, Edit, mutated
from support.stepping import masked

import llm_pretrain.training.loop as loop
import llm_pretrain.training.pretraining as pretraining
from llm_pretrain.config import load_config
from llm_pretrain.training import prepare_process

WORLD_SIZE, STEPS, SAVED = 2, 6, 3
MASKED_STEP, DIVERGING_STEP = 1, 4
"""The step whose batches have no token that counts, and the one whose gradient is infinite, from 0."""
HANG_SECONDS = 180
"""A case takes two seconds, and many times that where other programs share the cores."""

STATE, ACCELERATE = "llm_pretrain/training/deepspeed_state.py", "train_pretrain_accelerate.py"
DIVIDED_TWICE = Edit(
    ACCELERATE,
    "self.accelerator.backward(loss)",
    "self.accelerator.backward(loss / self.accelerator.gradient_accumulation_steps)",
)
CLIPPING_LEFT_OUT = Edit(STATE, '        "gradient_clipping": training.max_grad_norm,', "       ")
OWN_NORM = Edit(
    STATE, "    zero.scaled_global_norm, zero.unscale_and_clip_grads = total_norm, clip", "    return"
)
COUNTER_LOST = Edit(STATE, '"step": torch.tensor(step, ', '"step": torch.tensor(0.0, ')


def zero(stage: int) -> tuple[str, ...]:
    """Options of a stage of ZeRO."""
    return "--distributed.strategy", "deepspeed", "--distributed.zero_stage", str(stage)


@dataclass(frozen=True)
class Case:
    """One run: what it changes of the tiny preset, whose checkpoint it goes on from, its mistakes."""

    options: tuple[str, ...] = ()
    preset: str = "tiny-dense.yaml"
    after: str | None = None
    edits: tuple[Edit, ...] = ()
    diverges: bool = False


MOE, BF16 = "tiny-moe.yaml", ("--training.precision", "bf16")
UNCLIPPED = ("--training.max_grad_norm", "0")
CASES = {
    "ddp": Case(),
    "zero1": Case(zero(1)),
    "zero2": Case(zero(2)),
    "zero3": Case(zero(3)),
    "ddp moe": Case(preset=MOE),
    "zero1 moe": Case(zero(1), MOE),
    "zero3 moe": Case(zero(3), MOE),
    "ddp unclipped": Case(UNCLIPPED),
    "zero1 unclipped": Case((*zero(1), *UNCLIPPED)),
    "zero2 unclipped": Case((*zero(2), *UNCLIPPED)),
    "zero1 resumed": Case(zero(1), after="zero1"),
    "zero3 resumed": Case(zero(3), MOE, after="zero3 moe"),
    "zero3 then ddp": Case(preset=MOE, after="zero3 moe"),
    "ddp then zero1": Case(zero(1), after="ddp"),
    "diverges": Case(zero(2), diverges=True),
    "divided twice": Case(zero(1), edits=(DIVIDED_TWICE,)),
    "clipping left out": Case((*zero(2), *UNCLIPPED), edits=(CLIPPING_LEFT_OUT,)),
    "own norm": Case(zero(1), edits=(OWN_NORM,)),
    "counter lost": Case(zero(1), after="zero1", edits=(COUNTER_LOST,)),
    "ddp bf16": Case(BF16, MOE),
    "zero1 bf16": Case((*zero(1), *BF16), MOE),
}
"""bf16 comes last: DeepSpeed's autocast, once on, leaves a mark in the process."""


def options(case: Case, store: Path, folder: Path) -> list[str]:
    return [
        *("--config", str(ROOT / "configs" / case.preset), "--data.sources", f"[{{store: {store}}}]"),
        *("--run.output_dir", str(folder), "--logging.report", "false", "--logging.logging_steps", "1"),
        *("--training.max_steps", str(STEPS), "--checkpoint.save_steps", str(SAVED)),
        *("--evaluation.eval_steps", str(STEPS), "--evaluation.max_batches", "2"),
        *(
            "--training.precision",
            "fp32",
            "--distributed.cpu_threads",
            "1",
            "--distributed.timeout_seconds",
            str(HANG_SECONDS),
        ),
        *case.options,
    ]


def run_cases(store: Path, folder: Path, timeout: float = 1200) -> None:
    """Run all cases in two processes."""
    variables = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "OMP_NUM_THREADS": "1"}
    variables |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, __file__, str(store), str(folder)],
            env=os.environ | variables,
            cwd=folder,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    assert code == 0, (folder / "output").read_text()[-4000:]


def run_case(case: Case, rank: int, store: Path, folder: Path) -> None:
    """Run one case on this rank."""
    if case.after is not None and rank == 0:
        source = folder.parent / case.after / "checkpoints" / f"step-{SAVED:08d}"
        shutil.copytree(source, folder / "checkpoints" / source.name)
    reset_accelerate()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    windows = loop.windows
    with mutated(*case.edits) as load:
        config = load_config(options(case, store, folder))
        prepare_process(config)
        engine = load(SCRIPTS["accelerate"]).AccelerateEngine(config)
        if dist.is_initialized():
            dist.barrier()  # the checkpoint to go on from is there
        if case.diverges and rank == 1:
            engine.objective = diverging(engine.objective)
        loop.windows = lambda batches, size: without_tokens(windows(batches, size))
        try:
            pretraining.pretrain(config, engine)
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


def main(store: Path, folder: Path) -> int:
    """Fork the ranks, which saves each of them the imports; 0 when both came to their end."""
    with mutated() as load:
        load(SCRIPTS["accelerate"])
    import deepspeed  # noqa: F401

    gc.collect()
    gc.freeze()  # or the collections after a case go over all imports again and again
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    os.environ |= {"WORLD_SIZE": str(WORLD_SIZE), "LOCAL_WORLD_SIZE": str(WORLD_SIZE)}
    children = []
    for rank in range(WORLD_SIZE):
        child = os.fork()
        if not child:
            run_rank(rank, store, folder)
            os._exit(0)
        children.append(child)
    return max(os.waitpid(child, 0)[1] for child in children) and 1


def run_rank(rank: int, store: Path, folder: Path) -> None:
    """Run every case as this rank."""
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


if __name__ == "__main__":
    # under its importable name, whose patches the package sees
    from support import zero_cases

    sys.exit(zero_cases.main(Path(sys.argv[1]), Path(sys.argv[2])))
