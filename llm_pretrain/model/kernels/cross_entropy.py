"""The loss of each row of logits and its gradient in Triton.

The kernels move 6 bytes of memory per logit in bf16, a sequence of torch's operations 39. Shapes: C rows, V
vocab_size.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports] (comes with torch's builds for GPUs)
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

_COLUMNS = 4096
"""Logits of a row that a Triton program holds at a time."""


@torch.library.custom_op("llm_pretrain::log_partition", mutates_args=())
def log_partition(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """`logsumexp` of each row and the logit of the row's label, fp32 [C] each.

    Args:
        logits: [C, V] in fp32, bf16 or fp16.
        labels: int64 [C].
    """
    rows, columns = logits.shape
    lse, target = (logits.new_empty(rows, dtype=torch.float32) for _ in range(2))
    _log_partition_kernel[(rows,)](logits, labels, lse, target, columns, logits.stride(0), _COLUMNS)  # pyright: ignore[reportIndexIssue]
    return lse, target


@log_partition.register_fake
def _(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    lse = logits.new_empty(logits.shape[0], dtype=torch.float32)
    return lse, torch.empty_like(lse)


@torch.library.custom_op("llm_pretrain::write_softmax_gradient", mutates_args=("logits",))
def write_softmax_gradient(
    logits: Tensor, labels: Tensor, lse: Tensor, softmax_scale: Tensor, target_scale: Tensor
) -> None:
    """Overwrite logits by `softmax_scale * softmax`, plus `target_scale` at each row's label.

    Args:
        logits, labels, lse: The arguments and the first result of `log_partition`.
        softmax_scale, target_scale: fp32 [C].
    """
    rows, columns = logits.shape
    _gradient_kernel[(rows,)](  # pyright: ignore[reportIndexIssue]
        logits, labels, lse, softmax_scale, target_scale, columns, logits.stride(0), _COLUMNS
    )


@write_softmax_gradient.register_fake
def _(logits: Tensor, labels: Tensor, lse: Tensor, softmax_scale: Tensor, target_scale: Tensor) -> None:
    pass


@triton.jit
def _log_partition_kernel(logits, labels, lse, target, columns, stride, COLUMNS: tl.constexpr):
    """One row, block by block: the largest logit so far, and the sum of exponentials relative to it."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    largest, total = float("-inf"), 0.0
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        x = tl.load(logits + column, mask=column < columns, other=float("-inf")).to(tl.float32)
        highest = tl.maximum(largest, tl.max(x))
        total = total * tl.exp(largest - highest) + tl.sum(tl.exp(x - highest))
        largest = highest
    tl.store(lse + row, largest + tl.log(total))
    tl.store(target + row, tl.load(logits + tl.load(labels + row)).to(tl.float32))


@triton.jit
def _gradient_kernel(
    logits, labels, lse, softmax_scale, target_scale, columns, stride, COLUMNS: tl.constexpr
):  # fmt: skip
    """One row of `write_softmax_gradient`."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    label, partition = tl.load(labels + row), tl.load(lse + row)
    scale, on_target = tl.load(softmax_scale + row), tl.load(target_scale + row)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        x = tl.load(logits + column, mask=column < columns, other=0.0).to(tl.float32)
        gradient = tl.exp(x - partition) * scale + tl.where(column == label, on_target, 0.0)
        tl.store(logits + column, gradient.to(logits.dtype.element_ty), mask=column < columns)
