"""The sums of one optimizer step: one vector with views by name."""

from __future__ import annotations

import torch
from torch import Tensor

from llm_pretrain.config.tree import Config
from llm_pretrain.data.loader import Batch
from llm_pretrain.distributed.collectives import Ranks
from llm_pretrain.model.decoder import DecoderOutput

_LOSSES = 4
"""Cross-entropy, z-loss, auxiliary loss, router z-loss."""


class StepSums:
    """Sums over a step's micro batches, and over ranks after `reduce`.

    Args:
        config: The run's: L layers of E experts, K data sources.
        device: Device of the vector.
    """

    def __init__(self, config: Config, device: torch.device):
        self.layers, self.experts = len(config.model.moe_layers), config.model.num_experts
        self.sources, self.device = len(config.data.sources), device
        self.vector: Tensor | None = None
        """float64 [4 + L + L*E + 2K]: losses, router entropies, expert counts and, for K > 1, losses and loss
        tokens of the sources; None before the first micro batch."""

    def add(self, output: DecoderOutput, batch: Batch) -> None:
        """Add one micro batch's sums, on the device."""
        parts = [torch.stack(loss_sums(output)).detach().double()]
        if output.expert_counts.numel():
            parts += [output.router_entropy_sum.double(), output.expert_counts.double().flatten()]
        if self.sources > 1:
            parts.append(source_sums(output, batch, self.sources).flatten())
        sums = torch.cat(parts) if len(parts) > 1 else parts[0]
        self.vector = sums if self.vector is None else self.vector + sums

    def reduce(self, ranks: Ranks) -> Tensor:
        """The vector summed over ranks, in one all-reduce; a rank without the last stage adds zeros."""
        if self.vector is None:
            size = _LOSSES + self.layers * (1 + self.experts) + (2 * self.sources if self.sources > 1 else 0)
            self.vector = torch.zeros(size, dtype=torch.float64, device=self.device)
        self.vector = ranks.reduce_sum(self.vector)
        return self.vector

    @property
    def losses(self) -> Tensor:
        """Cross-entropy, z-loss, auxiliary loss and router z-loss [4], without their coefficients."""
        return self._part(0, _LOSSES)

    @property
    def router_entropies(self) -> Tensor:
        """Entropy of each layer's routing [L]."""
        return self._part(_LOSSES, self.layers)

    @property
    def expert_counts(self) -> Tensor:
        """Tokens of each expert, int64 [L, E]."""
        counts = self._part(_LOSSES + self.layers, self.layers * self.experts)
        return counts.reshape(self.layers, self.experts).round().long()

    @property
    def by_source(self) -> Tensor:
        """Cross-entropy and loss tokens of each source [2, K], for K > 1."""
        assert self.vector is not None
        return self.vector[-2 * self.sources :].reshape(2, self.sources)

    def _part(self, first: int, size: int) -> Tensor:
        assert self.vector is not None, "no micro batch was added"
        return self.vector[first : first + size]


def loss_sums(output: DecoderOutput) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums over loss tokens of cross-entropy, z-loss, auxiliary loss and router z-loss, each 0-dim."""
    assert output.loss_sum is not None, "the forward pass had no labels"
    sums = output.loss_sum, output.z_loss_sum, output.aux_loss_sum, output.router_z_loss_sum
    return sums  # type: ignore[return-value]  # either all four are None or none is


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
