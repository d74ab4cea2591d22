"""Experts one after the other in one autograd function: the kernel for a CPU, right in every type.

Tokens are sorted by expert once. Each expert's rows go through a few small buffers that stay in the
cache from the gather to the scatter, and gradients are written in place into one tensor per parameter.
On CUDA it is right but waits for the device, once per call.

Shapes: T tokens, R = T*K assignments sorted by expert, n rows of one expert, P rows of all of them, padding
included, H, E, I as in experts.py. What lies between the products is transposed, [I, n]: so gate and up are
blocks of memory, which elementwise operations run through without a remainder per row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from llm_pretrain.model.products import builds_code_per_shape, product

_SIZE_BITS = 6
"""Rows are padded to sizes of this many significant bits: 32 sizes per octave, 1 % more rows."""


class _Rows(NamedTuple):
    """Where every assignment's row lies."""

    sizes: list[int]
    """Rows of each expert, padding included."""
    token: Tensor
    """int64 [P], each row's token; padding repeats the first one, with a routing weight of 0."""
    position: Tensor
    """int64 [T, K], each assignment's row."""


def _padded(rows: int) -> int:
    step = 1 << max(0, rows.bit_length() - _SIZE_BITS)
    return -(-rows // step) * step


def _sort_by_expert(chosen: Tensor, num_experts: int, dtype: torch.dtype) -> _Rows:
    """Sort the assignments, each expert's rows padded to a size that others will have too."""
    flat = chosen.flatten()
    if flat.device.type == "cpu" and num_experts < 2**15:
        # NumPy sorts 16-bit integers by radix, in a tenth of the time of torch's stable sort.
        order = torch.from_numpy(np.argsort(flat.to(torch.int16).numpy(), kind="stable"))
    else:
        order = flat.argsort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    sizes = counts.tolist()
    row = torch.arange(len(order), device=flat.device)
    if builds_code_per_shape(dtype, flat.device):
        sizes = [_padded(size) for size in sizes]
        padding = torch.tensor(sizes) - counts
        row += torch.repeat_interleave(padding.cumsum(0) - padding, counts)
    token = order.new_zeros(sum(sizes)).index_copy_(0, row, order // chosen.shape[1])
    position = torch.empty_like(order).index_copy_(0, order, row)
    return _Rows(sizes, token, position.view_as(chosen))


class _Sum:
    """The sum of each token's rows.

    Low types are collected, [P, H], and summed in one pass that accumulates in fp32: adding them to a wider
    sum expert by expert takes four times as long. Others are added at once and need no memory.
    """

    def __init__(self, rows: _Rows, like: Tensor, dtype: torch.dtype):
        self.rows, self.like = rows, like
        self.collects = dtype.itemsize < 4
        size = (len(rows.token) if self.collects else max(rows.sizes), like.shape[1])
        self.parts = torch.empty(size, dtype=dtype, device=like.device)
        if not self.collects:
            self.sum = torch.zeros(like.shape, dtype=dtype, device=like.device)

    def add(self, start: int, token: Tensor, left: Tensor, right: Tensor) -> None:
        """Add the rows `left @ right` of an expert whose first row is `start`."""
        start = start if self.collects else 0
        part = product(left, right, self.parts[start : start + len(token)])
        if not self.collects:
            self.sum.index_add_(0, token, part)

    def total(self) -> Tensor:
        """[T, H] in the type of `like`."""
        if not self.collects:
            return self.sum.to(self.like.dtype)
        return F.embedding_bag(self.rows.position, self.parts, mode="sum").to(self.like.dtype)


class _Part(NamedTuple):
    """One expert's share of what is saved: its number, its rows, and views of the saved tensors."""

    expert: int
    start: int
    size: int
    token: Tensor
    weight: Tensor
    """[n] routing weights."""
    gate_up: Tensor
    """[2I, n], gate above up."""
    gate: Tensor
    up: Tensor
    silu: Tensor
    """[I * n], as gate and up."""


def _parts(rows: _Rows, weight_P: Tensor, gate_up_flat: Tensor, silu_flat: Tensor) -> Iterator[_Part]:
    """The experts that have rows."""
    sizes, intermediate = rows.sizes, len(silu_flat) // max(1, len(rows.token))
    halves = gate_up_flat.split([intermediate * size for size in sizes for _ in range(2)])
    blocks = gate_up_flat.split([2 * intermediate * size for size in sizes])
    silus = silu_flat.split([intermediate * size for size in sizes])
    start = 0
    columns = zip(sizes, rows.token.split(sizes), weight_P.split(sizes), blocks, silus, strict=True)
    for expert, (size, token, weight, block, silu) in enumerate(columns):
        if size:
            gate_up = block.view(2 * intermediate, size)
            gate, up = halves[2 * expert : 2 * expert + 2]
            yield _Part(expert, start, size, token, weight, gate_up, gate, up, silu)
        start += size


class _Weights:
    """One expert's weights at a time in the products' type, cast when they are needed and not before.

    Keeping the casts of all experts for the backward pass saves no time: reading them from memory costs the
    products as much as a cast does.
    """

    def __init__(self, stacked: Tensor, dtype: torch.dtype):
        self.stacked = stacked.unbind(0)
        cast = dtype != stacked.dtype
        self.buffer = torch.empty(stacked.shape[1:], dtype=dtype, device=stacked.device) if cast else None

    def __getitem__(self, expert: int) -> Tensor:
        stacked = self.stacked[expert]
        return stacked if self.buffer is None else self.buffer.copy_(stacked)

    def write_gradient(self, gradient: Tensor, left: Tensor, right: Tensor) -> None:
        """Write `left @ right`; the buffer's weights are lost."""
        if self.buffer is None:
            product(left, right, gradient)
        else:
            gradient.copy_(product(left, right, self.buffer))


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
        hidden, size = down.shape[1:]
        rows = _sort_by_expert(chosen, len(gate_up), dtype)
        x_low = x.to(dtype)
        weight_P = x_low.new_zeros(len(rows.token)).index_copy_(
            0, rows.position.flatten(), weights.flatten().to(dtype)
        )
        gate_up_flat, silu_flat = (x_low.new_empty(len(rows.token) * width) for width in (2 * size, size))
        most = max(rows.sizes)
        gathered, inner = x_low.new_empty(most, hidden), x_low.new_empty(most * size)
        gate_up_weights, down_weights = _Weights(gate_up, dtype), _Weights(down, dtype)
        out = _Sum(rows, x, dtype)
        for part in _parts(rows, weight_P, gate_up_flat, silu_flat):
            rows_e = torch.index_select(x_low, 0, part.token, out=gathered[: part.size])
            product(gate_up_weights[part.expert], rows_e.t(), part.gate_up)
            torch.ops.aten.silu.out(part.gate, out=part.silu)
            weighted = (
                torch.mul(part.silu, part.up, out=inner[: len(part.up)]).view(size, -1).mul_(part.weight)
            )
            out.add(part.start, part.token, weighted.t(), down_weights[part.expert].t())
        ctx.save_for_backward(x, gate_up, down, rows.token, rows.position, weight_P, gate_up_flat, silu_flat)
        ctx.sizes, ctx.weights_dtype = rows.sizes, weights.dtype
        return out.total()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gate_up, down, token, position, weight_P, gate_up_flat, silu_flat = ctx.saved_tensors
        rows, dtype, (hidden, size) = _Rows(ctx.sizes, token, position), weight_P.dtype, down.shape[1:]
        x_low, grad_low = x.to(dtype), grads[0].to(dtype)
        most = max(rows.sizes)
        gathered = x_low.new_empty(most, hidden)
        buffers = [x_low.new_empty(most * width) for width in (size, size, size, 2 * size)]
        gate_up_weights, down_weights = _Weights(gate_up, dtype), _Weights(down, dtype)
        grad_x, grad_gate_up, grad_down = (
            _Sum(rows, x, dtype),
            torch.empty_like(gate_up),
            torch.empty_like(down),
        )
        grad_weight_P = weight_P.new_empty(len(token), dtype=ctx.weights_dtype)
        for part in _parts(rows, weight_P, gate_up_flat, silu_flat):
            count = len(part.up)
            inner, grad, spare, both = (buffer[: count * (1 + (buffer is buffers[3]))] for buffer in buffers)
            inner_2d, grad_2d, both_2d = inner.view(size, -1), grad.view(size, -1), both.view(2 * size, -1)
            grad_rows = torch.index_select(grad_low, 0, part.token, out=gathered[: part.size])
            product(down_weights[part.expert].t(), grad_rows.t(), grad_2d)
            torch.mul(torch.mul(part.silu, part.up, out=inner), grad, out=spare)
            torch.sum(
                spare.view(size, -1),
                0,
                dtype=grad_weight_P.dtype,
                out=grad_weight_P[part.start : part.start + part.size],
            )
            down_weights.write_gradient(grad_down[part.expert], grad_rows.t(), inner_2d.mul_(part.weight).t())
            grad_2d.mul_(part.weight)
            torch.mul(grad, part.silu, out=both[count:])
            torch.ops.aten.silu_backward.grad_input(grad.mul_(part.up), part.gate, grad_input=both[:count])
            rows_e = torch.index_select(x_low, 0, part.token, out=gathered[: part.size])
            gate_up_weights.write_gradient(grad_gate_up[part.expert], both_2d, rows_e)
            grad_x.add(part.start, part.token, both_2d.t(), gate_up_weights[part.expert])
        for expert, count in enumerate(rows.sizes):
            if not count:
                grad_gate_up[expert].zero_()
                grad_down[expert].zero_()
        return grad_x.total(), grad_gate_up, grad_down, grad_weight_P[position], None, None


@torch.compiler.disable
def streamed_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor, dtype: torch.dtype
) -> Tensor:
    """`experts_reference` with the products in `dtype`, sums over experts in at least fp32; x's type.

    Its loops run over numbers that are known when it runs, so `torch.compile` leaves it out of its graphs.
    """
    return _StreamedExperts.apply(x, gate_up, down, weights, chosen, dtype)  # pyright: ignore[reportReturnType] (torch's stub of apply)
