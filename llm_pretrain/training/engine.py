"""The engine protocol, and what both engines share.

`train_pretrain.py` implements the protocol on `torch.distributed`, `train_pretrain_accelerate.py` through
Accelerate, with the methods in the same order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from llm_pretrain.config.tree import Config
from llm_pretrain.data.assembly import Batch
from llm_pretrain.distributed.mesh import Place, cp_positions
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.training.model_setup import FP8_MULTIPLE, eagerly
from llm_pretrain.training.step import Step, StepEngine, loss_sums

if TYPE_CHECKING:
    from llm_pretrain.distributed.pipeline import Pipeline

Launcher = Literal["torchrun", "accelerate"]
DDP_OPTIONS: dict[str, Any] = {
    "broadcast_buffers": False,
    "gradient_as_bucket_view": True,
    "bucket_cap_mb": 25,
}
"""Options of DistributedDataParallel on both paths: another bucket size would sum in another order."""
DIGEST_WORDS = 8
"""32-bit words of a sample digest (SHA-256)."""


class Engine(StepEngine, Protocol):
    """What differs between launch paths: these methods and those of `StepEngine` and `Ranks`."""

    launcher: Launcher
    place: Place
    """Where this rank stands in the mesh."""
    pipeline: Pipeline | None
    """This rank's part of a pipeline; None without a pipeline, and before `prepare`."""
    scaler: torch.amp.GradScaler
    """The gradient scaler, enabled only for fp16."""

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
            batches: Micro batches of all ranks.
            initialize: Gives the parameters memory on `device`, and values. `prepare` calls it after the
                model is sharded and before DDP wraps it.
        """
        ...

    def train_step(self, step: Step) -> None:
        """Accumulate the micro batches' gradients, unscale and clip them, and update if `step.may_update`."""
        ...

    def model_and_optimizer(self) -> tuple[Module, Optimizer]:
        """The model and optimizer in training, unwrapped."""
        ...

    def checkpoint_state(self, *, loading: bool = False) -> AbstractContextManager[tuple[Module, Optimizer]]:
        """Model and optimizer in full precision with unwrapped names, to read or (`loading`) to fill.

        Collective. DeepSpeed keeps its state in flat partitions, so under DeepSpeed both are copies.
        """
        ...

    def close(self) -> None:
        """Leave the process group; call once, when every rank is done."""
        ...


def forward_is_collective(config: Config, world_size: int) -> bool:
    """Whether every rank must take part in a forward pass, because the parameters may be sharded."""
    return world_size > 1 and config.distributed.strategy != "ddp"


def warm_up_backward(engine: Engine) -> None:
    """Run one backward pass with gradients of zero, so that DDP forms its final gradient buckets.

    In its first backward pass DDP records the order in which gradients become ready, and it rebuilds its
    buckets in the next forward pass with gradients. Other buckets sum in another order with three or more
    ranks. So the first step of a resumed run would differ in its last bits from that of an uninterrupted run.

    With sharded parameters, this pass allocates the all-gather buffers. Generating samples runs in inference
    mode, and training cannot use buffers that were first allocated there.
    """
    if engine.world_size == 1 or engine.place.sizes.pp > 1:  # stages are not wrapped, and generate nothing
        return
    model, optimizer = engine.model_and_optimizer()
    with eagerly(model):  # a batch of this size would compile every graph again
        output = engine.forward(dummy_batch(engine.device, engine.place))
        (0.0 * torch.stack(loss_sums(output)).sum()).backward()
    optimizer.zero_grad(set_to_none=True)


def own_part(batch: Batch, place: Place) -> Batch:
    """The part of a micro batch that this rank computes: the same positions of every sequence.

    `document_ids` stay whole. `position_ids` are those of the `cp` rank, because its `tp` ranks rotate
    queries and keys of all these positions. Loss tokens and digest count in the first part of the last stage.
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


def dummy_batch(device: torch.device, place: Place) -> Batch:
    """This rank's part of a batch [1, 16 * parts], for a forward pass whose result is not used.

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
    """Make dropout a function of the seed, the step and the micro batch's index among those of all ranks.

    The index does not depend on which process computes the batch. So dropout is the same after a resume at
    any layout with the same micro batch size. Without dropout a step draws no random numbers.
    """
    if not (config.model.hidden_dropout or config.model.attention_dropout):
        return
    key = f"{config.run.seed}/{batch.step}/{batch.micro_batch}".encode()
    number = int.from_bytes(hashlib.sha256(key).digest()[:8], "little") >> 1
    # torch.manual_seed does the same, but without a GPU every call of it formats and keeps the call stack
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(number)
    elif batch.input_ids.device.type != "cpu":
        torch.manual_seed(number)  # seeds the generators of every kind of device
