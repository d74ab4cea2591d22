"""Our Triton kernels under Triton's interpreter against float64; prints the largest relative error by type.

Run with TRITON_INTERPRET=1, which must be set before Triton is imported. bf16 is left out: the interpreter
multiplies it wrongly.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

from llm_pretrain.model.kernels import cross_entropy, grouped_mm, loss

SIZES = ([5, 0, 70, 1], [0, 0, 3], [64, 64], [0, 130, 0])
"""Rows of each group: empty, less than a tile, exactly one, more than two."""
K, N = 40, 72


def _error(found: Tensor | None, expected: Tensor | None) -> float:
    assert found is not None
    assert expected is not None
    return ((found.double() - expected).norm() / expected.norm()).item()


def _largest(*errors: float) -> float:
    return torch.tensor(errors).max().item()  # NaN if any is, as the built-in is not


def grouped_mm_error(dtype: torch.dtype) -> float:
    """The largest over results and gradients, groups of all sizes, and weights in both memory orders."""
    generator = torch.Generator().manual_seed(0)
    errors = []
    for sizes in SIZES:
        for transposed in (False, True):
            x = torch.randn(sum(sizes), K, generator=generator).to(dtype).requires_grad_()
            shape = (len(sizes), N, K) if transposed else (len(sizes), K, N)
            stored = torch.randn(*shape, generator=generator).to(dtype)
            weight = (stored.transpose(1, 2) if transposed else stored).requires_grad_()
            ends = torch.tensor(sizes).cumsum(0).int()
            out = grouped_mm.grouped_mm(x, weight, ends)
            grad = torch.randn(out.shape, generator=generator).to(dtype)
            out.backward(grad)
            x64, weight64 = (each.detach().double().requires_grad_() for each in (x, weight))
            out64 = torch.cat([rows @ part for rows, part in zip(x64.split(sizes), weight64, strict=True)])
            out64.backward(grad.double())
            pairs = ((out, out64), (x.grad, x64.grad), (weight.grad, weight64.grad))
            errors += [_error(*pair) for pair in pairs]
    return _largest(*errors)


def softmax_gradient_error(dtype: torch.dtype) -> float:
    """The largest over losses, squares and gradients; with a z-loss, a masked row, labels in every block."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(5, 2 * cross_entropy._COLUMNS + 77, generator=generator) * 3).to(dtype)
    labels = torch.tensor([0, 4095, 4096, logits.shape[1] - 1, 7])
    mask, scales = torch.tensor([1, 1, 1, 1, 0]).bool(), loss.Scales(0.5, 0.01)
    exact = logits.double().requires_grad_()
    lse = exact.logsumexp(-1)
    losses = torch.where(mask, lse - exact.gather(1, labels[:, None])[:, 0], 0)
    squares = torch.where(mask, lse.square(), 0)
    (scales.loss * losses + scales.z_loss * squares).sum().backward()
    found = loss._softmax_gradient_on_gpu(logits, labels, mask, scales)
    return _largest(_error(found[0], losses), _error(found[1], squares), _error(logits, exact.grad))


if __name__ == "__main__":
    checks = (grouped_mm_error, softmax_gradient_error)
    types = (torch.float32, torch.float16)
    print(json.dumps({f"{check.__name__} {dtype}": check(dtype) for check in checks for dtype in types}))
