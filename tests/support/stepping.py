"""Drives an engine step by step, as the loop does, and keeps what the loop has no use for.

The gradients that reach each update, the learning rate it used, the micro batches each step was made of.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import llm_pretrain.data.loader as data
import llm_pretrain.model.decoder as model_part
import llm_pretrain.optim.build as optimizers
import llm_pretrain.optim.ema as averaging
import llm_pretrain.training.model_setup as building
import llm_pretrain.training.trainer as loop
from llm_pretrain.config.tree import Config
from llm_pretrain.data.assembly import Batch
from llm_pretrain.training import corruption
from llm_pretrain.training.decision import Decision
from llm_pretrain.training.model_setup import initialize_weights
from llm_pretrain.training.progress import Progress
from llm_pretrain.training.recorder import Recorder
from llm_pretrain.training.step import Step


@dataclass
class Driven:
    """What a driven engine did. Losses are per loss token; lists go by step, or by update.

    Where an average of the parameters is kept: what it was in the end, as the parameters themselves show
    it, and the first window's summed loss by it, 0 in the earlier stages of a pipeline. `sums`: those of
    `Step`. `checks`: their outcomes. `scaler`: fp16's, in the end. `local_sizes`: elements of each
    parameter on this rank.
    """

    losses: list[float | None] = field(default_factory=list)
    sums: list[list[float]] = field(default_factory=list)
    grad_norms: list[float | None] = field(default_factory=list)
    skipped: list[str | None] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)
    digests: list[list[int]] = field(default_factory=list)
    micro_batches: list[list[tuple[int, int]]] = field(default_factory=list)
    updates: list[int] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    local_sizes: dict[str, int] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    averages: dict[str, Tensor] = field(default_factory=dict)
    averaged_loss: float | None = None
    first_moments: dict[str, Tensor] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)
    checks: list[str | None] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def whole(tensor: Tensor) -> Tensor:
    """A copy of all of it, gathered from all ranks where it is spread over them."""
    gather = getattr(tensor, "full_tensor", None)
    return (gather() if gather else tensor).detach().clone()


def note_updates(model: torch.nn.Module, optimizer: torch.optim.Optimizer, driven: Driven) -> None:
    """Note gradients and learning rate whenever an optimizer really steps."""

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        names = {parameter: name for name, parameter in model.named_parameters()}
        stepped = [each for group in optimizer.param_groups for each in group["params"]]
        driven.rates.append(float(optimizer.param_groups[0]["lr"]))
        driven.gradients.append({names[each]: whole(each.grad) for each in stepped if each.grad is not None})

    optimizer.register_step_pre_hook(note)


class _Record(Recorder):
    """A recorder without file, console and trackers."""

    def __init__(self, driven: Driven, engine: Any, progress: Progress, decision: Decision):
        self.driven, self.engine, self.progress, self.decision = driven, engine, progress, decision
        self._pending, self._must_settle = [], lambda number: False
        self.console = SimpleNamespace(step=lambda number: None)

    def is_logged(self, step: int) -> bool:
        return False

    def elapsed(self) -> float:
        return 0.0

    def flush(self) -> None:
        pass

    def _record(self, step: Step) -> None:
        self.progress.update(step)
        sums = step.sums.vector
        mean = None if sums is None else float(step.sums.losses[0]) / step.num_loss_tokens
        self.driven.losses.append(mean if mean is None or math.isfinite(mean) else None)
        self.driven.sums.append([] if sums is None else sums.tolist())
        assert not isinstance(step.grad_norm, Tensor)
        self.driven.grad_norms.append(step.grad_norm)
        self.driven.skipped.append(step.skipped)
        self.driven.checks.append(step.check)
        self.driven.digests.append([int(word) % 2**32 for word in step.digest])


def parameter_hash(model: torch.nn.Module) -> str:
    """SHA-256 over all parameters, to the last bit."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(whole(parameter).contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def resolved(config: Config) -> Config:
    """`config` with the vocabulary of its store."""
    from llm_pretrain.config.loading import resolve_model

    return resolve_model(config, data.open_stores(config)[0].vocab_size)


