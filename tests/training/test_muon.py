"""Muon does to matrices what torch's does, to stacks of them likewise, and AdamW's part is torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import llm_pretrain.optim.muon as muon_module
import llm_pretrain.optim.orthogonal as orthogonal_module
from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.config.tree import OptimizerConfig
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.optim.build import build_optimizer
from llm_pretrain.optim.muon import Muon
from llm_pretrain.optim.orthogonal import orthogonalize
from llm_pretrain.optim.schedule import set_learning_rate

SHAPES = [(8, 24), (24, 8), (16, 16), (24, 8), (1, 5), (16, 16)]


def parameters(shapes: list[tuple[int, ...]], seed: int = 0) -> list[Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def give_gradients(ours: list[Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in ours:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def group(params: list[Parameter], **settings: Any) -> dict[str, Any]:
    return {"params": params, "algorithm": "muon", **settings}


def after_steps(optimizer: torch.optim.Optimizer, own: list[Parameter], steps: int = 3) -> list[Tensor]:
    for step in range(steps):
        give_gradients(own, seed=step + 1)
        optimizer.step()
    return [parameter.detach().clone() for parameter in own]


def relative(left: Tensor, right: Tensor) -> float:
    return float((left - right).norm() / right.norm())


def reference_step_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch's Muon iterate in fp32: it casts with `Tensor.bfloat16`."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())


@pytest.mark.parametrize("batch", [1, 1 << 24])
def test_matrices_move_as_under_torch_s_muon(monkeypatch: pytest.MonkeyPatch, batch: int):
    """In fp32, where rounding is small; alone or with others of their shape."""
    monkeypatch.setattr(muon_module, "BATCH_ELEMENTS", batch)
    settings: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.3}
    ours, theirs = parameters(SHAPES), parameters(SHAPES)
    moved = after_steps(Muon([group(ours)], in_bf16=False, **settings), ours)
    reference_step_in_fp32(monkeypatch)
    expected = after_steps(torch.optim.Muon(theirs, **settings), theirs)
    start = parameters(SHAPES)
    for own, other, before in zip(moved, expected, start, strict=True):
        assert relative(own, other) < 1e-6
        assert relative(other, before.detach()) > 1e-3


def test_stacked_experts_move_as_their_matrices_would_apart():
    """A parameter [E, 2 · out, in] of two blocks is 2E matrices."""
    (stacked,) = parameters([(3, 16, 12)])
    apart = [Parameter(half.detach().clone()) for expert in stacked for half in expert.chunk(2)]
    together = Muon([group([stacked], blocks=2)], lr=0.02, in_bf16=False)
    single = Muon([group(apart)], lr=0.02, in_bf16=False)
    for step in range(2):
        give_gradients([stacked], seed=step)
        assert stacked.grad is not None
        for parameter, half in zip(apart, [h for e in stacked.grad for h in e.chunk(2)], strict=True):
            parameter.grad = half.clone()
        together.step()
        single.step()
    assert relative(stacked.detach().view(6, 8, 12), torch.stack(tuple(apart)).detach()) < 1e-6


@pytest.mark.parametrize("shape", [(4, 32, 96), (4, 96, 32), (4, 48, 48)])
def test_singular_values_come_near_one(shape: tuple[int, ...]):
    """Coefficients are Jordan's, which end between 0.7 and 1.2; bf16 adds a little."""
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    (made,) = orthogonalize([matrices])
    values = torch.linalg.svdvals(made.float())
    assert float(values.min()) > 0.3
    assert float(values.max()) < 1.3
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    cosine = torch.nn.functional.cosine_similarity(made.float().flatten(), (left @ right).flatten(), dim=0)
    assert float(cosine) > 0.95


def test_a_gradient_of_zero_moves_nothing():
    (parameter,) = parameters([(8, 8)])
    before = parameter.detach().clone()
    parameter.grad = torch.zeros_like(parameter)
    Muon([group([parameter])], lr=0.1, weight_decay=0.0).step()
    assert torch.equal(parameter, before)


def test_adamw_s_part_is_torch_s_to_the_bit():
    shapes: list[tuple[int, ...]] = [(40, 8), (8,), (3, 4, 5)]
    settings: dict[str, Any] = {"lr": 3e-3, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    ours, theirs = parameters(shapes), parameters(shapes)
    mine = Muon([{"params": ours, "algorithm": "adamw"}], **settings)
    reference = torch.optim.AdamW(theirs, fused=True, **settings)
    for own, other in zip(after_steps(mine, ours), after_steps(reference, theirs), strict=True):
        assert torch.equal(own, other)
    for own, other in zip(ours, theirs, strict=True):
        assert mine.state[own].keys() == reference.state[other].keys()
        for key, value in reference.state[other].items():
            assert torch.equal(mine.state[own][key], value)


def small_model(**changes: Any) -> Decoder:
    fields: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 3, "num_experts_per_tok": 1,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "tie_word_embeddings": False,
    }  # fmt: skip
    return Decoder(ModelConfig(**fields | changes))


def test_muon_takes_the_layers_matrices_and_adamw_the_rest():
    model = small_model()
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = build_optimizer(model, OptimizerConfig(name="muon", weight_decay=0.1)).param_groups
    taken = {names[p] for group in groups if group["algorithm"] == "muon" for p in group["params"]}
    left = set(names.values()) - taken
    assert {name.rpartition(".layers.")[2].partition(".")[2] for name in taken} == {
        *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
        *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
        *(f"mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")),
        *("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    }
    assert {name for name in left if "norm" not in name} == {
        *("model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.gate.weight")
    }
    (paired,) = [group for group in groups if group["blocks"] == 2]
    assert {names[p].rpartition(".")[2] for p in paired["params"]} == {"gate_up_proj"}
    undecayed = {names[p] for group in groups if group["weight_decay"] == 0.0 for p in group["params"]}
    assert undecayed == {name for name in left if "norm" in name}


def test_every_rate_follows_the_schedule_in_its_ratio():
    config = OptimizerConfig(name="muon", learning_rate=1e-3, muon_learning_rate=0.02)
    optimizer = build_optimizer(small_model(), config)
    set_learning_rate(optimizer, 5e-4)
    rates = {group["algorithm"]: group["lr"] for group in optimizer.param_groups}
    assert rates == {"muon": pytest.approx(0.01), "adamw": 5e-4}


def test_a_run_in_fp32_is_not_rounded_by_its_optimizer(monkeypatch: pytest.MonkeyPatch):
    """Or another number of processes, whose sums differ in their last bits, would part by bf16's rounding."""
    dtypes = []

    def noted(matrices: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
        dtypes.append(dtype)
        return orthogonalize(matrices, dtype)

    monkeypatch.setattr(muon_module, "orthogonalize", noted)
    monkeypatch.setattr(orthogonal_module, "_cpu_has_bf16", lambda: True)
    for precision in ("fp32", "bf16", "fp16"):
        optimizer = build_optimizer(small_model(), OptimizerConfig(name="muon"), precision)
        for group in optimizer.param_groups:
            give_gradients(group["params"], seed=0)
        optimizer.step()
        assert set(dtypes) == {torch.float32 if precision == "fp32" else torch.bfloat16}
        dtypes.clear()
