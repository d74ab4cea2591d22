"""One optimizer step: the engine protocol, the objective, and the metrics of a step.

`train_pretrain.py` implements the protocol on `torch.distributed`, `train_pretrain_accelerate.py` through
Accelerate, with the methods in the same order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from llm_pretrain.config.tree import Config
from llm_pretrain.data.loader import Batch
from llm_pretrain.distributed.mesh import Place, cp_positions
from llm_pretrain.model.decoder import Decoder, DecoderOutput
from llm_pretrain.training.anomaly import NUM_LOSSES, Spike, StepMonitor
from llm_pretrain.training.model_setup import FP8_MULTIPLE, eagerly

Launcher = Literal["torchrun", "accelerate"]

DDP_OPTIONS: dict[str, Any] = {
    "broadcast_buffers": False,
    "gradient_as_bucket_view": True,
    "bucket_cap_mb": 25,
}
"""Options of DistributedDataParallel, equal on both paths: another bucket size sums in another order."""

PASSED, TRANSIENT = "passed", "transient"
"""Values of a row's `train/check`."""

DIGEST_WORDS = 8
"""32-bit words of a sample digest (SHA-256)."""


class Engine(Protocol):
    """The methods that differ between launch paths, in the order in which both scripts define them."""

    config: Config
    launcher: Launcher
    rank: int
    world_size: int
    place: Place
    """Where this rank stands in the mesh."""
    device: torch.device
    scaler: torch.amp.GradScaler | None
    clip_grad_norm: Callable[..., Any]
    """As torch's `clip_grad_norm_(parameters, max_norm)`."""

    def prepare(
        self,
        model: Decoder,
        optimizer: Optimizer,
        batches: DataLoader,
        initialize: Callable[[Decoder], None],
    ) -> Iterable[Batch]:
        """Shard or wrap the model, keep the optimizer, return this rank's batches on its device.

        Args:
            model: On the meta device.
            optimizer: With the model's parameters.
            batches: Of all ranks.
            initialize: Gives the parameters memory on `device`, and values; called once they are sharded and
                before they are wrapped.
        """
        ...

    def forward(self, batch: Batch) -> DecoderOutput:
        """Run the wrapped model in the configured precision, with dropout seeded by the batch's position."""
        ...

    def train_step(self, micro_batches: Sequence[Batch], monitor: StepMonitor) -> StepMetrics:
        """Accumulate gradients over the micro batches, unscale, clip, and step as the monitor decides."""
        ...

    def reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, on the tensor's own device; the tensor itself if there is one rank."""
        ...

    def sum_integers(self, values: Sequence[int]) -> list[int]:
        """Sums over ranks of integers on the host, without the GPU."""
        ...

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank; also a barrier."""
        ...

    def model_and_optimizer(self) -> tuple[Module, Optimizer]:
        """The model and optimizer in training, unwrapped."""
        ...

    def checkpoint_state(self, *, loading: bool = False) -> AbstractContextManager[tuple[Module, Optimizer]]:
        """Model and optimizer in full precision under their plain names, to read or (`loading`) to fill.

        Collective. Under DeepSpeed, which keeps its state in flat partitions, both are copies.
        """
        ...

    def close(self) -> None:
        """Leave the process group; call once, when every rank is done."""
        ...


@dataclass(eq=False)
class StepMetrics:
    """Metrics of one optimizer step, the same on every rank after `reduce`.

    Args:
        num_loss_tokens: N, loss tokens of the global batch.
        digest: Sums of each of the eight 32-bit words of the global batch's sample digests.
        num_sources: K, data sources of the mixture.
        sums: float64 vector, summed over micro batches, and over ranks after `reduce`. Layout: loss, z-loss,
            auxiliary loss, router z-loss, router entropy [L], expert counts [L*E], and for K > 1 the loss of
            each source [K] and its loss tokens [K]. None for a step without loss tokens.
        grad_norm: Global gradient norm before clipping; None if it is not finite.
        loss: Cross-entropy per loss token, the row's `train/loss`; None if the step's numbers are not finite.
        skipped: Why the parameters were not updated: `no_loss_tokens`, `overflow` (fp16),
            `nonfinite_gradient`, `nonfinite_loss`, `spike` or `rollback`; None if they were.
        spike: The detected spike; None without one.
        check: Of a step that was computed twice: `passed`, or `transient` if something differed only once.
        found_inf: float32, 0-dim, on the device: 1 if the step must be skipped, else 0. Set only until
            `StepMonitor` reads it back; until then `grad_norm` is a tensor, and `loss`, `skipped` and `spike`
            are not decided.
        step, tokens_seen: Steps and loss tokens of the run, this step included.
        learning_rate: Rate of this step.
        seconds: Wall time of this step in the loop.
    """

    num_loss_tokens: int
    digest: list[int]
    num_sources: int = 1
    sums: Tensor | None = None
    grad_norm: Tensor | float | None = None
    loss: float | None = None
    skipped: str | None = None
    spike: Spike | None = None
    check: str | None = None
    found_inf: Tensor | None = None
    step: int = 0
    tokens_seen: int = 0
    learning_rate: float = 0.0
    seconds: float = 0.0

    @classmethod
    def all_reduce_counts(cls, micro_batches: Sequence[Batch], engine: Engine) -> StepMetrics:
        """Sum the global batch's loss tokens and sample digests, in one integer all-reduce on the host."""
        counts = [[batch.num_loss_tokens, *batch.digest.tolist()] for batch in micro_batches]
        num_loss_tokens, *digest = engine.sum_integers([sum(column) for column in zip(*counts, strict=True)])
        return cls(num_loss_tokens, digest, num_sources=len(engine.config.data.sources))

    def skip(self, reason: str) -> StepMetrics:
        """Mark this step as skipped for `reason`; returns itself."""
        self.skipped = reason
        return self

    def add(self, output: DecoderOutput, batch: Batch) -> None:
        """Add one micro batch's sums, on the device."""
        parts = [torch.stack(loss_sums(output)).detach().double()]
        if output.expert_counts.numel():
            parts += [output.router_entropy_sum.double(), output.expert_counts.double().flatten()]
        if self.num_sources > 1:
            parts.append(source_sums(output, batch, self.num_sources).flatten())
        sums = torch.cat(parts) if len(parts) > 1 else parts[0]
        self.sums = sums if self.sums is None else self.sums + sums

    def reduce(self, engine: Engine) -> Tensor:
        """Sum `sums` over ranks, in one all-reduce."""
        if self.sums is None:  # another stage of the pipeline has the losses
            layers, sources = len(engine.config.model.moe_layers), self.num_sources
            size = NUM_LOSSES + layers * (1 + engine.config.model.num_experts)
            size += 2 * sources if sources > 1 else 0
            self.sums = torch.zeros(size, dtype=torch.float64, device=engine.device)
        self.sums = engine.reduce_sum(self.sums)
        return self.sums

    def numbers(self) -> Tensor:
        """The gradient norm, then `sums`, as one float64 vector on their device."""
        assert self.sums is not None
        assert isinstance(self.grad_norm, Tensor)
        return torch.cat([self.grad_norm.reshape(1), self.sums])


