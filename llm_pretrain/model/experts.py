"""The experts of a mixture-of-experts layer: stacked SwiGLUs, and which kernel runs them.

The routing decision comes from `router.py`; the kernels are in `experts_streamed.py` (CPU, and every
type) and `experts_grouped.py` (CUDA). `experts_reference` says in a few lines what both must compute.

Shapes: T tokens, H hidden_size, E experts, K experts per token, I moe_intermediate_size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llm_pretrain.config import ModelConfig
from llm_pretrain.model.experts_grouped import grouped_experts, grouped_obstacle
from llm_pretrain.model.experts_streamed import streamed_experts
from llm_pretrain.model.kernels import AUTO, Kernels


def experts_reference(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """The definition, for reading and for tests: every expert for every token, then the weighted choice.

    Args:
        x: [T, H].
        gate_up: [E, 2I, H], gate above up.
        down: [E, H, I].
        weights: [T, K].
        chosen: int64 [T, K], no expert twice in a row.

    Returns:
        [T, H]: `Σ_k weights[t, k] · SwiGLU_{chosen[t, k]}(x[t])`.
    """
    gate, up = torch.einsum("th,eih->tei", x, gate_up).chunk(2, -1)
    all_outputs = torch.einsum("tei,ehi->teh", F.silu(gate) * up, down)
    dense_weights = weights.new_zeros(x.shape[0], len(gate_up)).scatter(1, chosen, weights)
    return torch.einsum("te,teh->th", dense_weights, all_outputs)


def _reference_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor, dtype: torch.dtype
) -> Tensor:
    """`experts_reference` in `dtype`; returns x's type."""
    out = experts_reference(x.to(dtype), gate_up.to(dtype), down.to(dtype), weights.to(dtype), chosen)
    return out.to(x.dtype)


def experts_obstacle(
    config: ModelConfig, kernels: Kernels, device: torch.device, dtype: torch.dtype
) -> str | None:
    """What the implementation that `kernels` names needs and will not have, in words; None where it can run.

    Args:
        config: The model's.
        kernels: Its implementations by name.
        device: Where it will train.
        dtype: Of its matrix products there.
    """
    if kernels.experts != "grouped" or not config.moe_layers:
        return None
    return grouped_obstacle(device, dtype, config.hidden_size, config.expert_intermediate_size)


class Experts(nn.Module):
    """E SwiGLUs in two stacked parameters, so that no expert's gradient is ever missing."""

    def __init__(self, config: ModelConfig, kernels: Kernels = AUTO):
        super().__init__()
        self.kernels = kernels
        experts, size = config.num_experts, config.expert_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.zeros(experts, 2 * size, config.hidden_size))
        self.down_proj = nn.Parameter(torch.zeros(experts, config.hidden_size, size))

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Apply each token's experts.

        Args:
            x: [T, H].
            weights: [T, K].
            chosen: int64 [T, K].

        Returns:
            [T, H] in x's type. The products run in autocast's type inside an autocast region (no
            kernel would follow it by itself), in x's type outside.
        """
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        with torch.autocast(device, enabled=False):
            return self._kernel(x.device, dtype)(x, self.gate_up_proj, self.down_proj, weights, chosen, dtype)

    def _kernel(self, device: torch.device, dtype: torch.dtype) -> Callable[..., Tensor]:
        """The kernel that was asked for; a function of device, types and sizes alone, never of timing.

        Where `grouped` cannot run it is not taken: samples are drawn in fp32 from a model that trains in
        bf16. That it can where it trains is checked before (`experts_obstacle`).
        """
        if self.kernels.experts == "reference":
            return _reference_experts
        _, hidden, intermediate = self.down_proj.shape
        if self.kernels.experts == "streamed" or grouped_obstacle(device, dtype, hidden, intermediate):
            return streamed_experts  # pyright: ignore[reportReturnType] (torch's stub of disable)
        return grouped_experts
