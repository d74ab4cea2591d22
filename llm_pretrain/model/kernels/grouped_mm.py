"""Grouped matrix products in Triton, for GPUs, types and sizes that torch's own kernel does not support.

torch's `grouped_mm` needs bf16, compute capability 9.0 and aligned rows; elsewhere it copies the groups'
ends to the host, and waits. These kernels keep the ends on the device, in every type and for any number of
groups. They use no atomic operation, so that results are deterministic.

Shapes: R rows sorted by group, E groups, K columns of a row, N columns of a result; ends int32 [E], the first
row after each group.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports] (comes with torch's builds for GPUs)
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from torch.autograd.function import once_differentiable

_ROWS, _COLUMNS, _DEPTH = 64, 64, 32
"""Rows, columns and summed elements of the tile that a Triton program computes at a time."""


def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`x[r] @ weight[e]` for every row r, with e the row's group.

    Args:
        x: [R, K], rows sorted by group.
        weight: [E, K, N] in x's type, with any strides.
        ends: int32 [E].

    Returns:
        [R, N] in x's type; sums run in fp32.
    """
    return _GroupedProduct.apply(x, weight, ends)  # pyright: ignore[reportReturnType] (torch's stub of apply)


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return _rows_times_weights(x, weight, ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator hides the name)
        x, weight, ends = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_x = _rows_times_weights(grad, weight.transpose(1, 2), ends)
        # The gradient has the weight's memory order, so that accumulating it copies nothing.
        if weight.stride(2) == 1:
            return grad_x, _rows_times_rows(x, grad, ends), None
        return grad_x, _rows_times_rows(grad, x, ends).transpose(1, 2), None


@torch.library.custom_op("llm_pretrain::rows_times_weights", mutates_args=())
def _rows_times_weights(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`x[r] @ weight[e]`: [R, K] and [E, K, N] to [R, N]."""
    (rows, depth), (groups, _, columns) = x.shape, weight.shape
    # All rows of a tile are of one group. The device computes each tile's group and first row. Only the
    # device knows the number of tiles, so the largest possible number is started.
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    tile_ends = ((sizes + _ROWS - 1) // _ROWS).cumsum(0, dtype=torch.int32)
    tiles = torch.arange(triton.cdiv(rows, _ROWS) + groups, dtype=torch.int32, device=x.device)
    tile_group = torch.searchsorted(tile_ends, tiles, right=True, out_int32=True)
    out = x.new_empty(rows, columns)
    _rows_times_weights_kernel[len(tiles), triton.cdiv(columns, _COLUMNS)](  # pyright: ignore[reportIndexIssue]
        *(x, weight, out, ends, tile_ends, tile_group, groups, columns, depth),
        *(*x.stride(), *weight.stride(), *_tile_options(x)),
    )
    return out


@_rows_times_weights.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@torch.library.custom_op("llm_pretrain::rows_times_rows", mutates_args=())
def _rows_times_rows(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """`left_e.T @ right_e` over each group's rows: [R, K] and [R, N] to [E, K, N]; 0 for an empty group."""
    (_, depth), (_, columns), groups = left.shape, right.shape, len(ends)
    out = left.new_empty(groups, depth, columns)
    tiles = (triton.cdiv(depth, _ROWS), triton.cdiv(columns, _COLUMNS), groups)
    _rows_times_rows_kernel[tiles](  # pyright: ignore[reportIndexIssue]
        *(left, right, out, ends, depth, columns),
        *(*left.stride(), *right.stride(), *_tile_options(left)),
    )
    return out


@_rows_times_rows.register_fake
def _(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return left.new_empty(len(ends), left.shape[1], right.shape[1])


def _tile_options(x: Tensor) -> tuple[int | str, ...]:
    """The compile-time arguments of both kernels: a tile's sizes, and the precision of fp32 products."""
    allows_tf32 = torch.get_float32_matmul_precision() != "highest"
    return _ROWS, _COLUMNS, _DEPTH, "tf32" if allows_tf32 else "ieee"


@triton.jit
def _rows_times_weights_kernel(
    x, weight, out, ends, tile_ends, tile_group, groups, columns, depth,
    x_row, x_column, weight_group, weight_row, weight_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of `_rows_times_weights`."""
    tile = tl.program_id(0)
    group = tl.load(tile_group + tile)
    if group == groups:  # a tile beyond the actual number
        return
    is_first = group == 0
    first_tile = tl.load(tile_ends + group - 1, mask=not is_first, other=0)
    begin = tl.load(ends + group - 1, mask=not is_first, other=0)
    end = tl.load(ends + group)
    row = (begin + (tile - first_tile) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    weight += group.to(tl.int64) * weight_group
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, depth, DEPTH):
        k = start + tl.arange(0, DEPTH)
        left = tl.load(
            x + row[:, None] * x_row + k[None, :] * x_column,
            mask=(row[:, None] < end) & (k[None, :] < depth),
            other=0.0,
        )
        right = tl.load(
            weight + k[:, None] * weight_row + column[None, :] * weight_column,
            mask=(k[:, None] < depth) & (column[None, :] < columns),
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision=PRECISION)
    tl.store(
        out + row[:, None] * columns + column[None, :],
        total.to(out.dtype.element_ty),
        mask=(row[:, None] < end) & (column[None, :] < columns),
    )


@triton.jit
def _rows_times_rows_kernel(
    left, right, out, ends, depth, columns,
    left_row, left_column, right_row, right_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of `_rows_times_rows`."""
    group = tl.program_id(2)
    begin = tl.load(ends + group - 1, mask=group != 0, other=0)
    end = tl.load(ends + group)
    k = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(begin, end, DEPTH):
        row = (start + tl.arange(0, DEPTH)).to(tl.int64)
        a = tl.load(
            left + row[None, :] * left_row + k[:, None] * left_column,
            mask=(row[None, :] < end) & (k[:, None] < depth),
            other=0.0,
        )
        b = tl.load(
            right + row[:, None] * right_row + column[None, :] * right_column,
            mask=(row[:, None] < end) & (column[None, :] < columns),
            other=0.0,
        )
        total = tl.dot(a, b, total, input_precision=PRECISION)
    tl.store(
        out + group.to(tl.int64) * depth * columns + k[:, None] * columns + column[None, :],
        total.to(out.dtype.element_ty),
        mask=(k[:, None] < depth) & (column[None, :] < columns),
    )
