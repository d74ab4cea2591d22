"""Matrix products by the library that is fast on this processor, into given memory or with gradients.

torch gives fp32 products on a CPU to MKL, which leaves AVX-512 unused on processors that are not Intel's:
oneDNN, which has the low types anyway, takes less than half the time there.
"""

from __future__ import annotations

import functools
import platform
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@functools.cache
def prefers_onednn() -> bool:
    """Whether fp32 products of this processor belong to oneDNN: AVX-512, and not from Intel."""
    capable = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"
    return capable and "intel" not in _vendor().lower()


def _vendor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("vendor_id")), "")


def builds_code_per_shape(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a product's first call with new sizes is slow.

    oneDNN writes machine code for every combination of sizes, 0.3 ms each, and keeps the last 1024.
    """
    if device.type != "cpu":
        return False
    return dtype.itemsize < 4 or (dtype == torch.float32 and prefers_onednn())


def uses_onednn(x: Tensor) -> bool:
    """Whether a product in x's type, where x lies, is fp32 that belongs to oneDNN."""
    return x.dtype == torch.float32 and x.device.type == "cpu" and prefers_onednn()


def product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """`left @ right`, [M, K] and [K, N] of one type, either of them transposed; into `out` if given."""
    if uses_onednn(left):
        found = fp32_product(left, right)
        return found if out is None else out.copy_(found)
    return torch.mm(left, right, out=out)


def fp32_product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right` by oneDNN, fp32 [M, K] and [K, N] on a CPU."""
    return torch.ops.mkldnn._linear_pointwise(left, right.t(), None, "none", [], "")


class _Linear(torch.autograd.Function):
    """`F.linear` without bias, by `fp32_product`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return fp32_product(x.flatten(0, -2), weight.t()).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, len(weight))
        grad_x = fp32_product(grad, weight).view_as(x) if ctx.needs_input_grad[0] else None
        grad_weight = fp32_product(grad.t(), x.flatten(0, -2)) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T`, [..., in] and [out, in] of one type to [..., out]."""
    fits = x.device.type == "cpu" and x.dtype == torch.float32 and x.dim() > 1 and x.numel() > 0
    if fits and not torch.compiler.is_compiling() and prefers_onednn():
        return _Linear.apply(x, weight)  # pyright: ignore[reportReturnType] (torch's stub of apply)
    return F.linear(x, weight)
