"""Experts by grouped matrix products: the kernel for CUDA, without a wait for the device.

Tokens are sorted by expert once and the groups' ends stay on the device. Gathering into sorted order
and summing back are each other's gradient, so neither needs an atomic addition and both are
deterministic. `torch.compile` takes it whole.

Shapes: T tokens, R = T*K assignments sorted by expert, H, E, K, I as in experts.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_ALIGNMENT_BYTES = 16
"""grouped_mm wants rows that start at multiples of this."""


def grouped_obstacle(device: torch.device, dtype: torch.dtype, hidden: int, intermediate: int) -> str | None:
    """What `grouped_experts` would need and does not have, in words; None where it can run.

    CUDA's kernel takes bf16 and aligned rows only.

    Args:
        device: Where the experts are.
        dtype: Of their products.
        hidden: H.
        intermediate: I.
    """
    if device.type != "cuda":
        return f"a CUDA device instead of {device.type}"
    if dtype != torch.bfloat16:
        return f"products in bfloat16 instead of {str(dtype).removeprefix('torch.')}"
    unit = _ALIGNMENT_BYTES // dtype.itemsize
    if hidden % unit or intermediate % unit:
        sizes = f"multiples of {unit} instead of {hidden} and {intermediate}"
        return f"model.hidden_size and model.moe_intermediate_size in {sizes}"
    return None


class _Dispatch(torch.autograd.Function):
    """[T, ...] to sorted [R, ...]: each assignment's copy of its token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[token]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return grads[0][inverse].sum(1), None, None


class _Combine(torch.autograd.Function):
    """Sorted [R, ...] to [T, ...]: the sum over each token's assignments."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, token: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(token)
        return y[inverse].sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (token,) = ctx.saved_tensors
        return grads[0][token], None, None


def grouped_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor, dtype: torch.dtype
) -> Tensor:
    """`experts_reference` with the products in `dtype`; returns x's type."""
    # 32-bit keys: a radix sort takes half as many passes over them
    sorted_chosen, order = chosen.flatten().int().sort(stable=True)
    experts = torch.arange(len(gate_up), dtype=torch.int32, device=x.device)
    ends = torch.searchsorted(sorted_chosen, experts, right=True, out_int32=True)
    position = torch.arange(len(order), device=x.device)
    inverse_TK = torch.empty_like(order).scatter_(0, order, position).view_as(chosen)
    token_R = order // chosen.shape[1]

    x_R = _Dispatch.apply(x.to(dtype), token_R, inverse_TK)
    weight_R1 = _Dispatch.apply(weights.reshape(-1, 1), order, inverse_TK.view(-1, 1))
    gate, up = F.grouped_mm(x_R, gate_up.to(dtype).transpose(1, 2), offs=ends).chunk(2, -1)  # pyright: ignore[reportArgumentType] (torch's stub of apply)
    product = (F.silu(gate) * up * weight_R1).to(dtype)
    y_R = F.grouped_mm(product, down.to(dtype).transpose(1, 2), offs=ends)
    return _Combine.apply(y_R, token_R, inverse_TK).to(x.dtype)  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue] (torch's stub of apply)
