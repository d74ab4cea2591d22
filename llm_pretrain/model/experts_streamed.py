"""Experts one after the other in one autograd function: the kernel for a CPU, right in every type.

Tokens are sorted by expert once; each expert's rows stay in the cache from the gather to the scatter;
gradients are written in place into one tensor per parameter. On CUDA it is right but waits for the
device, once per call.

Shapes: T tokens, R = T*K assignments sorted by expert, n rows of one expert, H, E, I as in experts.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _sort_by_expert(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor, list[tuple[int, int, int]]]:
    """Sorted assignments [R], the token of each [R], and (expert, start, stop) of every non-empty run."""
    sorted_chosen, order = chosen.flatten().sort(stable=True)
    experts = torch.arange(num_experts, device=chosen.device)
    stops = torch.searchsorted(sorted_chosen, experts, right=True).tolist()
    runs = zip(range(num_experts), [0, *stops[:-1]], stops, strict=True)
    return order, order // chosen.shape[1], [run for run in runs if run[1] < run[2]]


class _StreamedExperts(torch.autograd.Function):
    """The routing weight is applied before `down_proj`: then its gradient needs no saved output."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        weights: Tensor,
        chosen: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        order, token, runs = _sort_by_expert(chosen, len(gate_up))
        x_low, gate_up_low, down_low = x.to(dtype), gate_up.to(dtype), down.to(dtype)
        weight_R1 = weights.flatten()[order, None].to(dtype)
        gate_up_R = x_low.new_empty(len(order), gate_up.shape[1])
        out_TH = torch.zeros_like(x, dtype=torch.promote_types(dtype, x.dtype))
        for e, start, stop in runs:
            rows = token[start:stop]
            torch.mm(x_low[rows], gate_up_low[e].t(), out=gate_up_R[start:stop])
            gate, up = gate_up_R[start:stop].chunk(2, -1)
            product = F.silu(gate).mul_(up).mul_(weight_R1[start:stop])
            out_TH.index_add_(0, rows, (product @ down_low[e].t()).to(out_TH.dtype))
        ctx.save_for_backward(x_low, gate_up_low, down_low, weight_R1, gate_up_R, order, token)
        ctx.runs, ctx.weights_like = runs, weights
        ctx.dtypes = x.dtype, gate_up.dtype, down.dtype
        return out_TH.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gate_up, down, weight_R1, gate_up_R, order, token = ctx.saved_tensors
        x_dtype, gate_up_dtype, down_dtype = ctx.dtypes
        grad_out = grads[0].to(x.dtype)
        grad_x = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, x_dtype))
        grad_gate_up = torch.empty_like(gate_up, dtype=gate_up_dtype)
        grad_down = torch.empty_like(down, dtype=down_dtype)
        grad_weights = torch.empty_like(ctx.weights_like).flatten()
        used = {e for e, _, _ in ctx.runs}
        for e in range(len(gate_up)):
            if e not in used:
                grad_gate_up[e].zero_()
                grad_down[e].zero_()
        for e, start, stop in ctx.runs:
            rows, weight = token[start:stop], weight_R1[start:stop]
            grad_rows = grad_out[rows]
            gate, up = gate_up_R[start:stop].chunk(2, -1)
            silu = F.silu(gate)
            product = silu * up
            grad_product = grad_rows @ down[e]
            grad_weights[order[start:stop]] = (grad_product * product).sum(-1, dtype=grad_weights.dtype)
            _mm_into(grad_down[e], grad_rows.t(), product.mul_(weight))
            grad_product.mul_(weight)
            grad_hidden = torch.empty_like(gate_up_R[start:stop])
            grad_gate, grad_up = grad_hidden.chunk(2, -1)
            torch.mul(grad_product, silu, out=grad_up)
            torch.ops.aten.silu_backward.grad_input(grad_product.mul_(up), gate, grad_input=grad_gate)
            _mm_into(grad_gate_up[e], grad_hidden.t(), x[rows])
            grad_x.index_add_(0, rows, (grad_hidden @ gate_up[e]).to(grad_x.dtype))
        grad_weights = grad_weights.view_as(ctx.weights_like)
        return grad_x.to(x_dtype), grad_gate_up, grad_down, grad_weights, None, None


def _mm_into(target: Tensor, left: Tensor, right: Tensor) -> None:
    """Write `left @ right` into `target`, through a temporary only where the types differ."""
    if target.dtype == left.dtype:
        torch.mm(left, right, out=target)
    else:
        target.copy_(left @ right)


def streamed_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor, dtype: torch.dtype
) -> Tensor:
    """`experts_reference` with the products in `dtype`; sums over experts in the wider of it and x's type."""
    return _StreamedExperts.apply(x, gate_up, down, weights, chosen, dtype)  # pyright: ignore[reportReturnType] (torch's stub of apply)
