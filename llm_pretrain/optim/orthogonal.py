"""Orthogonalises matrices by Newton-Schulz iterations, with matrices of equal shape in one batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b, c of the quintic a·X + b·XXᵀX + c·(XXᵀ)²X. The polynomial is steep at zero, so small singular values
grow fast. They end between 0.7 and 1.2 instead of at 1 (kellerjordan.github.io/posts/muon)."""
STEPS, EPSILON = 5, 1e-7
BATCH_ELEMENTS = 1 << 24
"""Most elements in a batch, and most that a rank orthogonalises between two exchanges. A larger matrix is
a batch of its own."""


def product_dtype(device: torch.device, in_bf16: bool = True) -> torch.dtype:
    """Type of Muon's products: bf16 if it is allowed and faster on the device, else fp32.

    bf16 is precise enough for directions. A CPU with AVX-512 BF16, as every CPU with AMX, computes products
    in bf16 four times as fast as in fp32; other CPUs emulate bf16.
    """
    if not in_bf16:
        return torch.float32
    if device.type != "cpu":
        return torch.bfloat16
    return torch.bfloat16 if _cpu_has_bf16() else torch.float32


def _cpu_has_bf16() -> bool:
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)  # there is no public function
    return bool(supported and supported())


def orthogonalize(matrices: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Approximately the nearest semi-orthogonal matrices: same singular vectors, singular values near 1.

    Args:
        matrices: Each [n, r, c] or [n, c, r] with the same r and c, on one device; n may differ.
        dtype: Type of the products; default `product_dtype` of the device.

    Returns:
        The same shapes, in the type of the products.
    """
    dtype = dtype or product_dtype(matrices[0].device)
    tall = [matrix.shape[-2] > matrix.shape[-1] for matrix in matrices]
    wide = [each.mT if flip else each for each, flip in zip(matrices, tall, strict=True)]
    parts = newton_schulz(_stacked(wide, dtype)).split(
        [len(each) for each in wide]
    )  # the stack has no name, so the first iteration frees it
    return [part.mT if flip else part for part, flip in zip(parts, tall, strict=True)]


def _stacked(matrices: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    counts = [len(each) for each in matrices]
    x_nsl = torch.empty((sum(counts), *matrices[0].shape[1:]), dtype=dtype, device=matrices[0].device)
    for place, each in zip(x_nsl.split(counts), matrices, strict=True):
        place.copy_(each)
    return x_nsl


def newton_schulz(x_nsl: Tensor) -> Tensor:
    """`STEPS` quintic Newton-Schulz iterations on `x_nsl`, which is overwritten.

    Shapes: n matrices, s the smaller and l the larger side.
    """
    a, b, c = COEFFICIENTS
    # the iteration converges if the spectral norm is at most 1; the Frobenius norm bounds it
    norms = torch.linalg.vector_norm(x_nsl, dim=(-2, -1), keepdim=True)
    x_nsl = x_nsl.div_(norms.clamp(min=EPSILON))
    for _ in range(STEPS):
        gram_nss = torch.bmm(x_nsl, x_nsl.mT)
        polynomial_nss = torch.baddbmm(gram_nss, gram_nss, gram_nss, beta=b, alpha=c)
        x_nsl = torch.baddbmm(x_nsl, polynomial_nss, x_nsl, beta=a)
    return x_nsl
