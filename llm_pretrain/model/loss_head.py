"""The loss head: cross-entropy and z-loss sums of the logits, in fp32 also under autocast.

Normalisation and coefficients belong to the training objective. The logits of a whole micro batch are
held once, in the output projection's type; nothing else of that size is.

Shapes: B sequences, S positions, T = B*S, V vocab_size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from llm_pretrain.model.layers import at_least_fp32

IGNORE_INDEX = -100
"""Label of a position that is no target."""

_CHUNK_ELEMENTS = 1 << 18
"""Logits worked on at a time on a CPU: what stays in its cache."""


class LossSums(NamedTuple):
    """Sums over the tokens whose loss_mask is 1."""

    loss: Tensor
    """Σ m · CE, 0-dim."""
    z_loss: Tensor
    """Σ m · lse², 0-dim."""
    token_losses: Tensor
    """[B, S] CE per position, 0 where masked, without gradient."""


class _CrossEntropySums(torch.autograd.Function):
    """Σ m·CE and Σ m·lse² of logits [T, V], with a single pass over them in each direction."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        labels = labels.clamp(min=0)
        parts = [at_least_fp32(part).logsumexp(-1) for part in logits.split(_chunk_rows(logits))]
        log_partition = torch.cat(parts)
        target = at_least_fp32(logits.gather(1, labels[:, None])[:, 0])
        losses = torch.where(mask, log_partition - target, 0)
        z_loss = torch.where(mask, log_partition.square(), 0).sum()
        ctx.save_for_backward(logits, labels, mask, log_partition)
        ctx.mark_non_differentiable(losses)
        return losses.sum(), z_loss, losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_loss, grad_z, _ = grads
        logits, labels, mask, log_partition = ctx.saved_tensors
        keep = mask.to(log_partition.dtype)
        on_softmax = (keep * (grad_loss + 2 * grad_z * log_partition))[:, None]
        on_target = (keep * -grad_loss)[:, None]
        rows = _chunk_rows(logits)
        grad = torch.empty_like(logits)
        columns = (grad, logits, log_partition[:, None], on_softmax, on_target, labels[:, None])
        for out, part, lse, scale, target_scale, label in zip(*(x.split(rows) for x in columns), strict=True):
            softmax = (at_least_fp32(part) - lse).exp_().mul_(scale)
            out.copy_(softmax.scatter_add_(1, label, target_scale))
        return grad, None, None


def _chunk_rows(logits: Tensor) -> int:
    return len(logits) if logits.device.type != "cpu" else max(1, _CHUNK_ELEMENTS // logits.shape[1])


def loss_head(logits: Tensor, labels: Tensor, mask: Tensor) -> LossSums:
    """Cross-entropy and z-loss (PaLM, arXiv:2204.02311, section 5) sums.

    Args:
        logits: [B, S, V], in any floating type.
        labels: int64 [B, S], already shifted; anything where the mask is 0.
        mask: bool [B, S].
    """
    loss, z_loss, losses = _CrossEntropySums.apply(logits.flatten(0, 1), labels.flatten(), mask.flatten())  # pyright: ignore[reportGeneralTypeIssues] (torch's stub of apply)
    return LossSums(loss, z_loss, losses.view(labels.shape))
