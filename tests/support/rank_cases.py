"""Runs of a few connected processes, with and without a mistake put in, all in the same processes.

`run_ranks` forks the ranks, each of which leaves what it did in the cases of a plan. What the outcomes must
look like is the tests' to say.

By default three processes, because from three on the order of a sum depends on the gradient buckets; three
micro batches each, because a division by a power of two changes no bits wherever it stands.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.engines import engine_class, reset_accelerate, small_config
from support.faults import Fault
from support.fork_server import Request, fork_server, note_imports
from support.stepping import Driven, drive
from torch.nn.parallel import DistributedDataParallel

from llm_pretrain.distributed.fsdp import clear_mesh_caches
from llm_pretrain.launch.process import prepare_process

WORLD_SIZE = 3
HANG_SECONDS = 300
"""A case takes one to five seconds, many times that where other programs share the cores.

After this long a rank says where it stands and gives up."""

BASE: dict[str, dict[str, Any]] = {"training": {"global_batch_size": 18, "max_steps": 2}}


@dataclass(frozen=True)
class Case:
    """One run: which engine, what its configuration changes, its faults, whether its sums are counted."""

    launcher: str
    faults: tuple[Fault, ...] = ()
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    counted: bool = False


@dataclass
class Outcome:
    """What one rank did.

    `events`: the barriers and the end of the process group, in order, while closing. `reductions`: for each
    forward pass with gradients (the first settles the buckets), whether its backward pass reduces them.
    `sums`: the numbers of elements of all sums over ranks, in order, where the case is counted.
    `model_class`: of the model that the engine trained.
    """

    driven: Driven = field(default_factory=Driven)
    error: str | None = None
    model_class: str | None = None
    events: list[str] = field(default_factory=list)
    reductions: list[bool] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)


def case_config(store: Path, case: Case) -> Any:
    """The configuration of a case."""
    sections = BASE | {name: BASE.get(name, {}) | fields for name, fields in case.changes.items()}
    return small_config(store, **sections)


def run_ranks(
    store: Path,
    folder: Path,
    *,
    plan: str = "rank_plan",
    world_size: int = WORLD_SIZE,
    names: Collection[str] | None = None,
) -> dict[str, list[Outcome]]:
    """Run the cases of these names of a plan (default: all); returns the ranks' outcomes by case."""
    output = folder / "output"
    request = Request(
        "support.rank_cases:run_rank",
        [plan, str(store), str(folder), None if names is None else sorted(names)],
        world_size,
        launcher="torchrun",
        output=str(output),
    )
    codes = fork_server().run(request, 1200)
    assert not any(codes), (codes, output.read_text()[-4000:])
    ranks = [pickle.loads((folder / f"rank-{rank}").read_bytes()) for rank in range(world_size)]
    return {name: [outcomes[name] for outcomes in ranks] for name in ranks[0]}


def slow_but(quick: Collection[Any], names: Iterable[Any]) -> list[Any]:
    """Parameters of which those that are not `quick` are slow."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


def has_slow(request: pytest.FixtureRequest) -> bool:
    """Whether a slow test of the file that asks was chosen."""
    own = [item for item in request.session.items if item.path == request.path]
    return any(item.get_closest_marker("slow") for item in own)


def run_case(case: Case, store: Path, rendezvous: Path) -> Outcome:
    """Run one case on this rank, in a process group of its own."""
    outcome, connect = Outcome(), dist.init_process_group

    def connect_by_file(*arguments: Any, **options: Any) -> None:
        """A second group in the launcher's store would read the addresses that the first one left there."""
        options |= {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
        connect(*arguments, **options | {"init_method": f"file://{rendezvous}"})

    reset_accelerate()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "init_process_group", connect_by_file)
            _train(case, store, outcome, patch)
    except Exception as error:
        outcome.error = f"{type(error).__name__}: {error}"
    gc.collect()  # whatever the case left behind: this process is to live on
    meet(rendezvous)
    if dist.is_initialized():
        dist.destroy_process_group()
    if outcome.error:  # the engine was not closed, and the next case may have an equal mesh
        clear_mesh_caches()
    return outcome


