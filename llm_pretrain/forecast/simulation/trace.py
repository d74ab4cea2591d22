"""Traces one training step of one rank: executes the run's own code, on fake or on real tensors.

Assumptions: the router spreads tokens evenly over the experts, and layers are not compiled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from llm_pretrain.config.tree import Config
from llm_pretrain.data.assembly import Batch, padded_offsets
from llm_pretrain.distributed.fsdp import clear_mesh_caches
from llm_pretrain.distributed.initial_values import materialize
from llm_pretrain.forecast.simulation.patches import (
    even_router,
    outside_a_run,
    telling_micro_batches,
    telling_reductions,
    tracked,
    without_values,
)
from llm_pretrain.forecast.simulation.tracker import GRADIENTS, OPTIMIZER, PARAMETERS, Collective, Tracker
from llm_pretrain.memory import DOCUMENT_LENGTH
from llm_pretrain.optim.build import build_optimizer
from llm_pretrain.training.decision import Decision
from llm_pretrain.training.engine import own_part
from llm_pretrain.training.model_setup import build_model
from llm_pretrain.training.progress import Progress
from llm_pretrain.training.step import Step
from train_pretrain import TorchrunEngine

_CACHED = (
    "llm_pretrain.model.attention.rotary_frequencies",
    "llm_pretrain.model.kernels.attention._future",
)
"""Functions whose caches keep tensors."""


@dataclass
class Trace:
    """What a rank does in its second step, in which the optimizer's state exists.

    Args:
        peak: Most bytes at once.
        held: Bytes of each kind of tensor at the peak, largest first.
        highest: Most bytes at once in each part of the step; see `Tracker.highest`.
        collectives: In order; of micro batches that do equal work, only one is traced.
        alike: Number of the micro batch that stands for others: the first or, in a pipeline, a middle one.
        repeats: Number of micro batches for which the micro batch `alike` stands.
        padding: The most padded parameter; None if no parameter is padded.
        idle: Time that a rank of a pipeline waits, in times of one micro batch; see `idle_time`.
    """

    peak: int
    held: dict[str, int]
    highest: dict[str, int]
    collectives: list[Collective]
    alike: int
    repeats: int
    padding: Padding | None
    idle: float


@dataclass
class Padding:
    """A parameter whose rows do not divide evenly over the ranks.

    Args:
        name: Its name in the model.
        rows: Size of the sharded dimension.
        ranks: Number of ranks that share the rows.
        factor: Elements of the whole model with padding ÷ elements without padding.
    """

    name: str
    rows: int
    ranks: int
    factor: float


def traced_step(
    config: Config, device: torch.device, *, real: TorchDispatchMode | None = None, observe: Any = None
) -> Trace:
    """Run a step in the process group that exists.

    Args:
        config: Resolved, with `model.vocab_size`.
        device: The CPU or the simulated GPU.
        real: Mode under which to compute with values, on a CPU; None: compute without values.
        observe: See `Tracker`.
    """
    tracker = Tracker(device.type, observe)
    if observe is not None:
        observe.tracker = tracker
    with ExitStack() as stack:
        for function in map(resolve_name, _CACHED):
            function.cache_clear()
            stack.callback(function.cache_clear)  # no fake tensor may stay in a cache
        stack.enter_context(outside_a_run())
        stack.enter_context(even_router(real=real is not None))
        if real is None:
            stack.enter_context(without_values())
        engine = (_WithoutValues if real is None else TorchrunEngine)(config, device)
        stack.enter_context(real or FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(tracked(tracker))
        decide = _prepared(engine, config, real=real is not None)
        model, optimizer = engine.model_and_optimizer()
        padding = _padding(model)
        _make_state(optimizer)
        tracker.name(PARAMETERS, model.parameters())
        states = [each for state in optimizer.state.values() for each in state.values()]
        tracker.name(OPTIMIZER, [each for each in states if isinstance(each, Tensor)])
        _tell_phases(engine, tracker)
        stack.enter_context(telling_reductions(tracker))
        if engine.pipeline is not None:
            stack.enter_context(telling_micro_batches(tracker, engine.accumulation_steps))
        batches = [micro_batch(config, device, index) for index in range(engine.accumulation_steps)]
        batches = [replace(own_part(each, engine.place), digest=each.digest) for each in batches]  # real
        tracker.begin_step()
        traced = batches[:1] + batches[1:][-1:]  # all but the last do equal work
        if engine.pipeline is not None:
            traced = batches[: _steady(config, len(batches))]
        alike = 0 if engine.pipeline is None else len(traced) // 2
        engine.train_step(Step.begin(traced, engine, decide))
        idle = 0.0 if engine.pipeline is None else idle_time(engine.pipeline._schedule)
        peak, held = tracker.peak()
        highest = tracker.highest(config.model.num_hidden_layers)
        collectives = list(tracker.collectives)
    clear_mesh_caches()
    repeats = max(1, len(batches) - len(traced) + 1)
    return Trace(peak, held, highest, collectives, alike, repeats, padding, idle)


def _steady(config: Config, micro_batches: int) -> int:
    """Number of micro batches to trace in a pipeline; the middle one stands for those that are left out.

    Only `1f1b` may leave out some: `gpipe` keeps all activations, and other schedules all that they send.
    """
    distributed = config.distributed
    return (
        min(micro_batches, 2 * distributed.pp_size + 1)
        if distributed.pp_schedule == "1f1b"
        else micro_batches
    )


class _WithoutValues(TorchrunEngine):
    """The torchrun script's engine; it sums integers on real tensors, not on fake ones."""

    def sum_integers(self, values: Sequence[int]) -> list[int]:
        with unset_fake_temporarily():
            total = super().sum_integers(values)
        return [max(1, each) for each in total]  # a rank without loss tokens of its own trains too


