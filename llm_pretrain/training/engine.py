"""The engine protocol: what differs between launch paths, and nothing else.

`train_pretrain.py` implements it by hand on `torch.distributed`, `train_pretrain_accelerate.py` through
Accelerate; the methods stand in the order in which a run meets them, in the same order in both scripts.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from llm_pretrain.config import Config
from llm_pretrain.data import Batch
from llm_pretrain.model import DecoderOutput
from llm_pretrain.training.background import Channel
from llm_pretrain.training.compiling import eagerly
from llm_pretrain.training.objective import DIGEST_WORDS, NUM_LOSSES, StepCounts, loss_sums, objective_terms
from llm_pretrain.training.spikes import Judge, Spike

T = TypeVar("T")

Launcher = Literal["torchrun", "accelerate"]

DDP_OPTIONS: dict[str, Any] = {
    "broadcast_buffers": False,
    "gradient_as_bucket_view": True,
    "bucket_cap_mb": 25,
}
"""Options of DistributedDataParallel, the same on both paths: another bucket size sums in another order."""


@dataclass(frozen=True)
class Unread:
    """A step's figures while they are on the device.

    Args:
        figures: float64 vector: the gradient norm, then `StepSums`, over all ranks.
        found_inf: float32, 0-dim: 1 where the step must not move anything, else 0.
    """

    figures: Tensor
    found_inf: Tensor

    @classmethod
    def of(cls, grad_norm: Tensor | float, sums: Tensor) -> Unread:
        """Of a step that is skipped where the norm or one of the four losses is not finite."""
        norm = torch.as_tensor(grad_norm, dtype=sums.dtype, device=sums.device)
        figures = torch.cat([norm.reshape(1), sums])
        is_finite = torch.isfinite(figures[: 1 + NUM_LOSSES]).all()
        return cls(figures, torch.logical_not(is_finite).float())


class StepResult(NamedTuple):
    """What one optimizer step did, the same on every rank.

    Args:
        counts: Loss tokens and sample digest of the whole global batch.
        sums: float64 vector of `StepSums`, reduced over all ranks; None for a step without loss tokens.
        grad_norm: Global gradient norm before clipping; None where it is not finite.
        loss: Cross-entropy per loss token, the row's `train/loss`; None of a step that could not be judged.
        skipped: Why parameters do not move: `no_loss_tokens`, `overflow` (fp16), `nonfinite_gradient`,
            `nonfinite_loss`, `spike`, or `rollback` where they move back; None where they do.
        spike: What is unusual about the step; None of a step that could not be judged.
        unread: What the four above will follow from, where nobody has waited for the device yet; `skipped`
            is None until then.
    """

    counts: StepCounts
    sums: Tensor | None = None
    grad_norm: float | None = None
    loss: float | None = None
    skipped: str | None = None
    spike: Spike | None = None
    unread: Unread | None = None

    @classmethod
    def of(
        cls,
        counts: StepCounts,
        sums: Tensor,
        grad_norm: Tensor | float,
        judge: Judge | None,
        scaler: torch.amp.GradScaler | None,
    ) -> StepResult:
        """The verdict on a step whose gradients are there, before the optimizer may use them.

        What it judges by is global, so all ranks come to the same. This is where a step waits for the device,
        unless there is no judge: then the verdict stays on the device, and `Books` reads it later.
        """
        if judge is None:
            return cls(counts, sums, unread=Unread.of(grad_norm, sums))
        grad_norm = float(grad_norm)
        if not math.isfinite(grad_norm):
            return cls(counts, sums, skipped="overflow" if scaler else "nonfinite_gradient")
        losses = objective_terms(sums)
        if not all(map(math.isfinite, losses)):
            return cls(counts, sums, grad_norm, skipped="nonfinite_loss")
        loss = losses[0] / counts.num_loss_tokens
        spike = judge(loss, grad_norm, counts.num_loss_tokens)
        return cls(counts, sums, grad_norm, loss, spike.skipped if spike else None, spike)


@dataclass(slots=True)
class FinishedStep:
    """A step that the engine has taken, for the books.

    Args:
        step, tokens_seen: The run's, with this step counted.
        learning_rate: That it was taken at.
        result: What it did.
        seconds: That the loop needed for it.
    """

    step: int
    tokens_seen: int
    learning_rate: float
    result: StepResult
    seconds: float


class Engine(Protocol):
    """What differs between launch paths, in the order a run meets it."""

    launcher: Launcher
    rank: int
    world_size: int
    device: torch.device
    scaler: torch.amp.GradScaler | None
    channel: Channel | None
    """Between the ranks for background saves, where the configuration asks for them."""

    def prepare(self, model: Module, optimizer: Optimizer, batches: DataLoader) -> Iterable[Batch]:
        """Place and wrap the model, keep the optimizer, return this rank's batches on its device."""
        ...

    def forward(self, batch: Batch) -> DecoderOutput:
        """The wrapped model in the configured precision."""
        ...

    def train_step(self, micro_batches: Sequence[Batch], judge: Judge | None) -> StepResult:
        """Accumulate the window's gradients, unscale, clip, judge, and step unless the verdict is to skip.

        Without a judge nothing waits for the device, and the optimizer heeds the verdict there.
        """
        ...

    def reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, on the tensor's own device; the tensor itself where there is one rank only."""
        ...

    def sum_integers(self, values: Sequence[int]) -> list[int]:
        """Sums over ranks of what the host knows: no device takes part."""
        ...

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank; also a barrier."""
        ...

    def model_and_optimizer(self) -> tuple[Module, Optimizer]:
        """The unwrapped model and optimizer that train."""
        ...

    def checkpoint_state(self, *, loading: bool = False) -> AbstractContextManager[tuple[Module, Optimizer]]:
        """The same, full precision and plain names, to read, or to fill where `loading`; collective.

        Both may be stand-ins where a back-end keeps its state in a form of its own.
        """
        ...

    def close(self) -> None:
        """Leave the process group; call once, when every rank is done."""
        ...


def forwards_together(config: Config, world_size: int) -> bool:
    """Whether a forward pass is a collective, since parameters are sharded: every rank must take part."""
    return world_size > 1 and config.distributed.strategy != "ddp"


def mark_last(items: Sequence[T]) -> Iterator[tuple[bool, T]]:
    """Pairs of (is this the last one, item)."""
    for index, item in enumerate(items):
        yield index == len(items) - 1, item


def settle_buckets(engine: Engine) -> None:
    """Let DDP settle its gradient buckets before the first step, by an empty step that changes nothing.

    DDP regroups its buckets after the first backward pass, in the forward pass that follows. From three
    ranks on another grouping sums in another order, so a resumed run's first step would differ in its
    last bits from the same step of a run that was never stopped. The regrouping is also a collective,
    which must not fall into an evaluation in which a rank has no batch.

    Where parameters are sharded the same step makes the tensors that they are gathered into, which must
    not happen in generation: what is made in inference mode cannot be trained with.
    """
    if engine.world_size == 1:
        return
    model, optimizer = engine.model_and_optimizer()
    empty = empty_batch(engine.device)
    with eagerly(model):  # compiled for so small a batch, every graph would be compiled again
        (0.0 * torch.stack(loss_sums(engine.forward(empty))).sum()).backward()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            engine.forward(empty)


def empty_batch(device: torch.device) -> Batch:
    """A batch without loss tokens, for a forward pass that is needed for itself."""
    ones = torch.ones((1, 2), dtype=torch.int64, device=device)
    return Batch(
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


def heed_verdict(optimizer: Optimizer, result: StepResult) -> None:
    """Let the optimizer's next step do nothing where the verdict on the device says so.

    As `GradScaler` does it: optimizers with `_step_supports_amp_scaling`, fused ones, look at `found_inf` in
    their kernels, and neither parameters nor moments nor step counters move where it is 1.
    """
    if result.unread is not None:
        optimizer.found_inf = result.unread.found_inf  # type: ignore[attr-defined]  # torch's own name for it


def seed_dropout(config: Config, batch: Batch) -> None:
    """Make dropout a function of (seed, step, number of the micro batch within the step).

    The number a*W + r is the same whoever computes the batch, so the randomness survives a resume at
    any layout of the same micro batch size. Without dropout nothing in a step draws numbers.
    """
    if not (config.model.hidden_dropout or config.model.attention_dropout):
        return
    key = f"{config.run.seed}/{batch.step}/{batch.micro_batch}".encode()
    number = int.from_bytes(hashlib.sha256(key).digest()[:8], "little") >> 1
    # torch.manual_seed does the same, but where no GPU is in use it keeps the call stack's text each time
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(number)
    elif batch.input_ids.device.type != "cpu":
        torch.manual_seed(number)  # another kind of device, whose generator only this one knows