def _train(case: Case, store: Path, outcome: Outcome, patch: pytest.MonkeyPatch) -> None:
    """Train and close, noting in which order; the group itself is left later, when nothing hangs on it."""
    wrapped: Callable[[], Any] = lambda: None  # noqa: E731
    barrier, forward = dist.barrier, DistributedDataParallel.forward

    def note_forward(self: DistributedDataParallel, *arguments: Any, **options: Any) -> Any:
        if torch.is_grad_enabled():
            outcome.reductions.append(self.require_backward_grad_sync)
        return forward(self, *arguments, **options)

    def note_barrier(*arguments: Any, **options: Any) -> None:
        outcome.events.append("barrier")
        barrier(*arguments, **options)

    def note_leaving(*_: Any, **__: Any) -> None:
        outcome.events.append("leave" if wrapped() is None else "leave with a live model")

    patch.setattr(dist, "destroy_process_group", note_leaving)
    patch.setattr(dist, "barrier", note_barrier)
    patch.setattr(DistributedDataParallel, "forward", note_forward)
    chosen = engine_class(case.launcher)
    for fault in case.faults:
        fault(patch, chosen)
    config = case_config(store, case)
    prepare_process(config)
    engine: Any = chosen(config)
    if case.counted:
        note_sums(patch, outcome.sums)
    outcome.driven = drive(engine, config)
    outcome.model_class = type(engine.model).__name__
    wrapped = weakref.ref(engine.model)
    outcome.events.clear()
    engine.close()


def note_sums(patch: pytest.MonkeyPatch, sizes: list[int]) -> None:
    """Note the number of elements of every sum over ranks; DDP's by a hook that sums in its place."""
    all_reduce, wrap = dist.all_reduce, DistributedDataParallel.__init__

    def noted(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        sizes.append(tensor.numel())
        return all_reduce(tensor, *arguments, **options)

    def reduce(world_size, bucket):  # DDP would want annotations as types, not as text
        work: Any = noted(bucket.buffer().div_(world_size), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    def wrapped(self: DistributedDataParallel, *arguments: Any, **options: Any) -> None:
        wrap(self, *arguments, **options)
        self.register_comm_hook(dist.get_world_size(), reduce)

    patch.setattr(dist, "all_reduce", noted)
    patch.setattr(DistributedDataParallel, "__init__", wrapped)


def meet(rendezvous: Path, timeout: float = HANG_SECONDS) -> None:
    """Wait until every rank is done with a case: one that failed must not leave another in mid-collective."""
    rendezvous.with_suffix(f".rank{os.environ.get('RANK', '0')}").touch()
    end = time.monotonic() + timeout
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    while len(list(rendezvous.parent.glob(f"{rendezvous.name}.rank*"))) < world_size:
        assert time.monotonic() < end, f"{rendezvous}: another rank did not finish its case"
        time.sleep(0.02)


def run_rank(plan: str, store: str, folder: str, names: list[str] | None = None) -> None:
    """Run cases of a plan (default: all) as this rank, and leave the outcomes in `folder`."""
    rank = os.environ.get("RANK", "0")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    import_module("datasets")  # `Accelerator.prepare` does
    note_imports()
    outcomes = {}
    for number, (name, case) in enumerate(import_module(f"support.{plan}").CASES.items()):
        if names is not None and name not in names:
            continue
        print(f"rank {rank}: {name}", flush=True)
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        outcomes[name] = run_case(case, Path(store), Path(folder) / f"rendezvous-{number}")
    faulthandler.cancel_dump_traceback_later()
    (Path(folder) / f"rank-{rank}").write_bytes(pickle.dumps(outcomes))