def _prepared(engine: Any, config: Config, *, real: bool) -> Callable[[Step], bool]:
    """Prepare the engine as a run does, without initial values and data; returns its decision function."""
    is_meta = engine.is_sharded  # unsharded fake parameters cannot change their device
    with torch.device("meta") if is_meta else engine.device:
        model = build_model(config, engine.device)

    def initialize(model: Any) -> None:
        if is_meta:
            materialize(model, engine.device)

    optimizer = build_optimizer(model, config.optimizer, config.training.precision)
    engine.prepare(model, optimizer, [], initialize)
    decision = Decision(config, engine, Progress(step=1))
    if real or decision.stays_on_device:
        return decision

    def decide(step: Step) -> bool:  # `Decision` would read values
        step.numbers()
        return True

    return decide


def _padding(model: Any) -> Padding | None:
    """The parameter with most padding; None if no parameter is padded."""
    total, padded = 0, 0.0
    most, worst = 0.0, ("", 0, 0)
    for name, parameter in model.named_parameters():
        ranks: dict[int, int] = {}
        if isinstance(parameter, DTensor):
            for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
                if (dim := getattr(placement, "dim", None)) is not None:
                    ranks[dim] = ranks.get(dim, 1) * size
        factor = 1.0
        for dim, count in ranks.items():
            rows = parameter.shape[dim]
            factor *= -(-rows // count) * count / rows
            if (added := parameter.numel() * (factor - 1)) > most:
                most, worst = added, (name, rows, count)
        total += parameter.numel()
        padded += parameter.numel() * factor
    return Padding(*worst, padded / total) if most else None


def _make_state(optimizer: Any) -> None:
    """Create the optimizer's state by a first step with zero gradients."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _tell_phases(engine: Any, tracker: Tracker) -> None:
    """Make the engine tell the tracker when a forward pass, a backward pass or the update begins."""
    forward, objective, clip = engine.forward, engine.objective, engine.clip_grad_norm

    def run_forward(batch: Batch) -> Any:
        tracker.enter("forward", batch.micro_batch)
        return forward(batch)

    def run_objective(*arguments: Any) -> Tensor:
        found = objective(*arguments)
        tracker.enter("backward", tracker.micro_batch)
        return found

    def run_clip(parameters: Any, max_norm: float) -> Any:
        tracker.enter("update", tracker.micro_batch)
        tracker.name(GRADIENTS, [each.grad for each in parameters if each.grad is not None])
        return clip(parameters, max_norm)

    engine.forward, engine.objective, engine.clip_grad_norm = run_forward, run_objective, run_clip


def micro_batch(config: Config, device: torch.device, index: int) -> Batch:
    """A packed micro batch; on a CPU its documents are whole rows."""
    rows, length = config.training.micro_batch_size, config.training.sequence_length
    names = ("input_ids", "position_ids", "document_ids", "labels")
    whole: dict[str, Any] = {
        name: torch.zeros((rows, length), dtype=torch.int64, device=device) for name in names
    }
    offsets = None
    if device.type != "cpu":
        with unset_fake_temporarily():
            size = min(DOCUMENT_LENGTH if config.data.isolate_documents else length, length)
            count = len(padded_offsets(np.arange(0, rows * length, size), rows * length))
        offsets = torch.zeros(count, dtype=torch.int32, device=device)
    with unset_fake_temporarily():
        digest = torch.zeros(8, dtype=torch.int64)
    return Batch(
        **whole,
        loss_mask=torch.ones((rows, length), dtype=torch.bool, device=device),
        num_loss_tokens=rows * length,
        step=1,
        micro_batch=index,
        digest=digest,
        document_offsets=offsets,
    )


def idle_time(schedule: Any) -> float:
    """Time that a rank of a pipeline waits for others in a step, in times of one micro batch on a rank.

    All stages take equal time: one unit forward and two backward. Some schedules split the backward pass
    into gradients of inputs and gradients of parameters (one unit each). An action starts when its rank is
    free and its inputs are computed. A stage computes the micro batches in their order.

    Args:
        schedule: A schedule of torch; its `pipeline_order` has the actions of every rank, None for a wait.
            Numbers of micro batches are not read, since in `1f1b` those of the last rank begin with 1.
    """
    actions = {
        rank: [
            (each.stage_index, each.computation_type.value) for each in order if each and each.is_compute_op
        ]
        for rank, order in schedule.pipeline_order.items()
    }
    last = max(stage for order in actions.values() for stage, _ in order)
    busy = sum(_UNITS[kind] for _, kind in actions[0])
    free = dict.fromkeys(actions, 0.0)
    ended: dict[tuple[bool, int], list[float]] = defaultdict(list)
    """(is forward, stage) -> end of each micro batch; backward counts up to the gradients of inputs."""
    is_stuck = False
    while any(actions.values()):
        assert not is_stuck, "the schedule waits for itself"
        is_stuck = True
        for rank, order in actions.items():
            while order:
                stage, kind = order[0]
                own, before = ended[kind == "F", stage], stage - 1 if kind == "F" else stage + 1
                needed = ended[kind == "F", before][len(own) :][:1]
                if kind != "W" and 0 <= before <= last and not needed:
                    break
                begin = free[rank] if kind == "W" or not needed else max(free[rank], needed[0])
                free[rank] = begin + _UNITS[kind]
                if kind != "W":
                    own.append(free[rank])
                del order[0]
                is_stuck = False
    of_one = (_UNITS["F"] + _UNITS["B"]) * (last + 1) / len(free)
    return (max(free.values()) - busy) / of_one


_UNITS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""Time of an action on a stage, by the value of its `computation_type`."""
