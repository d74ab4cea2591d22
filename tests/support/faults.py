"""Faults to inject into an engine: each is a function that a test calls before the engine is built.

A fault gets a MonkeyPatch, which undoes it, and the engine class that will run. It replaces a method of the
class, or a function or object wherever the package uses it. Source text is never edited.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import llm_pretrain.optim.build as build
from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.data.loader import shard
from llm_pretrain.model.layers import FeedForward
from llm_pretrain.model.moe import Experts
from llm_pretrain.optim.schedule import learning_rate, set_learning_rate
from llm_pretrain.training import decision
from llm_pretrain.training.decision import Decision
from llm_pretrain.training.engine import DDP_OPTIONS, seed_dropout, warm_up_backward
from llm_pretrain.training.step import attach_global_expert_counts

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch, type], None]
PACKAGE = ("llm_pretrain", "train_pretrain")


def replace_everywhere(patch: Patch, original: Any, substitute: Any) -> None:
    """Bind `substitute` in every module of the project that has imported `original`."""
    found = False
    for module in [m for name, m in sys.modules.items() if name.startswith(PACKAGE)]:
        for name, value in list(vars(module).items()):
            if value is original:
                patch.setattr(module, name, substitute)
                found = True
    assert found, f"nobody uses {original}"


def defined(name: str) -> Any:
    """The function or class of this name, wherever the package defines it."""
    found = {
        id(vars(module)[name]): vars(module)[name]
        for module_name, module in list(sys.modules.items())
        if module_name.startswith(PACKAGE) and getattr(vars(module).get(name), "__module__", 0) == module_name
    }
    assert len(found) == 1, f"{name} is defined {len(found)} times"
    return next(iter(found.values()))


def replacing(original: Any, substitute: Any) -> Fault:
    """The fault of `substitute` in the place of `original`, in every module that imports it."""
    return lambda patch, engine: replace_everywhere(patch, original, substitute)


def after(method: str, change: Callable[..., None]) -> Fault:
    """The fault of `change(self, *arguments)` after a method of the engine."""

    def fault(patch: Patch, engine: type) -> None:
        original = getattr(engine, method)

        def changed(self: Any, *arguments: Any, **options: Any) -> Any:
            result = original(self, *arguments, **options)
            change(self, *arguments, **options)
            return result

        patch.setattr(engine, method, changed)

    return fault


def setting(path: str, value: Any, method: str = "__init__") -> Fault:
    """The fault of another value of an attribute, such as `scaler.update`, after a method of the engine."""
    *way, last = path.split(".")

    def change(self: Any, *_: Any) -> None:
        for name in way:
            self = getattr(self, name)
        setattr(self, last, value)

    return after(method, change)


def around(method: str, substitute: Callable[..., Any]) -> Fault:
    """The fault of `substitute(original, self, *arguments)` in the place of a method of the engine."""

    def fault(patch: Patch, engine: type) -> None:
        original = getattr(engine, method)
        patch.setattr(engine, method, lambda self, *a, **k: substitute(original, self, *a, **k))

    return fault


def with_objective(change: Callable[..., Any]) -> Fault:
    """The fault of `change(self, objective, output, num_loss_tokens)` in the place of the objective."""

    def changed(self: Any, config: Any) -> None:
        objective = self.objective
        self.objective = lambda output, tokens: change(self, objective, output, tokens)

    return after("__init__", changed)


def together(*faults: Fault) -> Fault:
    """All of these as one."""

    def fault(patch: Patch, engine: type) -> None:
        for each in faults:
            each(patch, engine)

    return fault


def own_steps(self: Any) -> int:
    """Micro batches per step and rank."""
    return self.config.gradient_accumulation_steps(self.world_size)


# The objective


def _late_aux_loss(self: Any, objective: Any, output: Any, num_loss_tokens: int) -> Any:
    own = self.config.model.router_aux_loss_coef * output.aux_loss_sum / (output.token_losses != 0).sum()
    return objective(output, num_loss_tokens) + own_steps(self) * own


def _counted_by_rank(self: Any, config: Any) -> None:
    self.objective.factor //= self.world_size


def _divided_elsewhere(self: Any, config: Any) -> None:
    steps, objective = self.accumulation_steps, self.objective
    self.accumulation_steps = 1
    self.objective = lambda output, tokens: objective(output, tokens * steps)


MEAN_OF_MEANS = with_objective(
    lambda self, objective, output, tokens: (
        objective(output, 1) / objective.factor / (output.token_losses != 0).sum()
    )
)
UNDIVIDED = setting("accumulation_steps", 1)
"""By hand: the loss is not divided by the accumulation steps."""
DIVIDED_ELSEWHERE = after("__init__", _divided_elsewhere)
"""By hand: the number of tokens is multiplied instead."""
DIVIDED_TWICE = with_objective(lambda self, objective, *a: objective(*a) / own_steps(self))
LATE_AUX_LOSS = together(setting("objective.router_aux_loss_coef", 0.0), with_objective(_late_aux_loss))
"""Added beside the objective, after its scaling, and never divided by the accumulation steps."""
MEAN_PER_RANK = together(
    after("__init__", _counted_by_rank), around("sum_integers", lambda original, self, values: list(values))
)
OWN_TOKENS = around("sum_integers", lambda original, self, values: [values[0], *original(self, values)[1:]])
ONE_RANK_NAN = with_objective(
    lambda self, objective, *a: (math.nan if self.rank == 1 else 1.0) * objective(*a)
)


# Accumulation and the optimizer's steps


def _on_optimizer(change: Callable[[Any, Any], None]) -> Fault:
    """The fault of `change(engine, optimizer)` once the engine is prepared."""
    return after("prepare", lambda self, model, optimizer, *_: change(self, optimizer))


def _own_gate(self: Any, optimizer: Any) -> None:
    step, self.called = self.optimizer.step, 0

    def gated(*arguments: Any, **options: Any) -> None:
        self.called += 1
        if self.called % own_steps(self) == 0:
            step(*arguments, **options)

    self.optimizer.step = gated


def _scheduled_by_accelerate(self: Any, optimizer: Any) -> None:
    config = self.config
    for group in optimizer.param_groups:
        group["lr"] = config.optimizer.learning_rate
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate(config, step) / config.optimizer.learning_rate
    )
    schedule, step = self.accelerator.prepare(schedule), self.optimizer.step

    def both() -> None:
        step()
        schedule.step()

    self.optimizer.step = both


OWN_GATE = _on_optimizer(_own_gate)
"""A step gate of one's own beside `accumulate`."""
KEPT_GRADIENTS = _on_optimizer(
    lambda self, optimizer: [setattr(each, "zero_grad", lambda **_: None) for each in (self, optimizer)]
)
EVERY_MICRO_BATCH = setting("no_sync", nullcontext, "prepare")
"""By hand under DDP: every micro batch's gradients are reduced."""
NO_ACCUMULATE = setting("accelerator.accumulate", nullcontext)
SYNC_WITH_LOADER = after(
    "__init__",
    lambda self, config: self.accelerator.gradient_state.plugin_kwargs.update(sync_with_dataloader=True),
)
PREPARED_SCHEDULE = together(
    _on_optimizer(_scheduled_by_accelerate), replacing(set_learning_rate, lambda optimizer, rate: None)
)


