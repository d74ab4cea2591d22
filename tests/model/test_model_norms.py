"""RMSNorm on a CPU is the formula in fp32, whatever it reads and writes and however many take its result."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llm_pretrain.model import norms
from llm_pretrain.model.norms import RMSNorm


def formula(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x, weight = x.double(), weight.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    # A mean that is not zero: what layer normalisation would take away.
    return (torch.randn(shape, dtype=torch.float64) + 1).to(dtype)


@pytest.mark.parametrize("copies", [0, 1, 3])
@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True)]
)
def test_result_and_gradients_are_the_formulas(monkeypatch, dtype, autocast, copies):
    monkeypatch.setattr(norms, "_CHUNK_ELEMENTS", 5 * 24)  # several parts, the last one shorter
    torch.manual_seed(0)
    norm, x = RMSNorm(24, 1e-3), drawn(2, 7, 24, dtype=dtype).requires_grad_()
    norm.weight.data.copy_(drawn(24))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = norm(x, copies)
    outs = found if copies else (found,)
    assert len(outs) == max(1, copies)
    low = bool(copies) and autocast
    assert {out.dtype for out in outs} == {torch.bfloat16 if low else torch.float32}
    expected = formula(x, norm.weight, 1e-3)
    for out in outs:
        torch.testing.assert_close(out.double(), expected, rtol=2**-8 if low else 1e-6, atol=1e-6)

    grads = [drawn(2, 7, 24, dtype=out.dtype) for out in outs]
    mine = torch.autograd.grad(outs, (x, norm.weight), grads)
    theirs = torch.autograd.grad(expected, (x, norm.weight), torch.stack([g.double() for g in grads]).sum(0))
    for name, own, other in zip(("x", "weight"), mine, theirs, strict=True):
        # Sums of several gradients are wide: no bound here is that of bf16 but for what bf16 must hold.
        bound = 2**-8 if own.dtype == torch.bfloat16 else 1e-6
        assert (own.double() - other).norm() < bound * other.norm(), name


def test_gradients_are_those_of_finite_differences():
    norm, x = RMSNorm(6, 1e-5).double(), drawn(4, 6, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, w: torch.func.functional_call(norm, {"weight": w}, x), (x, norm.weight)
    )


def test_a_model_cast_to_bf16_gets_bf16():
    norm, x = RMSNorm(24, 1e-5).bfloat16(), drawn(3, 24, dtype=torch.bfloat16)
    assert norm(x).dtype == norm(x, 2)[1].dtype == torch.bfloat16
