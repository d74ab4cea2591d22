"""The check of the kernels: sound ones pass in every type, and each mistake put into one is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.model import self_check
from llm_pretrain.model.kernels import attention, layers
from llm_pretrain.model.kernels import choice as kernels
from llm_pretrain.model.kernels.attention import DocumentLayout
from llm_pretrain.model.kernels.choice import Kernels
from llm_pretrain.model.kernels.layers import ACTIVATIONS
from llm_pretrain.model.kernels.loss import LossSums
from llm_pretrain.model.self_check import KernelCheck, Part, check_kernels

CPU = torch.device("cpu")
CONFIG = ModelConfig(
    vocab_size=1030,
    hidden_size=72,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=16,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
)
TYPES = [torch.float32, torch.bfloat16, torch.float16]
Patch = pytest.MonkeyPatch


def check(part: Part, dtype: torch.dtype = torch.float32, **names: Any) -> KernelCheck:
    """The only check of a part."""
    (found,) = check_kernels(CONFIG, Kernels(z_loss_coef=1e-2, **names), CPU, dtype, (part,))
    assert found.part == part
    return found


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("names", [{}, {"experts": "reference", "loss": "full"}], ids=["auto", "named"])
def test_sound_kernels_pass_with_room(names: Any, dtype: torch.dtype):
    checks = check_kernels(CONFIG, Kernels(**names), CPU, dtype)
    assert [each.part for each in checks] == [*self_check.PARTS]
    for each in checks:
        assert each.problem is None
        assert each.implementation == names.get(each.part, each.implementation) != "auto"
        assert each.forward_error is not None
        assert each.backward_error is not None
        assert 0 < max(each.forward_error, each.backward_error) < 0.7 * each.bound, each


@pytest.mark.parametrize(("heads", "keys", "top_k"), [(4, 4, 1), (3, 1, 16), (32, 4, 8)])
def test_every_shape_has_inputs(heads: int, keys: int, top_k: int):
    config = replace(CONFIG, num_attention_heads=heads, num_key_value_heads=keys, num_experts_per_tok=top_k)
    config = replace(config, vocab_size=None, hidden_size=513, intermediate_size=7, hidden_act="relu2")
    assert not [each.problem for each in check_kernels(config, Kernels(), CPU, torch.float32) if each.problem]


def test_a_dense_model_has_no_experts():
    checks = check_kernels(replace(CONFIG, num_experts=0), Kernels(), CPU, torch.float32)
    assert [each.part for each in checks] == ["attention", "loss", "norm", "optimizer"]


def test_the_inputs_are_the_same_at_every_call_and_the_run_draws_what_it_would_have():
    state = torch.get_rng_state()
    first, again = (check("experts", torch.bfloat16) for _ in range(2))
    assert (first.forward_error, first.backward_error) == (again.forward_error, again.backward_error)
    assert torch.equal(state, torch.get_rng_state())


class _Scaled(torch.autograd.Function):
    """Identity whose gradient is 1 % too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 1.01


def _around(patch: Patch, place: Any, name: str, change: Callable[..., Any]) -> None:
    """Replace a function by `change(the function, *its arguments)`."""
    original = getattr(place, name)
    patch.setattr(place, name, lambda *arguments, **options: change(original, *arguments, **options))


def _raises(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no kernel image is available\nfor execution on the device")


def _of_experts(change: Callable[..., Any]) -> Callable[[Patch], None]:
    return lambda patch: _around(patch, kernels, "streamed_experts", change)


def _without_expert(
    kernel: Any, x: Any, gate_up: Any, down: Any, weights: Any, chosen: Tensor, *rest: Any
) -> Any:
    return kernel(x, gate_up, down, weights * (chosen != 3), chosen, *rest)


def _of_attention(change: Callable[..., Any]) -> Callable[[Patch], None]:
    return lambda patch: _around(patch, self_check, "document_attention", change)


def _one_document_longer(
    kernel: Any, query: Any, key: Any, value: Any, layout: DocumentLayout, dropout: float
) -> Any:
    """The first document's second token sees the first document's only one."""
    assert layout.offsets is not None
    return kernel(
        query, key, value, DocumentLayout(torch.cat([layout.offsets[:1], layout.offsets[2:]])), dropout
    )


def _of_loss(change: Callable[[LossSums], LossSums]) -> Callable[[Patch], None]:
    return lambda patch: _around(
        patch, kernels, "fused_linear_cross_entropy", lambda kernel, *tensors: change(kernel(*tensors))
    )


def _unmasked(kernel: Any, hidden: Any, weight: Any, labels: Any, mask: Tensor, coefficient: float) -> Any:
    return kernel(hidden, weight, labels, torch.ones_like(mask), coefficient)


def _of_optimizer(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Patch], None]:
    return lambda patch: _around(
        patch, self_check, "AdamW", lambda kind, *a, **options: kind(*a, **options | change(options))
    )


