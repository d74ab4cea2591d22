"""The experts' kernels against the definition, and the router's rules."""

import dataclasses

import pytest
import torch
from torch import Tensor

from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.model.kernels.experts import (
    experts_reference,
    grouped_experts,
    streamed_experts,
    top_experts,
)
from llm_pretrain.model.kernels.layers import ACTIVATIONS
from llm_pretrain.model.moe import Experts, Router, update_router_bias
from llm_pretrain.training.model_setup import initialize_weights

CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    initializer_range=0.2,
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
)
KERNELS = {"streamed": streamed_experts, "grouped": grouped_experts}


def problem(
    tokens: int, experts: int, top_k: int, hidden: int, size: int, dtype: torch.dtype
) -> list[Tensor]:
    """x, gate_up, down, weights (all with gradients) and chosen; the last expert gets no token."""
    generator = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    scores = torch.rand(tokens, experts - 1, generator=generator)
    chosen = scores.topk(top_k).indices
    weights = scores.gather(1, chosen).to(torch.promote_types(dtype, torch.float32))
    tensors = [draw(tokens, hidden), draw(experts, 2 * size, hidden), draw(experts, hidden, size), weights]
    return [*(tensor.requires_grad_() for tensor in tensors), chosen]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 0.05)]
)
@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=list(ACTIVATIONS))
def test_kernel_equals_the_definition(kernel, top_k, dtype, tolerance, activation):
    if kernel == "grouped" and dtype == torch.float64:
        pytest.skip("grouped_mm has no float64")
    inputs = problem(70, 6, top_k, 32, 16, dtype)
    target = torch.randn(70, 32, generator=torch.Generator().manual_seed(4))
    out = KERNELS[kernel](*inputs, dtype, activation)
    assert out.dtype == dtype
    (out * target).sum().backward()
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs[:4]]
    expected = experts_reference(*exact, inputs[4], torch.float64, activation)
    (expected * target).sum().backward()
    pairs = [(out, expected), *((a.grad, b.grad) for a, b in zip(inputs[:4], exact, strict=True))]
    for ours, theirs in pairs:
        assert (ours.double() - theirs).norm() < tolerance * theirs.norm()
    assert not inputs[1].grad[-1].any()
    assert not inputs[2].grad[-1].any()


def test_streamed_gradients_pass_gradcheck():
    *tensors, chosen = problem(5, 4, 2, 4, 3, torch.float64)
    assert torch.autograd.gradcheck(lambda *x: streamed_experts(*x, chosen, torch.float64), tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_experts_follow_autocast_and_keep_fp32_gradients(dtype):
    experts = Experts(CONFIG)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x, *_, weights, chosen = problem(40, 6, 2, 32, 16, torch.float32)
    plain = experts(x, weights, chosen)
    with torch.autocast("cpu", dtype=dtype):
        low = experts(x, weights, chosen)
    assert low.dtype == torch.float32
    error = ((low - plain).norm() / plain.norm()).item()
    assert 1e-5 < error < 2e-2  # really in the low type, and right in it
    low.sum().backward()
    assert {parameter.grad.dtype for parameter in experts.parameters()} == {torch.float32}


def test_router_stays_in_fp32_under_autocast():
    router = Router(CONFIG)
    torch.nn.init.normal_(router.weight)
    hidden = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 12, dtype=torch.bool)
    weights, chosen, sums = router(hidden, mask)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low_weights, low_chosen, low_sums = router(hidden, mask)
    assert torch.equal(weights, low_weights)
    assert torch.equal(chosen, low_chosen)
    assert all(torch.equal(a, b) for a, b in zip(sums, low_sums, strict=True))


def test_bias_moves_the_choice_and_never_the_weights():
    config = dataclasses.replace(CONFIG, router_bias_update_rate=0.1, norm_topk_prob=False)
    router = Router(config)
    torch.nn.init.normal_(router.weight, std=0.1)
    hidden, mask = torch.randn(1, 20, 32), torch.ones(1, 20, dtype=torch.bool)
    router.e_score_correction_bias[4] = 10.0
    weights, chosen, sums = router(hidden, mask)
    assert sums.counts[4] == 20
    probs = torch.nn.functional.linear(hidden[0], router.weight).softmax(-1)
    torch.testing.assert_close(weights, probs.gather(1, chosen))