def another_optimizer(patch: Patch, engine: type) -> None:
    """AdamW's unfused kernel."""
    fused = build.AdamW
    patch.setattr(build, "AdamW", lambda *a, **options: fused(*a, **options | {"fused": False}))


# Gradient scaling, by hand in fp16


def _unscaled(self: Any, config: Any) -> None:
    scale = self.scaler.scale
    self.scaler.scale = lambda loss: (scale(loss), loss)[1]


def _huge_scale(self: Any, config: Any) -> None:
    if self.scaler.is_enabled():
        self.scaler = torch.amp.GradScaler(self.device.type, init_scale=2.0**26)


CLIP_FIRST = setting("scaler.unscale_", lambda optimizer: None)
UNSCALED = after("__init__", _unscaled)
NO_UPDATE = setting("scaler.update", lambda: None)
HUGE_SCALE = after("__init__", _huge_scale)


def skip_by_own_loss(patch: Patch, engine: type) -> None:
    """Each rank decides by its own loss whether to step."""
    losses: list[float] = []

    def noted(self: Any, objective: Any, *arguments: Any) -> Any:
        loss = objective(*arguments)
        losses.append(float(loss))
        return loss

    with_objective(noted)(patch, engine)
    decide = Decision.__call__

    def decide_alone(self: Decision, step: Any) -> bool:
        decide(self, step)
        step.skipped = None if math.isfinite(losses[-1]) else "nonfinite_gradient"
        return not step.skipped

    patch.setattr(Decision, "__call__", decide_alone)