def loss_sums(output: DecoderOutput) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums over loss tokens of cross-entropy, z-loss, auxiliary loss and router z-loss, each 0-dim."""
    assert output.loss_sum is not None, "the forward pass had no labels"
    sums = output.loss_sum, output.z_loss_sum, output.aux_loss_sum, output.router_z_loss_sum
    return sums  # type: ignore[return-value]  # either all four are None or none is


class Objective:
    """The objective of one micro batch, or of this rank's part of one.

    With A micro batches per rank and step, and N loss tokens in the global batch it is

        (W*A/N) * [ sum m*(CE + c_z*lse^2) + c_aux * sum_i n_i * mean_l bal(i,l)
                    + c_rz * mean_l sum m*lse(router)^2 ]

    so that DDP's mean over W ranks and the engine's division by A make the sum over the step's micro batches
    exactly the objective over N tokens. Where the ranks' gradients are added, as by FSDP here, W is 1.

    Args:
        config: Has the coefficients.
        world_size: Ranks of the run.
    """

    def __init__(self, config: Config, world_size: int):
        averaged = world_size if config.distributed.strategy != "fsdp" else 1
        self.factor = averaged * config.gradient_accumulation_steps(world_size)
        self.z_loss_coef = config.training.z_loss_coef
        self.router_aux_loss_coef = config.model.router_aux_loss_coef
        self.router_z_loss_coef = config.model.router_z_loss_coef
        self.is_moe = bool(config.model.moe_layers)

    def __call__(self, output: DecoderOutput, num_loss_tokens: int) -> Tensor:
        """The scaled objective of a micro batch, 0-dim; `num_loss_tokens` is N, over all ranks."""
        total, z_loss, aux_loss, router_z_loss = loss_sums(output)
        if self.z_loss_coef:
            total = total + self.z_loss_coef * z_loss
        if self.is_moe and self.router_aux_loss_coef:
            total = total + self.router_aux_loss_coef * aux_loss
        if self.is_moe and self.router_z_loss_coef:
            total = total + self.router_z_loss_coef * router_z_loss
        return total * (self.factor / num_loss_tokens)


def forward_is_collective(config: Config, world_size: int) -> bool:
    """Whether every rank must take part in a forward pass, because the parameters may be sharded."""
    return world_size > 1 and config.distributed.strategy != "ddp"


def warm_up_backward(engine: Engine) -> None:
    """Run one backward pass whose gradients are zero, after which DDP knows its gradient buckets.

    DDP records in its first backward pass in which order gradients become ready, and rebuilds its buckets in
    the next forward pass with gradients. With three or more ranks other buckets sum in another order, so the
    first step of a resumed run would differ in its last bits from the same step of an uninterrupted run.

    With sharded parameters the pass allocates the all-gather buffers: buffers that are first allocated in
    inference mode, by the generation of samples, cannot be used in training.
    """
    if engine.world_size == 1 or engine.place.sizes.pp > 1:  # stages are not wrapped, and generate nothing
        return
    model, optimizer = engine.model_and_optimizer()
    with eagerly(model):  # a batch of this size would compile every graph again
        output = engine.forward(dummy_batch(engine.device, engine.place))
        (0.0 * torch.stack(loss_sums(output)).sum()).backward()
    optimizer.zero_grad(set_to_none=True)


def own_part(batch: Batch, place: Place) -> Batch:
    """The part of a micro batch that this rank computes: of every sequence the same positions.

    The documents stay whole, and the positions those of the `cp` rank, whose `tp` ranks rotate the queries
    and keys of all of them. Loss tokens and digest are counted with the first part, in the last stage.
    """
    if place.sequence_rank or not place.is_last_stage:
        batch = replace(batch, num_loss_tokens=0, digest=torch.zeros_like(batch.digest))
    if place.sizes.sequence == 1:
        return batch
    of_cp_rank = cp_positions(place, batch.input_ids.shape[1])
    own = of_cp_rank.chunk(place.sizes.tp)[place.tp]
    return replace(
        batch,
        input_ids=batch.input_ids[:, own],
        position_ids=batch.position_ids[:, of_cp_rank],
        labels=batch.labels[:, own],
        loss_mask=batch.loss_mask[:, own],
    )


def dummy_batch(device: torch.device, place: Place = Place()) -> Batch:  # noqa: B008 (it is frozen)
    """A rank's part of a batch [1, 16 * parts] for a forward pass whose result is not used.

    FP8 products need a multiple of 16.
    """
    ones = torch.ones((1, FP8_MULTIPLE * place.sizes.sequence), dtype=torch.int64, device=device)
    batch = Batch(
        input_ids=ones,
        position_ids=ones,
        document_ids=ones,
        labels=ones,
        loss_mask=ones.bool(),
        num_loss_tokens=0,
        step=0,
        micro_batch=0,
        digest=torch.zeros(DIGEST_WORDS, dtype=torch.int64),
    )
    return own_part(batch, place)


def seed_dropout(config: Config, batch: Batch) -> None:
    """Make dropout a function of (seed, step, a*W + r), with the micro batch number a and the rank r.

    a*W + r does not depend on which process computes the batch, so dropout is the same after a resume at any
    layout with the same micro batch size. Without dropout a step draws no random numbers.
    """
    if not (config.model.hidden_dropout or config.model.attention_dropout):
        return
    key = f"{config.run.seed}/{batch.step}/{batch.micro_batch}".encode()
    number = int.from_bytes(hashlib.sha256(key).digest()[:8], "little") >> 1
    # torch.manual_seed does the same, but without a GPU it formats and keeps the call stack each time
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(number)
    elif batch.input_ids.device.type != "cpu":
        torch.manual_seed(number)  # seeds the generators of every kind of device


def source_sums(output: DecoderOutput, batch: Batch, num_sources: int) -> Tensor:
    """Cross-entropy sum and number of loss tokens of each source's sequences, float64 [2, K].

    `where` instead of a product keeps a non-finite loss of one source out of the others; a sum instead of
    `index_add` has a fixed order on a GPU.
    """
    assert output.token_losses is not None, "the forward pass had no labels"
    assert batch.sources is not None, "the batch of a mixture has no sources"
    numbers = torch.arange(num_sources, device=batch.sources.device)
    is_of_source = (batch.sources[:, None] == numbers).to(output.token_losses.device)
    per_sequence = torch.stack([output.token_losses.double().sum(1), batch.loss_mask.double().sum(1)])
    return torch.where(is_of_source, per_sequence[:, :, None], 0.0).sum(1)


def expert_counts(sums: Tensor, config: Config) -> Tensor:
    """Global expert counts [L, E], int64, of reduced `StepMetrics.sums`."""
    layers, experts = len(config.model.moe_layers), config.model.num_experts
    first = NUM_LOSSES + layers
    return sums[first : first + layers * experts].reshape(layers, experts).round().long()


def attach_global_expert_counts(engine: Engine, micro_batches: Sequence[Batch]) -> Sequence[Batch]:
    """The step's micro batches, with the global batch's expert counts if the balance loss needs them.

    Only `router_aux_loss_scope: global_batch` needs them: a counting pass without gradients, with the
    dropout, precision and mode of the training pass, so that every token is routed as it will be in training,
    then one integer all-reduce. If one micro batch is the whole global batch, the forward pass's own counts
    are used, without a counting pass. Every rank makes the same number of forward passes, as sharded
    strategies require.
    """
    model = engine.config.model
    is_needed = (
        model.router_aux_loss_scope == "global_batch"
        and model.router_aux_loss_coef > 0
        and bool(model.moe_layers)
    )
    if not is_needed or engine.world_size * len(micro_batches) == 1:
        return micro_batches
    counts = torch.zeros((), dtype=torch.int64, device=engine.device)
    with torch.no_grad():
        for batch in micro_batches:
            counts = counts + engine.forward(batch).expert_counts
    total = engine.reduce_sum(counts)
    return [replace(batch, global_expert_counts=total) for batch in micro_batches]
