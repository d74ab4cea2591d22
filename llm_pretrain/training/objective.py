"""The objective: the global mean over loss tokens, exactly, however the batch is split.

Both engines call the same three pieces: `StepCounts` before the first forward pass, `Objective` per micro
batch, `StepSums` for what is reported. Nothing here communicates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from llm_pretrain.config import Config
from llm_pretrain.data import Batch
from llm_pretrain.model import DecoderOutput

ReduceSum = Callable[[Tensor], Tensor]
SumIntegers = Callable[[Sequence[int]], list[int]]

DIGEST_WORDS = 8
NUM_LOSSES = 4
"""Cross-entropy, z-loss, auxiliary loss, router z-loss: what `StepSums` begins with."""


class StepCounts(NamedTuple):
    """Loss tokens and sample digest of a whole global batch.

    Args:
        num_loss_tokens: N, over all ranks and micro batches.
        digest: Sums of each of the eight 32-bit words of the sample digests.
    """

    num_loss_tokens: int
    digest: list[int]

    @classmethod
    def of(cls, micro_batches: Sequence[Batch], sum_integers: SumIntegers) -> StepCounts:
        """Counts of this rank's micro batches, summed over ranks in one integer collective.

        The host knows all of them, so no device is waited for.
        """
        own = [[batch.num_loss_tokens, *batch.digest.tolist()] for batch in micro_batches]
        whole = own[0] if len(own) == 1 else [sum(column) for column in zip(*own, strict=True)]
        num_loss_tokens, *digest = sum_integers(whole)
        return cls(num_loss_tokens, digest)


def loss_sums(output: DecoderOutput) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums over loss tokens of cross-entropy, z-loss, auxiliary loss and router z-loss, each 0-dim."""
    assert output.loss_sum is not None, "the forward pass had no labels"
    sums = output.loss_sum, output.z_loss_sum, output.aux_loss_sum, output.router_z_loss_sum
    return sums  # type: ignore[return-value]  # all four come together


class Objective:
    """The objective of one micro batch.

    With W ranks, A micro batches per rank and step, and N loss tokens in the global batch it is

        (W*A/N) * [ sum m*(CE + c_z*lse^2) + c_aux * sum_i n_i * mean_l bal(i,l)
                    + c_rz * mean_l sum m*lse(router)^2 ]

    so that DDP's mean over ranks and the engine's division by A make the sum over the window exactly the
    objective over N tokens.
    """

    def __init__(self, config: Config, world_size: int):
        self.micro_batches_per_step = world_size * config.gradient_accumulation_steps(world_size)
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
        return total * (self.micro_batches_per_step / num_loss_tokens)


class StepSums:
    """Sums over the micro batches of a step, in float64, as one vector for one reduction.

    Layout: loss, z-loss, auxiliary loss, router z-loss, router entropy [L], expert counts [L*E], and with
    K > 1 sources the loss of each [K] and its loss tokens [K].
    """

    def __init__(self, config: Config) -> None:
        self._num_sources = len(config.data.sources)
        self._total: Tensor | None = None

    def add(self, output: DecoderOutput, batch: Batch) -> None:
        """Add one micro batch's sums; stays on the device."""
        parts = [torch.stack(loss_sums(output)).detach().double()]
        if output.expert_counts.numel():
            parts += [output.router_entropy_sum.double(), output.expert_counts.double().flatten()]
        if self._num_sources > 1:
            parts.append(source_sums(output, batch, self._num_sources).flatten())
        total = torch.cat(parts) if len(parts) > 1 else parts[0]
        self._total = total if self._total is None else self._total + total

    def reduced(self, reduce_sum: ReduceSum) -> Tensor:
        """The vector summed over ranks, float64, on the device."""
        assert self._total is not None, "no micro batch was added"
        return reduce_sum(self._total)


def objective_terms(sums: Tensor) -> list[float]:
    """Cross-entropy, z-loss, auxiliary loss, router z-loss, summed over the global batch's loss tokens."""
    return sums.tolist()[:NUM_LOSSES]


def source_sums(output: DecoderOutput, batch: Batch, num_sources: int) -> Tensor:
    """float64 [2, K]: cross-entropy over the loss tokens of each source's sequences, and their number.

    Selected rather than multiplied, so that a loss of one source that is not finite stays its own; and
    summed rather than scattered, which a GPU would do in no fixed order.
    """
    assert output.token_losses is not None, "the forward pass had no labels"
    assert batch.sources is not None, "a mixture's batch says where its sequences come from"
    numbers = torch.arange(num_sources, device=batch.sources.device)
    is_of_source = (batch.sources[:, None] == numbers).to(output.token_losses.device)
    per_sequence = torch.stack([output.token_losses.double().sum(1), batch.loss_mask.double().sum(1)])
    return torch.where(is_of_source, per_sequence[:, :, None], 0.0).sum(1)


def expert_counts(sums: Tensor, config: Config) -> Tensor:
    """Global expert counts [L, E], int64, out of a reduced `StepSums` vector."""
    layers, experts = len(config.model.moe_layers), config.model.num_experts
    first = NUM_LOSSES + layers
    return sums[first : first + layers * experts].reshape(layers, experts).round().long()


def source_metrics(sums: Tensor | None, config: Config) -> dict[str, object]:
    """A row's `train/source/LABEL/loss` and `…/loss_tokens` with more than one source, else nothing.

    Args:
        sums: A reduced `StepSums` vector; None for a step without loss tokens.
        config: Names the sources.
    """
    if len(config.data.sources) == 1:
        return {}
    labels = [source.label for source in config.data.sources]
    values = [0.0] * (2 * len(labels)) if sums is None else sums[-2 * len(labels) :].tolist()
    metrics: dict[str, object] = {}
    for label, loss, tokens in zip(labels, values, values[len(labels) :], strict=False):
        metrics[f"train/source/{label}/loss"] = _finite(loss / tokens) if tokens else None
        metrics[f"train/source/{label}/loss_tokens"] = round(tokens)
    return metrics


def loss_metrics(sums: Tensor, num_loss_tokens: int, config: Config) -> dict[str, object]:
    """A row's `train/*loss` and `moe/*`; losses other than `train/loss` include their coefficient."""
    model, layers = config.model, len(config.model.moe_layers)
    values = sums.tolist()
    metrics: dict[str, object] = {
        "train/loss": _finite(values[0] / num_loss_tokens),
        "train/z_loss": _finite(config.training.z_loss_coef * values[1] / num_loss_tokens),
    }
    if not layers:
        return metrics
    metrics["train/aux_loss"] = _finite(model.router_aux_loss_coef * values[2] / num_loss_tokens)
    metrics["train/router_z_loss"] = _finite(model.router_z_loss_coef * values[3] / num_loss_tokens)
    assignments = num_loss_tokens * model.num_experts_per_tok
    load = (expert_counts(sums, config).double() / assignments).tolist()
    for index, layer in enumerate(model.moe_layers):
        metrics[f"moe/layer_{layer}/load_max"] = max(load[index]) * model.num_experts
        metrics[f"moe/layer_{layer}/dead_experts"] = sum(share == 0 for share in load[index])
        metrics[f"moe/layer_{layer}/router_entropy"] = _finite(values[NUM_LOSSES + index] / num_loss_tokens)
    metrics["moe/load"] = load
    return metrics


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
