"""Matrix products into given memory, by the library that is fast on this processor. No gradients.

torch gives fp32 products on a CPU to MKL, which leaves AVX-512 unused on processors that are not Intel's:
oneDNN, which has the low types anyway, takes less than half the time there.
"""

from __future__ import annotations

import functools
import platform
from pathlib import Path

import torch
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


def product(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """`left @ right` into `out`, [M, K] and [K, N] of one type, either of them transposed."""
    if out.dtype == torch.float32 and out.device.type == "cpu" and prefers_onednn():
        return out.copy_(fp32_product(left, right))
    return torch.mm(left, right, out=out)


def fp32_product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right` by oneDNN, fp32 [M, K] and [K, N] on a CPU."""
    return torch.ops.mkldnn._linear_pointwise(left, right.t(), None, "none", [], "")
