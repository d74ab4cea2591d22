"""The objective: the global mean over loss tokens, exactly, however the batch is split.

Both engines call the same three pieces: `StepCounts` before the first forward pass, `Objective` per micro
batch, `StepSums` for what is reported. Nothing here communicates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llm_pretrain.config import Config
from llm_pretrain.data import Batch
from llm_pretrain.model import DecoderOutput

ReduceSum = Callable[[Tensor], Tensor]

DIGEST_WORDS = 8


@dataclass(frozen=True)
class StepCounts:
    """Loss tokens and sample digest of a whole global batch.

    Args:
        num_loss_tokens: N, over all ranks and micro batches.
        digest: int64 [8] on the CPU, sums of the 32-bit words of the sample digests.
    """

    num_loss_tokens: int
    digest: Tensor

    @classmethod
    def of(cls, micro_batches: Sequence[Batch], reduce_sum: ReduceSum) -> StepCounts:
        """Counts of this rank's micro batches, summed over ranks in one integer collective."""
        local = torch.zeros(1 + DIGEST_WORDS, dtype=torch.int64)
        for batch in micro_batches:
            local[0] += batch.num_loss_tokens
            local[1:] += batch.digest
        total = reduce_sum(local).cpu()
        return cls(int(total[0]), total[1:])


def loss_sums(output: DecoderOutput) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums over loss tokens of cross-entropy, z-loss, auxiliary loss and router z-loss, each 0-dim."""
    sums = output.loss_sum, output.z_loss_sum, output.aux_loss_sum, output.router_z_loss_sum
    assert all(each is not None for each in sums), "the forward pass had no labels"
    return sums  # type: ignore[return-value]  # the line above


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

    Layout: loss, z-loss, auxiliary loss, router z-loss, router entropy [L], expert counts [L*E].
    """

    def __init__(self) -> None:
        self._total: Tensor | None = None

    def add(self, output: DecoderOutput) -> None:
        """Add one micro batch's sums; stays on the device."""
        losses = torch.stack(loss_sums(output))
        parts = torch.cat(
            [
                losses.detach().double(),
                output.router_entropy_sum.double(),
                output.expert_counts.double().flatten(),
            ]
        )
        self._total = parts if self._total is None else self._total + parts

    def reduced(self, reduce_sum: ReduceSum) -> Tensor:
        """The vector summed over ranks, float64, on the device."""
        assert self._total is not None, "no micro batch was added"
        return reduce_sum(self._total)


def expert_counts(sums: Tensor, config: Config) -> Tensor:
    """Global expert counts [L, E], int64, out of a reduced `StepSums` vector."""
    layers, experts = len(config.model.moe_layers), config.model.num_experts
    return sums[4 + layers :].reshape(layers, experts).round().long()


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
        metrics[f"moe/layer_{layer}/router_entropy"] = _finite(values[4 + index] / num_loss_tokens)
    metrics["moe/load"] = load
    return metrics


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
