"""RMSNorm on a CPU is the formula in fp32, and linear maps may share an input."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llm_pretrain.model.kernels import layers
from llm_pretrain.model.kernels.layers import apply_linears
from llm_pretrain.model.layers import Linear, RMSNorm


def formula(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x, weight = x.double(), weight.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    # A mean that is not zero: what layer normalisation would take away.
    return (torch.randn(shape, dtype=torch.float64) + 1).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_result_and_gradients_are_the_formulas(monkeypatch, dtype):
    monkeypatch.setattr(layers, "_NORM_CHUNK", 5 * 24)  # several parts, the last one shorter
    torch.manual_seed(0)
    norm, x = RMSNorm(24, 1e-3), drawn(2, 7, 24, dtype=dtype).requires_grad_()
    norm.weight.data.copy_(drawn(24))
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32):
        found = norm(x)
    assert found.dtype == torch.float32
    expected = formula(x, norm.weight, 1e-3)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    grad = drawn(2, 7, 24)
    mine = torch.autograd.grad(found, (x, norm.weight), grad)
    theirs = torch.autograd.grad(expected, (x, norm.weight), grad.double())
    for name, own, other in zip(("x", "weight"), mine, theirs, strict=True):
        bound = 2**-8 if own.dtype == torch.bfloat16 else 1e-6
        assert (own.double() - other).norm() < bound * other.norm(), name


@pytest.mark.parametrize("autocast", [False, True])
def test_linear_maps_of_one_input_share_its_copy_and_sum_its_gradients_in_fp32(autocast):
    """Gradients are those of float64 for the low-precision gradients of each map; a bf16 sum would be off."""
    torch.manual_seed(0)
    maps = [Linear(24, 16) for _ in range(3)]
    for each in maps:
        torch.nn.init.normal_(each.weight)
    x, saved = drawn(50, 24).requires_grad_(), []
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t),
    ):
        outs = apply_linears(x, *maps)
        assert all(torch.equal(out, each(x)) for out, each in zip(outs, maps, strict=True))
        inputs = {t.untyped_storage().data_ptr() for t in saved[:6] if t.shape == x.shape}
    assert len(inputs) == 1
    low = torch.bfloat16 if autocast else torch.float32
    grads = [drawn(50, 16, dtype=low) for _ in maps]
    (found,) = torch.autograd.grad(outs, x, grads)
    each = [(g.double() @ m.weight.to(low).double()).to(low) for g, m in zip(grads, maps, strict=True)]
    torch.testing.assert_close(found.double(), sum(e.double() for e in each), rtol=1e-5, atol=1e-5)
