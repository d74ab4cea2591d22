"""Modules of the decoder other than attention and experts: linear layer, embedding, RMSNorm, feed-forward.

Shapes: B sequences, S positions, H hidden_size or the normalised size, I intermediate_size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llm_pretrain.model.kernels.layers import (
    SILU,
    Activation,
    apply_linears,
    at_least_fp32,
    gated,
    linear,
    rms_norm,
    uses_cpu_kernels,
)


class Linear(nn.Linear):
    """A linear layer without bias; weights are zero until `initialize_weights` or `load_state_dict`."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        return linear(input, self.weight)


class Embedding(nn.Embedding):
    """A token embedding; weights are zero until `initialize_weights` or `load_state_dict`."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


class FeedForward(nn.Module):
    """Dense gated linear unit (arXiv:2002.05202): `down(activation(gate(x)) * up(x))`."""

    def __init__(self, hidden_size: int, intermediate_size: int, activation: Activation = SILU):
        super().__init__()
        self.activation = activation
        self.gate_proj = Linear(hidden_size, intermediate_size)
        self.up_proj = Linear(hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """[B, S, H] to [B, S, H]."""
        gate_BSI, up_BSI = apply_linears(x_BSH, self.gate_proj, self.up_proj)
        if uses_cpu_kernels(gate_BSI):
            return self.down_proj(gated(gate_BSI, up_BSI, self.activation))
        return self.down_proj(self.activation.function(gate_BSI) * up_BSI)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension (arXiv:1910.07467), in at least fp32.

    The result has the input's or the weight's type, whichever is wider: fp32 under autocast, where parameters
    are fp32, and bf16 in a model that was cast to bf16 as a whole.

    Args:
        size: H.
        eps: Added to the mean square.
    """

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to [..., H]: `x / sqrt(mean(x²) + eps) * weight`."""
        if uses_cpu_kernels(x):
            return rms_norm(x, self.weight, self.eps)
        wide, weight_H = at_least_fp32(x), at_least_fp32(self.weight)
        normed = F.rms_norm(wide, weight_H.shape, weight_H, self.eps)
        return normed.to(torch.promote_types(x.dtype, self.weight.dtype))