def _unsummed(is_meant: Callable[[torch.Tensor], bool]) -> Fault:
    """The fault of tensors that a rank does not sum over ranks."""
    return around(
        "reduce_sum", lambda original, self, tensor: tensor if is_meant(tensor) else original(self, tensor)
    )


OWN_LOSSES = _unsummed(torch.is_floating_point)
"""Each rank judges a step by its own sums of losses."""
WAITING = replacing(decision.decides_on_device, lambda config, engine: True)
"""No mistake: nobody reads a step's figures before the optimizer steps, as on a GPU."""


# Data


def _truncated(batches: DataLoader, less: int) -> DataLoader:
    sampler: Any = batches.batch_sampler
    object.__setattr__(batches, "batch_sampler", sampler[:-less])
    return batches


def _filled_up(original: Any, self: Any, model: Any, optimizer: Any, batches: Any, initialize: Any) -> Any:
    self.accelerator.dataloader_config.even_batches = True
    return original(self, model, optimizer, _truncated(batches, 2), initialize)


def _shard_first(original: Any, self: Any, model: Any, optimizer: Any, batches: Any, initialize: Any) -> Any:
    return original(self, model, optimizer, shard(batches, self.rank, self.world_size), initialize)


FILLED_UP = around("prepare", _filled_up)
SHARDED_TWICE = around("prepare", _shard_first)
NOT_SHARDED = replacing(shard, lambda loader, rank, world_size: loader)


# Buckets, buffers, dropout, experts


def with_ddp_option(name: str, value: Any) -> Fault:
    """The fault of another option of DistributedDataParallel."""
    return lambda patch, engine: patch.setitem(DDP_OPTIONS, name, value)


def _counted_apart(so_far: bool) -> Callable[..., Sequence[Any]]:
    """Each micro batch has the counts of itself, or of those up to it."""

    def counted(engine: Any, micro_batches: Sequence[Any]) -> Sequence[Any]:
        totals, counts = [], 0
        with torch.no_grad():
            for batch in micro_batches:
                own = engine.forward(batch).expert_counts
                counts = counts + own if so_far else own
                totals.append(engine.reduce_sum(counts))
        return [
            replace(batch, global_expert_counts=total)
            for batch, total in zip(micro_batches, totals, strict=True)
        ]

    return counted


STATIC_GRAPH = with_ddp_option("static_graph", True)
SMALL_BUCKETS = with_ddp_option("bucket_cap_mb", 0.05)
BROADCAST_BUFFERS = with_ddp_option("broadcast_buffers", True)
OWN_BUFFERS = after(
    "prepare", lambda self, model, *_: [buffer.fill_(self.rank) for buffer in model.buffers()]
)
"""No mistake: buffers that tell the ranks apart."""
NO_EMPTY_STEP = replacing(warm_up_backward, lambda engine: None)
DROPOUT_BY_RANK = replacing(
    seed_dropout,
    lambda config, batch: seed_dropout(config, replace(batch, micro_batch=dist.get_rank())),
)
COUNTS_OF_ONE_RANK = _unsummed(lambda tensor: tensor.dtype == torch.int64 and tensor.dim() > 1)
COUNTS_APART = replacing(attach_global_expert_counts, _counted_apart(so_far=False))
COUNTS_SO_FAR = replacing(attach_global_expert_counts, _counted_apart(so_far=True))


class ListExperts(nn.ModuleList):
    """In the place of `Experts`: modules that run only when a token chose them."""

    def __init__(self, config: ModelConfig, kernels: Any = None):
        size = config.expert_intermediate_size
        super().__init__([FeedForward(config.hidden_size, size) for _ in range(config.num_experts)])

    def forward(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self):
            token, place = (chosen == number).nonzero(as_tuple=True)
            if len(token):
                out = out.index_add(0, token, expert(x[token]) * weights[token, place, None])
        return out


experts_in_a_list = replacing(Experts, ListExperts)


# Leaving


def _holding_the_model(original: Any, self: Any) -> None:
    held = SimpleNamespace(no_sync=self.no_sync)
    original(self)
    del held


NO_SYNC_KEPT = around("close", _holding_the_model)
NO_WAIT = setting("accelerator.wait_for_everyone", lambda: None)
