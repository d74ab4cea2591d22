"""RMSNorm, in at least fp32 whatever autocast says, with its result ready for the products that share it.

On a CPU a few rows at a time, so that what lies between two operations stays in the processor's cache. The
residual stream and the heads are the callers'; no other normalisation.

Shapes: R rows, N the normalised size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from llm_pretrain.model.layers import at_least_fp32, for_products, product_dtype, row_parts

_CHUNK_ELEMENTS = 1 << 18
"""Elements worked on at a time on a CPU: half and twice as many take 5 to 20 % longer."""


class _RMSNormFunction(torch.autograd.Function):
    """`copies` times `x / rms(x) * weight` in `dtype`; keeps x and its scales for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, copies: int
    ) -> tuple[Tensor, ...]:
        rows, wide_weight = x.reshape(-1, x.shape[-1]), at_least_fp32(weight)
        scale = rows.new_empty(len(rows), 1, dtype=torch.promote_types(x.dtype, torch.float32))
        out = torch.empty(x.shape, dtype=dtype)
        for part, part_scale, into in row_parts(_CHUNK_ELEMENTS, rows, scale, out.view(rows.shape)):
            wide = at_least_fp32(part)
            torch.linalg.vector_norm(wide, dim=-1, keepdim=True, out=part_scale)
            part_scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
            into.copy_((wide * part_scale).mul_(wide_weight))
        ctx.save_for_backward(x, weight, scale)
        return (out, *(out.view_as(out) for _ in range(copies - 1)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator hides the name)
        x, weight, scale = ctx.saved_tensors
        rows, wide_weight = x.reshape(-1, x.shape[-1]), at_least_fp32(weight)
        grad_x, grad_weight = torch.empty_like(rows), torch.zeros_like(wide_weight)
        given = (grad.reshape(rows.shape) for grad in grads)
        for part, part_scale, into, *parts in row_parts(_CHUNK_ELEMENTS, rows, scale, grad_x, *given):
            on_part, on_weight = _gradients(at_least_fp32(part), part_scale, wide_weight, _wide_sum(parts))
            into.copy_(on_part)
            grad_weight.add_(on_weight)
        return grad_x.view(x.shape), grad_weight.to(weight.dtype), None, None, None


def _gradients(x: Tensor, scale: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `x * scale * weight` for x [R, N] and weight [N], all in one type.

    By layer normalisation's kernel, two passes in the place of nine. Told that the mean is zero it differs
    from ours in one term only: it takes the row's mean of `grad * weight`, times scale, away.
    """
    size = len(weight)
    mean = torch.zeros_like(scale)
    on_x, on_weight, _ = torch.ops.aten.native_layer_norm_backward(
        grad, x, [size], mean, scale, weight, None, [True, True, False]
    )
    taken = torch.mv(grad, weight)[:, None].mul_(scale).div_(size)
    return on_x.add_(taken), on_weight


def _wide_sum(parts: list[Tensor]) -> Tensor:
    """Their sum in at least fp32; a single one as it is."""
    first, *others = parts
    total = at_least_fp32(first)
    if others and total is first:
        total = first.clone()
    for each in others:
        total.add_(each)
    return total


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension (arXiv:1910.07467), in at least fp32.

    The result has the wider of the input's and the weight's types: fp32 under autocast, where the
    parameters are fp32, and bf16 in a model that was cast to bf16 as a whole.
    """

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, copies: int = 0) -> Tensor | tuple[Tensor, ...]:
        """x [..., N] normalised; with `copies` as `for_products` would give it to so many products."""
        out_dtype = torch.promote_types(x.dtype, self.weight.dtype)
        if x.device.type == "cpu" and not torch.compiler.is_compiling():
            low = product_dtype(x) if copies else out_dtype
            dtype = low if low.itemsize < out_dtype.itemsize else out_dtype
            out = _RMSNormFunction.apply(x, self.weight, self.eps, dtype, max(1, copies))
            return out if copies else out[0]  # pyright: ignore[reportOptionalSubscript, reportReturnType, reportIndexIssue] (torch's stub of apply)
        weight = at_least_fp32(self.weight)
        normed = F.rms_norm(at_least_fp32(x), weight.shape, weight, self.eps).to(out_dtype)
        return for_products(normed, copies) if copies else normed
