"""Liger's fused linear cross-entropy in the place of our own chunks: CUDA only, from the extra `liger`.

An adapter to `fused_linear_cross_entropy_forward` of liger-kernel 0.8, with `reduction="none"`, which
gives the losses of single tokens and unscaled gradients at once; its autograd function gives no losses of
tokens without computing everything twice. It counts the labels on the device and waits for the count.

Shapes: T tokens, H hidden_size, V vocab_size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llm_pretrain.model.loss_head import IGNORE_INDEX
from llm_pretrain.model.loss_head_fused import SumsAndGradients, Wanted


def liger_kernel(
    hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor, z_loss_coef: float, wanted: Wanted
) -> SumsAndGradients:
    """Losses and gradients of training, as `sums_and_gradients` with scales (1, z_loss_coef).

    Liger knows the z-loss only times its coefficient: with 0 the squares are 0.

    Args:
        hidden: [T, H].
        weight: [V, H], of the same type, or cast by autocast.
        labels: int64 [T]; anything where the mask is 0.
        mask: bool [T].
        z_loss_coef: The objective's.
        wanted: Which gradients to return; both are computed.
    """
    from liger_kernel.ops.fused_linear_cross_entropy import (  # pyright: ignore[reportMissingImports] (an extra)
        fused_linear_cross_entropy_forward,
    )

    # Of what comes back the first two and, from the end, the gradients of hidden, weight and bias: between
    # them versions differ.
    found = fused_linear_cross_entropy_forward(
        _input=hidden,
        weight=weight,
        target=torch.where(mask, labels, IGNORE_INDEX),
        ignore_index=IGNORE_INDEX,
        lse_square_scale=z_loss_coef,
        reduction="none",
        return_z_loss=True,
        accum_dtype=torch.float32,
    )
    losses, z_losses, grad_hidden, grad_weight = found[0], found[1].float(), found[-3], found[-2]
    squares = z_losses / z_loss_coef if z_loss_coef else torch.zeros_like(losses)
    return SumsAndGradients(
        losses - z_losses,
        squares,
        grad_hidden if wanted.hidden else None,
        grad_weight if wanted.weight else None,
    )
