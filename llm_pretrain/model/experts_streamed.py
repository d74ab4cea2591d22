"""Experts one after the other in one autograd function: the kernel for a CPU, right in every type.

Tokens are sorted by expert once. Each expert's rows go through a few small buffers that stay in the
cache from the gather to the scatter, and gradients are written in place into one tensor per parameter.
On CUDA it is right but waits for the device, once per call.

Shapes: T tokens, R = T*K assignments sorted by expert, n rows of one expert, H, E, I as in experts.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class _Run(NamedTuple):
    """One expert's rows: assignments start to stop in sorted order, and their tokens [n]."""

    expert: int
    start: int
    stop: int
    token: Tensor


def _sort_by_expert(chosen: Tensor, num_experts: int) -> tuple[Tensor, list[_Run]]:
    """The sorted assignments [R], and the run of every expert that has one."""
    sorted_chosen, order = chosen.flatten().sort(stable=True)
    token = order // chosen.shape[1]
    experts = torch.arange(num_experts, device=chosen.device)
    stops = torch.searchsorted(sorted_chosen, experts, right=True).tolist()
    bounds = zip(range(num_experts), [0, *stops[:-1]], stops, strict=True)
    return order, [_Run(e, start, stop, token[start:stop]) for e, start, stop in bounds if start < stop]


class _Buffers:
    """Memory for one expert at a time, reused by all of them: fresh memory would cost page faults."""

    def __init__(self, runs: list[_Run], gate_up: Tensor, down: Tensor, dtype: torch.dtype):
        rows = max((run.stop - run.start for run in runs), default=0)
        _, hidden, intermediate = down.shape

        def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=down.device)

        self.hidden, self.hidden_2 = empty(rows, hidden), empty(rows, hidden)
        self.inner, self.inner_2, self.inner_3 = (empty(rows, intermediate) for _ in range(3))
        self.gate_up = empty(rows, 2 * intermediate)
        self.wide = empty(rows, hidden, dtype=torch.promote_types(dtype, torch.float32))
        self.casts = dtype != gate_up.dtype
        if self.casts:
            self.gate_up_weight, self.gate_up_weight_2 = empty(*gate_up.shape[1:]), empty(*gate_up.shape[1:])
            self.down_weight, self.down_weight_2 = empty(*down.shape[1:]), empty(*down.shape[1:])

    def weights(self, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        """One expert's weights in the products' type."""
        if not self.casts:
            return gate_up, down
        return self.gate_up_weight.copy_(gate_up), self.down_weight.copy_(down)

    def add_rows(self, target: Tensor, token: Tensor, rows: Tensor) -> None:
        """Add rows [n, H] to the tokens' rows of the target, in the target's type."""
        if rows.dtype != target.dtype:
            rows = self.wide[: len(rows)].copy_(rows)
        target.index_add_(0, token, rows)


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
        order, runs = _sort_by_expert(chosen, len(gate_up))
        buffers = _Buffers(runs, gate_up, down, dtype)
        x_low = x.to(dtype)
        weight_R1 = weights.flatten()[order, None].to(dtype)
        gate_up_R = x_low.new_empty(len(order), gate_up.shape[1])
        silu_R = x_low.new_empty(len(order), down.shape[2])
        out = torch.zeros_like(x, dtype=torch.promote_types(dtype, torch.float32))
        for e, start, stop, token in runs:
            n, run = stop - start, slice(start, stop)
            gate_up_e, down_e = buffers.weights(gate_up[e], down[e])
            rows = torch.index_select(x_low, 0, token, out=buffers.hidden[:n])
            torch.mm(rows, gate_up_e.t(), out=gate_up_R[run])
            gate, up = gate_up_R[run].chunk(2, -1)
            silu = torch.ops.aten.silu.out(gate, out=silu_R[run])
            product = torch.mul(silu, up, out=buffers.inner[:n]).mul_(weight_R1[run])
            buffers.add_rows(out, token, torch.mm(product, down_e.t(), out=buffers.hidden[:n]))
        ctx.save_for_backward(x, gate_up, down, weights, order, weight_R1, gate_up_R, silu_R)
        ctx.runs = runs
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gate_up, down, weights, order, weight_R1, gate_up_R, silu_R = ctx.saved_tensors
        buffers = _Buffers(ctx.runs, gate_up, down, gate_up_R.dtype)
        x_low, grad_out = x.to(gate_up_R.dtype), grads[0].to(gate_up_R.dtype)
        grad_x = torch.zeros_like(x, dtype=torch.promote_types(x_low.dtype, torch.float32))
        grad_gate_up, grad_down = torch.empty_like(gate_up), torch.empty_like(down)
        grad_weight_R = weights.new_empty(len(order))
        for e in set(range(len(gate_up))).difference(run.expert for run in ctx.runs):
            grad_gate_up[e].zero_()
            grad_down[e].zero_()
        for e, start, stop, token in ctx.runs:
            n, run = stop - start, slice(start, stop)
            gate_up_e, down_e = buffers.weights(gate_up[e], down[e])
            (gate, up), silu, weight = gate_up_R[run].chunk(2, -1), silu_R[run], weight_R1[run]
            grad_rows = torch.index_select(grad_out, 0, token, out=buffers.hidden[:n])
            product = torch.mul(silu, up, out=buffers.inner[:n])
            grad_product = torch.mm(grad_rows, down_e, out=buffers.inner_2[:n])
            per_row = torch.mul(grad_product, product, out=buffers.inner_3[:n])
            torch.sum(per_row, -1, dtype=weights.dtype, out=grad_weight_R[run])
            _product_into(grad_down[e], grad_rows, product.mul_(weight), buffers, "down_weight_2")
            grad_product.mul_(weight)
            grad_gate, grad_up = buffers.gate_up[:n].chunk(2, -1)
            torch.mul(grad_product, silu, out=grad_up)
            torch.ops.aten.silu_backward.grad_input(grad_product.mul_(up), gate, grad_input=grad_gate)
            rows = torch.index_select(x_low, 0, token, out=buffers.hidden_2[:n])
            _product_into(grad_gate_up[e], buffers.gate_up[:n], rows, buffers, "gate_up_weight_2")
            buffers.add_rows(grad_x, token, torch.mm(buffers.gate_up[:n], gate_up_e, out=buffers.hidden[:n]))
        grad_weights = torch.empty_like(grad_weight_R).index_copy_(0, order, grad_weight_R)
        return grad_x.to(x.dtype), grad_gate_up, grad_down, grad_weights.view(weights.shape), None, None


def _product_into(target: Tensor, left: Tensor, right: Tensor, buffers: _Buffers, spare: str) -> None:
    """Write `left.T @ right` into a weight's gradient, by way of a buffer where the types differ."""
    if target.dtype == left.dtype:
        torch.mm(left.t(), right, out=target)
    else:
        target.copy_(torch.mm(left.t(), right, out=getattr(buffers, spare)))


def streamed_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor, dtype: torch.dtype
) -> Tensor:
    """`experts_reference` with the products in `dtype`, sums over experts in at least fp32; x's type."""
    return _StreamedExperts.apply(x, gate_up, down, weights, chosen, dtype)  # pyright: ignore[reportReturnType] (torch's stub of apply)
