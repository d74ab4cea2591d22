"""Experts one after the other in one autograd function: the kernel for a CPU, right in every type.

Tokens are sorted by expert once. Gradients are written in place into one tensor per parameter. On CUDA it is
right but waits for the device, once per call.

Shapes: T tokens, R = T*K assignments sorted by expert, n rows of one expert, P rows of all of them, padding
included, H, E, I as in experts.py. Where torch multiplies, activations [n, 2I] lie column by column: so gate
and up are blocks of memory, which elementwise operations run through without a remainder per row. oneDNN's
fp32 copies a left side that does not lie row by row, so there they do.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from llm_pretrain.model.products import builds_code_per_shape, product, uses_onednn

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
        if self.collects:
            self.rows_PH = torch.empty(len(rows.token), like.shape[1], dtype=dtype, device=like.device)
            self.parts = self.rows_PH.split(rows.sizes)
        else:
            self.sum = torch.zeros(like.shape, dtype=dtype, device=like.device)

    def add(self, part: _Part, left: Tensor, right: Tensor) -> None:
        """Add the rows `left @ right` of an expert."""
        if self.collects:
            product(left, right, self.parts[part.expert])
        else:
            self.sum.index_add_(0, part.token, product(left, right))

    def total(self) -> Tensor:
        """[T, H] in the type of `like`."""
        if not self.collects:
            return self.sum.to(self.like.dtype)
        return F.embedding_bag(self.rows.position, self.rows_PH, mode="sum").to(self.like.dtype)


class _Part(NamedTuple):
    """An expert that has rows: its number, its rows' tokens [n] and their routing weights [n, 1]."""

    expert: int
    token: Tensor
    weight: Tensor


def _parts(rows: _Rows, weight_P: Tensor) -> list[_Part]:
    columns = zip(rows.token.split(rows.sizes), weight_P[:, None].split(rows.sizes), strict=True)
    return [_Part(expert, *column) for expert, column in enumerate(columns) if rows.sizes[expert]]


def _activations(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right`, [n, ...], in the memory order that suits its type."""
    return product(left, right) if uses_onednn(left) else product(right.t(), left.t()).t()


def _write_product(gradient: Tensor, left: Tensor, right: Tensor) -> None:
    """Write `left @ right` into the gradient of a weight, of whatever type."""
    if gradient.dtype == left.dtype:
        product(left, right, gradient)
    else:
        gradient.copy_(product(left, right))


class _StreamedExperts(torch.autograd.Function):
    """The routing weight is applied before `down_proj`: then its gradient needs no saved output.

    Weights are cast where they are needed, in both passes: reading kept casts from memory costs the products
    as much as a cast does.
    """

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
        rows = _sort_by_expert(chosen, len(gate_up), dtype)
        x_low = x.to(dtype)
        weight_P = x_low.new_zeros(len(rows.token)).index_copy_(
            0, rows.position.flatten(), weights.flatten().to(dtype)
        )
        gate_ups, downs, size = gate_up.unbind(0), down.unbind(0), down.shape[2]
        out, saved = _Sum(rows, x, dtype), []
        for part in _parts(rows, weight_P):
            rows_e = x_low.index_select(0, part.token)
            both = _activations(rows_e, gate_ups[part.expert].to(dtype).t())
            gate, up = both.split(size, 1)
            silu = F.silu(gate)
            out.add(part, (silu * up).mul_(part.weight), downs[part.expert].to(dtype).t())
            saved += both, silu
        ctx.save_for_backward(x, gate_up, down, rows.token, rows.position, weight_P, *saved)
        ctx.sizes, ctx.weights_dtype = rows.sizes, weights.dtype
        return out.total()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gate_up, down, token, position, weight_P, *saved = ctx.saved_tensors
        rows, dtype, size = _Rows(ctx.sizes, token, position), weight_P.dtype, down.shape[2]
        x_low, grad_low = x.to(dtype), grads[0].to(dtype)
        gate_ups, downs = gate_up.unbind(0), down.unbind(0)
        grad_x, grad_gate_up, grad_down = (
            _Sum(rows, x, dtype),
            torch.empty_like(gate_up),
            torch.empty_like(down),
        )
        grad_gate_ups, grad_downs = grad_gate_up.unbind(0), grad_down.unbind(0)
        grad_weight_P = weight_P.new_empty(len(token), dtype=ctx.weights_dtype)
        grad_weights = grad_weight_P.split(rows.sizes)
        for part, both, silu in zip(_parts(rows, weight_P), saved[::2], saved[1::2], strict=True):
            expert, (gate, up) = part.expert, both.split(size, 1)
            grad_rows = grad_low.index_select(0, part.token)
            grad = _activations(grad_rows, downs[expert].to(dtype))
            inner = silu * up
            torch.sum(inner * grad, 1, dtype=ctx.weights_dtype, out=grad_weights[expert])
            _write_product(grad_downs[expert], grad_rows.t(), inner.mul_(part.weight))
            grad.mul_(part.weight)
            grad_both = torch.empty_like(both)
            grad_gate, grad_up = grad_both.split(size, 1)
            torch.mul(grad, silu, out=grad_up)
            torch.ops.aten.silu_backward.grad_input(grad.mul_(up), gate, grad_input=grad_gate)
            _write_product(grad_gate_ups[expert], grad_both.t(), x_low.index_select(0, part.token))
            grad_x.add(part, grad_both, gate_ups[expert].to(dtype))
        for expert, count in enumerate(rows.sizes):
            if not count:
                grad_gate_ups[expert].zero_()
                grad_downs[expert].zero_()
        return grad_x.total(), grad_gate_up, grad_down, grad_weight_P[position], None, None


@torch.compiler.disable
def streamed_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor, dtype: torch.dtype
) -> Tensor:
    """`experts_reference` with the products in `dtype`, sums over experts in at least fp32; x's type.

    Its loops run over numbers that are known when it runs, so `torch.compile` leaves it out of its graphs.
    """
    return _StreamedExperts.apply(x, gate_up, down, weights, chosen, dtype)  # pyright: ignore[reportReturnType] (torch's stub of apply)