class _Forgetful(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        if hasattr(self, "found_inf"):
            del self.found_inf
        return super().step(closure)


def _norm_gradients(gradients: Any, x: Tensor, scale: Tensor, weight: Tensor, grad: Tensor) -> Any:
    """Without the term that is subtracted along x."""
    return grad * weight * scale, gradients(x, scale, weight, grad)[1]


FAULTS: dict[str, tuple[Part, Callable[[Patch], None]]] = {
    "experts raise": ("experts", _of_experts(_raises)),
    "an expert is left out": ("experts", _of_experts(_without_expert)),
    "experts 1 % too large": ("experts", _of_experts(lambda kernel, *a: kernel(*a) * 1.01)),
    "experts' gradient 1 % too large": (
        "experts",
        _of_experts(lambda kernel, x, gate_up, *a: kernel(x, _Scaled.apply(gate_up), *a)),
    ),
    "another activation": ("experts", _of_experts(lambda kernel, *a: kernel(*a[:-1], ACTIVATIONS["relu2"]))),
    "experts NaN": ("experts", _of_experts(lambda kernel, *a: kernel(*a) * float("nan"))),
    "routing weights ignored": (
        "experts",
        _of_experts(lambda kernel, x, g, d, weights, *a: kernel(x, g, d, torch.ones_like(weights), *a)),
    ),
    "attention across one boundary": ("attention", _of_attention(_one_document_longer)),
    "attention's scale 1 % off": (
        "attention",
        lambda patch: _around(patch, attention, "_scale", lambda scale, query: 1.01 * scale(query)),
    ),
    "attention 1 % too large": ("attention", _of_attention(lambda kernel, *a: kernel(*a) * 1.01)),
    "attention's gradient 1 % too large": (
        "attention",
        _of_attention(lambda kernel, query, key, *a: kernel(query, _Scaled.apply(key), *a)),
    ),
    "masked tokens counted": (
        "loss",
        lambda patch: _around(patch, kernels, "fused_linear_cross_entropy", _unmasked),
    ),
    "loss 1 % too large": ("loss", _of_loss(lambda sums: sums._replace(loss=sums.loss * 1.01))),
    "z-loss left out": ("loss", _of_loss(lambda sums: sums._replace(z_loss=sums.z_loss * 0))),
    "a token's loss missing": (
        "loss",
        _of_loss(
            lambda sums: sums._replace(
                token_losses=sums.token_losses.clone().index_fill_(1, torch.tensor(0), 0)
            )
        ),
    ),
    "loss's gradient 1 % too large": (
        "loss",
        lambda patch: _around(
            patch, kernels, "fused_linear_cross_entropy", lambda kernel, x, *a: kernel(_Scaled.apply(x), *a)
        ),
    ),
    "norm's gradient incomplete": (
        "norm",
        lambda patch: _around(patch, layers, "_rms_norm_gradients", _norm_gradients),
    ),
    "norm's epsilon 1 %": (
        "norm",
        lambda patch: _around(
            patch, layers._RMSNormFunction, "apply", lambda apply, x, w, eps: apply(x, w, eps + 0.01)
        ),
    ),
    "no weight decay": ("optimizer", _of_optimizer(lambda _: {"weight_decay": 0.0})),
    "rate 1 % off": ("optimizer", _of_optimizer(lambda options: {"lr": 0.99 * options["lr"]})),
    "found_inf ignored": ("optimizer", lambda patch: patch.setattr(self_check, "AdamW", _Forgetful)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_is_found(fault: str, monkeypatch: Patch):
    part, put_in = FAULTS[fault]
    put_in(monkeypatch)
    found = check(part, torch.bfloat16)
    assert found.problem
    if fault == "experts raise":
        assert (
            found.problem == "raised RuntimeError: no kernel image is available for execution on the device"
        )
        assert found.forward_error is None
    else:
        assert found.error is None


def test_no_memory_is_no_fault_of_a_kernel(monkeypatch: Patch):
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(kernels, "streamed_experts", full)
    with pytest.raises(torch.OutOfMemoryError):
        check("experts")


def test_a_layer_that_does_not_compile_is_found(monkeypatch: Patch):
    monkeypatch.setattr(self_check, "compile_layer", _raises)
    assert check("compile").problem == (
        "raised RuntimeError: no kernel image is available for execution on the device"
    )


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (CONFIG, torch.float32),
        (replace(CONFIG, num_experts=0), torch.bfloat16),
        (replace(CONFIG, first_k_dense_replace=1), torch.float16),
    ],
)
def test_layers_of_every_kind_are_compared(config: ModelConfig, dtype: torch.dtype, monkeypatch: Patch):
    """Uncompiled here: compiling takes a minute."""
    compiled: list[Any] = []
    monkeypatch.setattr(self_check, "compile_layer", compiled.append)
    (found,) = check_kernels(config, Kernels(), CPU, dtype, ("compile",))
    assert found.problem is None
    assert len(compiled) == 1 + (config.first_k_dense_replace > 0)
    assert found.forward_error

    monkeypatch.setattr(self_check, "compile_layer", lambda layer: layer.register_forward_hook(_one_percent))
    (found,) = check_kernels(config, Kernels(), CPU, dtype, ("compile",))
    assert found.problem


def _one_percent(module: Any, inputs: Any, output: Any) -> Any:
    return output[0] * 1.03, output[1]