def test_bias_update_pushes_towards_balance():
    model = Decoder(dataclasses.replace(CONFIG, router_bias_update_rate=0.1))
    counts = torch.tensor([[9, 1, 5, 5, 5, 5], [0, 6, 0, 6, 0, 6]])
    update_router_bias(model, counts, 0.1)
    update_router_bias(model, counts, 0.1)
    first, second = (model.model.layers[layer].mlp.gate.e_score_correction_bias for layer in (0, 1))
    torch.testing.assert_close(first, torch.tensor([-0.2, 0.2, 0, 0, 0, 0]))
    torch.testing.assert_close(second, torch.tensor([0.2, -0.2] * 3))
    assert "model.layers.0.mlp.gate.e_score_correction_bias" in model.state_dict()
    assert not any("correction_bias" in name for name in Decoder(CONFIG).state_dict())


def test_sigmoid_scores_are_balanced_by_the_bias_alone():
    """A skewed router and an update per batch: loads come closer to each other, weights stay the scores."""
    config = dataclasses.replace(
        CONFIG,
        num_hidden_layers=1,
        scoring_func="sigmoid",
        norm_topk_prob=False,
        routed_scaling_factor=2.0,
        router_bias_update_rate=0.02,
    )
    model = Decoder(config)
    initialize_weights(model, 0)
    gate = model.model.layers[0].mlp.gate
    gate.weight.data[0] *= 20
    ids = torch.arange(64).view(4, 16)
    spread = []
    for _ in range(60):
        counts = model(ids).expert_counts
        spread.append(int(counts.max() - counts.min()))
        update_router_bias(model, counts, config.router_bias_update_rate)
    assert max(spread[-5:]) < spread[0] / 2
    hidden, mask = torch.randn(1, 20, 32), torch.ones(1, 20, dtype=torch.bool)
    weights, chosen, _ = gate(hidden, mask)
    scores = torch.nn.functional.linear(hidden[0], gate.weight).sigmoid()
    torch.testing.assert_close(weights, 2 * scores.gather(1, chosen))


def test_shared_experts_start_as_wide_as_every_other_matrix():
    config = dataclasses.replace(CONFIG, n_shared_experts=4, hidden_size=128, initializer_range=0.1)
    model = Decoder(config)
    initialize_weights(model, 0)
    shared = model.model.layers[0].mlp.shared_experts
    assert shared.gate_proj.weight.shape == (4 * 16, 128)
    assert abs(shared.up_proj.weight.std() - 0.1) < 0.005
    assert abs(shared.down_proj.weight.std() - 0.1 / 2) < 0.0025  # into the residual stream of two layers


def test_no_gradient_is_missing_when_experts_are_unused():
    model = Decoder(dataclasses.replace(CONFIG, num_experts=16, num_experts_per_tok=1))
    initialize_weights(model, 0)
    ids = torch.tensor([[3]])
    out = model(ids, labels=ids)
    assert (out.expert_counts == 0).sum() == 2 * 15
    (out.loss_sum + out.aux_loss_sum).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (64, 8), (6, 6), (3, 1)])
@pytest.mark.parametrize("signed", [False, True])
def test_the_chosen_experts_are_those_of_the_highest_scores(experts, top_k, signed):
    scores = torch.rand(2, 50, experts, generator=torch.Generator().manual_seed(experts)) - signed * 0.5
    chosen = top_experts(scores, top_k)
    assert chosen.dtype == torch.int64
    expected = scores.topk(top_k).indices
    assert torch.equal(chosen.sort(-1).values, expected.sort(-1).values)


def test_of_equal_scores_no_expert_is_chosen_twice():
    for scores in (torch.zeros(3, 8), torch.tensor([[0.0, -0.0, 1.0, 1.0, 1.0, -1.0]]), torch.zeros(0, 4)):
        assert all(len(set(row)) == 3 for row in top_experts(scores, 3).tolist())
