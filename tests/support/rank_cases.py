"""Runs of three connected processes, with and without a mistake put in, all in the same three processes.

Run as `python rank_cases.py STORE FOLDER` once per rank, with RANK and WORLD_SIZE set; each rank leaves
what it did in FOLDER. What the outcomes must look like is the tests' to say.

Three processes, because from three on the order of a sum depends on the gradient buckets; three micro
batches each, because a division by a power of two changes no bits wherever it stands.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.engines import ENGINES, SCRIPTS, reset_accelerate, small_config
from support.mutation import ROOT, Edit, mutated
from support.stepping import Driven, drive

from llm_pretrain.training import prepare_process

WORLD_SIZE = 3
BASE: dict[str, dict[str, Any]] = {"training": {"global_batch_size": 18, "max_steps": 2}}


@dataclass(frozen=True)
class Case:
    """One run: which engine, what its configuration changes, which mistake it has."""

    launcher: str
    edits: tuple[Edit, ...] = ()
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass
class Outcome:
    """What one rank did. `events`: the barriers and the end of the process group, in order, while closing."""

    driven: Driven = field(default_factory=Driven)
    error: str | None = None
    events: list[str] = field(default_factory=list)


def case_config(store: Path, case: Case) -> Any:
    """The configuration of a case."""
    sections = BASE | {name: BASE.get(name, {}) | fields for name, fields in case.changes.items()}
    return small_config(store, **sections)


def run_ranks(store: Path, folder: Path, timeout: float = 240) -> dict[str, list[Outcome]]:
    """Run all cases in three processes; returns the ranks' outcomes by case."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    common = {"WORLD_SIZE": str(WORLD_SIZE), "LOCAL_WORLD_SIZE": str(WORLD_SIZE), "PYTHONPATH": path}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "OMP_NUM_THREADS": "1"}
    processes = []
    for rank in map(str, range(WORLD_SIZE)):
        environment = os.environ | common | {"RANK": rank, "LOCAL_RANK": rank, "CUDA_VISIBLE_DEVICES": ""}
        with (folder / f"output-{rank}").open("w") as output:
            command = [sys.executable, __file__, str(store), str(folder)]
            processes.append(
                subprocess.Popen(command, env=environment, cwd=folder, stdout=output, stderr=output)
            )
    try:
        codes = [process.wait(timeout) for process in processes]
    except subprocess.TimeoutExpired:
        codes = []
    finally:
        for process in processes:
            process.kill()
    outputs = [(folder / f"output-{rank}").read_text()[-2000:] for rank in range(WORLD_SIZE)]
    assert codes == [0] * WORLD_SIZE, "\n".join(outputs)
    ranks = [pickle.loads((folder / f"rank-{rank}").read_bytes()) for rank in range(WORLD_SIZE)]
    return {name: [outcomes[name] for outcomes in ranks] for name in ranks[0]}


def run_case(case: Case, store: Path, rendezvous: Path) -> Outcome:
    """Run one case on this rank, in a process group of its own."""
    outcome = Outcome()
    connect, leave, barrier = dist.init_process_group, dist.destroy_process_group, dist.barrier
    wrapped: Any = lambda: None  # noqa: E731

    def connect_by_file(*arguments: Any, **options: Any) -> None:
        options |= {"rank": int(os.environ["RANK"]), "world_size": WORLD_SIZE}
        connect(*arguments, **options | {"init_method": f"file://{rendezvous}"})

    def note_barrier(*arguments: Any, **options: Any) -> None:
        outcome.events.append("barrier")
        barrier(*arguments, **options)

    def note_leaving(*arguments: Any, **options: Any) -> None:
        outcome.events.append("leave" if wrapped() is None else "leave with a live model")
        leave(*arguments, **options)

    reset_accelerate()
    dist.init_process_group, dist.destroy_process_group = connect_by_file, note_leaving
    dist.barrier = note_barrier
    try:
        with mutated(*case.edits) as load:
            config = case_config(store, case)
            prepare_process(config)
            engine = getattr(load(SCRIPTS[case.launcher]), ENGINES[case.launcher])(config)
            outcome.driven = drive(engine, config)
            wrapped = weakref.ref(engine.model)
            outcome.events.clear()
            engine.close()
    except Exception as error:
        outcome.error = f"{type(error).__name__}: {error}"
    finally:
        dist.init_process_group, dist.destroy_process_group, dist.barrier = connect, leave, barrier
        if dist.is_initialized():
            leave()
    return outcome


def main(store: Path, folder: Path) -> None:
    from support.rank_plan import CASES

    warnings.simplefilter("ignore")
    outcomes = {}
    for number, (name, case) in enumerate(CASES.items()):
        print(name, flush=True)
        outcomes[name] = run_case(case, store, folder / f"rendezvous-{number}")
    (folder / f"rank-{os.environ['RANK']}").write_bytes(pickle.dumps(outcomes))


if __name__ == "__main__":
    torch.set_num_threads(1)
    # under its importable name, so that the tests can read what it leaves
    from support import rank_cases

    rank_cases.main(Path(sys.argv[1]), Path(sys.argv[2]))
