"""Orthogonalising matrices by Newton-Schulz iterations, many of one shape at a time: arithmetic alone.

Shapes: n matrices, r rows, c columns, s the smaller and l the larger of the two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic `a·X + b·XXᵀX + c·(XXᵀ)²X`: steep at zero, so that small singular values grow fast, at the
price of ending between 0.7 and 1.2 rather than at 1 (kellerjordan.github.io/posts/muon)."""
STEPS, EPSILON = 5, 1e-7


def product_dtype(device: torch.device, in_bf16: bool = True) -> torch.dtype:
    """bf16, which is exact enough for directions, where it is allowed and the products are faster in it.

    Without AVX-512 BF16 or AMX a CPU emulates bf16. Four times as fast as fp32 with it.
    """
    if not in_bf16:
        return torch.float32
    if device.type != "cpu":
        return torch.bfloat16
    return torch.bfloat16 if _cpu_has_bf16() else torch.float32


def _cpu_has_bf16() -> bool:
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)  # no public name tells
    return bool(supported and supported())


def orthogonalized(matrices: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """The nearest semi-orthogonal matrices, nearly: singular vectors kept, singular values made about 1.

    Args:
        matrices: Each [n, r, c] or [n, c, r] with the same r and c, on one device; n may differ.
        dtype: Of the products. Default: `product_dtype` of the device.

    Returns:
        The same shapes, in the type of the products.
    """
    dtype = dtype or product_dtype(matrices[0].device)
    upright = [matrix.shape[-2] > matrix.shape[-1] for matrix in matrices]
    wide = [each.mT if flip else each for each, flip in zip(matrices, upright, strict=True)]
    counts = [len(each) for each in wide]
    stacked = torch.empty((sum(counts), *wide[0].shape[1:]), dtype=dtype, device=wide[0].device)
    for place, each in zip(stacked.split(counts), wide, strict=True):
        place.copy_(each)
    parts = newton_schulz(stacked).split(counts)
    return [part.mT if flip else part for part, flip in zip(parts, upright, strict=True)]


def newton_schulz(x_nsl: Tensor) -> Tensor:
    """Five quintic iterations on [n, s, l], which is overwritten; by Gram matrices of the smaller side."""
    a, b, c = COEFFICIENTS
    # the Frobenius norm bounds the spectral norm, and the iteration converges from at most 1
    norms = torch.linalg.vector_norm(x_nsl, dim=(-2, -1), keepdim=True)
    x_nsl = x_nsl.div_(norms.clamp(min=EPSILON))
    for _ in range(STEPS):
        gram_nss = torch.bmm(x_nsl, x_nsl.mT)
        polynomial_nss = torch.baddbmm(gram_nss, gram_nss, gram_nss, beta=b, alpha=c)
        x_nsl = torch.baddbmm(x_nsl, polynomial_nss, x_nsl, beta=a)
    return x_nsl