def drive(engine: Any, config: Config, *, windows: Sequence[list[Batch]] | None = None) -> Driven:
    """Take every step of a resolved configuration with a new engine, by the loop's own `_step`.

    `windows`: this rank's micro batches of each step; by default what the prepared loader yields.
    """
    driven = Driven()
    with torch.device("meta"):
        model = building.build_model(config)
    optimizer = optimizers.build_optimizer(model, config.optimizer, config.training.precision)
    note_updates(model, optimizer, driven)

    def initialize(model: torch.nn.Module) -> None:
        seed, width = config.run.seed, config.optimizer.base_hidden_size
        initialize_weights(model, seed, width, device=engine.device)

    own = engine.prepare(model, optimizer, data.global_batches(config, start_step=0), initialize)
    training: Any = object.__new__(loop.Trainer)
    training.config, training.engine = config, engine
    training.progress = Progress()
    training.decision = Decision(config, engine, training.progress)
    training.recorder = _Record(driven, engine, training.progress, training.decision)
    if config.training.check_every:
        training.check = corruption_check(training, driven.warnings)
    per_step = config.gradient_accumulation_steps(engine.world_size)
    first: list[Batch] = []
    for window in windows if windows is not None else loop.windows(own, per_step):
        first = first or window
        before = len(driven.rates)
        driven.micro_batches.append([(batch.step, batch.micro_batch) for batch in window])
        training._step(window)
        driven.updates.append(len(driven.rates) - before)
        driven.hashes.append(parameter_hash(model))
    training.recorder.settle()
    driven.parameters = {name: whole(parameter) for name, parameter in model.named_parameters()}
    driven.local_sizes = {
        name: getattr(parameter, "_local_tensor", parameter).numel()
        for name, parameter in model.named_parameters()
    }
    states = {name: optimizer.state.get(parameter) for name, parameter in model.named_parameters()}
    driven.first_moments = {
        name: whole(own.get("exp_avg", own.get("momentum_buffer"))) for name, own in states.items() if own
    }
    driven.scaler = engine.scaler.state_dict()
    driven.buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    if config.optimizer.ema_decay:
        with averaging.ema_parameters(optimizer), torch.no_grad():
            driven.averages = {name: whole(parameter) for name, parameter in model.named_parameters()}
            losses = [engine.forward(batch).loss_sum for batch in first]
        driven.averaged_loss = sum(float(loss) for loss in losses if loss is not None)
        driven.hashes.append(parameter_hash(model))
    return driven


def corruption_check(training: Any, warnings: list[str]) -> corruption.CorruptionCheck:
    """The check of a run without a folder."""
    checkpoints: Any = SimpleNamespace(
        is_due=lambda step: False, wait=lambda last: None, store=SimpleNamespace(committed=list)
    )
    faults: list[dict] = []
    status: Any = SimpleNamespace(checked=None, faults=faults, add_fault=faults.append)
    recorder = training.recorder
    return corruption.CorruptionCheck(
        training.decision, checkpoints, status, warnings.append, recorder.settle
    )


def reference_gradients(config: Config, micro_batches: Sequence[Batch]) -> dict[str, Tensor]:
    """Gradients of the objective over all loss tokens of `micro_batches`, in float64, without any engine."""
    model = model_part.Decoder(config.model)
    initialize_weights(model, config.run.seed)
    model.double()
    tokens = sum(batch.num_loss_tokens for batch in micro_batches)
    if config.model.router_aux_loss_scope == "global_batch":
        micro_batches = [joined(micro_batches)]  # where nothing is split, a batch's own counts are global
    for batch in micro_batches:
        out = model(**batch.model_inputs())
        total = out.loss_sum + config.training.z_loss_coef * out.z_loss_sum
        total = total + config.model.router_aux_loss_coef * out.aux_loss_sum
        total = total + config.model.router_z_loss_coef * out.router_z_loss_sum
        (total / tokens).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def relative_error(found: dict[str, Tensor], expected: dict[str, Tensor], part: str = "") -> float:
    """Norm of the difference over the expected norm, over parameters whose name contains `part`."""
    names = [name for name in expected if part in name]
    assert names
    assert found.keys() == expected.keys()
    difference = sum(float((found[name].double() - expected[name].double()).square().sum()) for name in names)
    norm = sum(float(expected[name].double().square().sum()) for name in names)
    return math.sqrt(difference / norm) if math.isfinite(difference) else math.inf


def masked(batch: Batch) -> Batch:
    """The batch with no token that counts."""
    from llm_pretrain.model.kernels.loss import IGNORE_INDEX

    return replace(
        batch,
        labels=torch.full_like(batch.labels, IGNORE_INDEX),
        loss_mask=torch.zeros_like(batch.loss_mask),
        num_loss_tokens=0,
    )


def joined(micro_batches: Sequence[Batch]) -> Batch:
    """One batch of all sequences, in their order."""
    names = ("input_ids", "position_ids", "document_ids", "labels", "loss_mask")
    whole = {name: torch.cat([getattr(batch, name) for batch in micro_batches]) for name in names}
    tokens = sum(batch.num_loss_tokens for batch in micro_batches)
    # where documents begin along the whole follows from `document_ids`
    return replace(micro_batches[0], **whole, num_loss_tokens=tokens, document_offsets=None)


def micro_batches_of(config: Config, step: int) -> Iterator[Batch]:
    """All micro batches of one step, in the order of their numbers."""
    per_step = config.gradient_accumulation_steps(1)
    loader = data.global_batches(config, start_step=step)
    for _, batch in zip(range(per_step), loader, strict=False):
        yield batch
