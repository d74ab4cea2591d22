"""Properties of the whole decoder: causality, isolation, precision, recomputation, initial weights, sizes."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.model.moe import update_router_bias
from llm_pretrain.model.sizes import count_parameters, flops_per_token, layer_matrices
from llm_pretrain.training.model_setup import initialize_weights

DENSE = ModelConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.15,
)
MOE = dataclasses.replace(DENSE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
SHAPES = pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
IDS = torch.randint(0, 96, (2, 30), generator=torch.Generator().manual_seed(1))


def make(config: ModelConfig, **options) -> Decoder:
    model = Decoder(config, **options)
    initialize_weights(model, 0)
    return model


def packed(lengths: list[int]) -> dict[str, Tensor]:
    """document_ids and position_ids of one row."""
    document = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
    return {
        "document_ids": document[None],
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
    }


@SHAPES
def test_a_token_changes_no_logit_before_it(config):
    model = make(config).eval()
    other = IDS.clone()
    other[:, 13] = (other[:, 13] + 1) % 96
    before, after = model(IDS).logits, model(other).logits
    torch.testing.assert_close(before[:, :13], after[:, :13], atol=1e-6, rtol=0)
    assert (before[:, 13:] - after[:, 13:]).abs().amax(-1).min() > 1e-6


@SHAPES
@pytest.mark.parametrize("lengths", [[30], [10, 20], [1, 1, 5, 22, 1]])
def test_packed_documents_equal_documents_alone(config, lengths):
    model = make(config).eval()
    together = model(IDS[:1], **packed(lengths)).logits
    alone = torch.cat([model(piece).logits for piece in IDS[:1].split(lengths, 1)], 1)
    # products of other sizes may round differently: some last bits (2^-24) of the largest logit
    assert (together - alone).abs().max() <= 1e-6 * alone.abs().max()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_only_distances_between_positions_matter_also_far_out(dtype):
    model = make(dataclasses.replace(DENSE, rope_theta=1e6)).eval()
    near = torch.arange(30).repeat(2, 1)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        here, there = (model(IDS, position_ids=near + shift).logits for shift in (0, 3001))
        other = model(IDS, position_ids=near * 2).logits
    tolerance = 0.2 if dtype else 1e-3
    assert (here - there).abs().max() < tolerance < (here - other).abs().max()


@pytest.mark.parametrize("kind", ["attention_dropout", "hidden_dropout"])
def test_dropout_drops_in_training_only_with_and_without_documents(kind):
    model = make(dataclasses.replace(DENSE, **{kind: 0.5}))
    for layout in ({}, {name: value.repeat(2, 1) for name, value in packed([10, 20]).items()}):
        model.train()
        first, second = model(IDS, **layout).logits, model(IDS, **layout).logits
        assert not torch.allclose(first, second)
        model.eval()
        torch.testing.assert_close(model(IDS, **layout).logits, make(DENSE)(IDS, **layout).logits)


def losses_and_gradients(model: Decoder) -> list[Tensor]:
    torch.manual_seed(3)
    layout = {name: value.repeat(2, 1) for name, value in packed([10, 20]).items()}
    out = model(IDS, labels=IDS, **layout)
    (out.loss_sum + 0.1 * out.z_loss_sum + out.aux_loss_sum + out.router_z_loss_sum).backward()
    sums = [out.loss_sum, out.z_loss_sum, out.aux_loss_sum, out.router_z_loss_sum, out.expert_counts]
    return [*(value.detach() for value in sums), *(parameter.grad for parameter in model.parameters())]


@SHAPES
@pytest.mark.parametrize(("dropout", "autocast"), [(0.0, False), (0.2, True)])
def test_activation_checkpointing_changes_nothing(config, dropout, autocast):
    config = dataclasses.replace(config, attention_dropout=dropout, hidden_dropout=dropout)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        plain = losses_and_gradients(make(config))
        recomputed = losses_and_gradients(make(config, activation_checkpointing=True))
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


def test_activation_checkpointing_really_recomputes(monkeypatch):
    calls = []
    from llm_pretrain.model import attention

    original = attention.document_attention
    monkeypatch.setattr(attention, "document_attention", lambda *a: (calls.append(1), original(*a))[1])
    losses_and_gradients(make(DENSE, activation_checkpointing=True))
    assert len(calls) == 2 * DENSE.num_hidden_layers


@SHAPES
def test_a_model_cast_to_bf16_as_a_whole_stays_close(config):
    exact, low = make(config)(IDS).logits, make(config).bfloat16()(IDS).logits
    assert low.dtype == torch.bfloat16
    assert (low.float() - exact).norm() < 0.1 * exact.norm()


def test_without_a_mask_the_labels_say_what_counts():
    model = make(MOE)
    labels = IDS.clone()
    labels[:, 20:] = -100
    default, explicit = model(IDS, labels=labels), model(IDS, labels=labels, loss_mask=labels != -100)
    assert torch.equal(default.loss_sum, explicit.loss_sum)
    assert default.expert_counts.sum() == 2 * 2 * 20 * 2


def test_initial_weights_depend_on_the_seed_alone():
    torch.manual_seed(99)
    first = make(MOE).state_dict()
    torch.rand(5)
    second = make(MOE).double().state_dict()
    assert all(torch.equal(first[name].double(), second[name].double()) for name in first)
    other = Decoder(MOE)
    initialize_weights(other, 1)
    assert not torch.equal(other.lm_head.weight, first["lm_head.weight"])


def test_initial_widths():
    config = dataclasses.replace(MOE, hidden_size=128, initializer_range=0.02, n_shared_experts=2)
    for name, parameter in make(config).named_parameters():
        narrow = "o_proj" in name or "down_proj" in name
        expected = 0.02 / math.sqrt(2 * 2) if narrow else 0.02
        if parameter.dim() == 1:
            assert (parameter == 1).all(), name
        else:
            assert abs(parameter.std().item() / expected - 1) < 0.1, name


def test_what_writes_into_the_residual_stream_may_begin_at_zero():
    for name, parameter in make(dataclasses.replace(MOE, zero_init_residual=True)).named_parameters():
        assert bool(parameter.any()) == ("o_proj" not in name and "down_proj" not in name), name


def test_bias_update_pushes_towards_balance():
    model = make(dataclasses.replace(MOE, router_bias_update_rate=0.1))
    for _ in range(2):
        update_router_bias(model, torch.tensor([[9, 1, 5, 5], [0, 6, 0, 6]]), 0.1)
    first, second = (layer.mlp.gate.e_score_correction_bias for layer in model.model.layers)
    torch.testing.assert_close(first, torch.tensor([-0.2, 0.2, 0, 0]))
    torch.testing.assert_close(second, torch.tensor([0.2, -0.2] * 2))
    assert "model.layers.0.mlp.gate.e_score_correction_bias" in model.state_dict()
    assert not any("correction_bias" in name for name in make(MOE).state_dict())


def test_no_gradient_is_missing_when_experts_are_unused():
    model = make(dataclasses.replace(MOE, num_experts=16, num_experts_per_tok=1))
    ids = torch.tensor([[3]])
    out = model(ids, labels=ids)
    assert (out.expert_counts == 0).sum() == 2 * 15
    (out.loss_sum + out.aux_loss_sum).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    "changes",
    [
        {"num_experts": 0, "head_dim": 24},
        {"tie_word_embeddings": False},
        {"num_hidden_layers": 5, "decoder_sparse_step": 2, "first_k_dense_replace": 2, "n_shared_experts": 3},
    ],
)
def test_counts_are_those_of_the_model(changes):
    config = dataclasses.replace(MOE, **changes)
    sizes = {name: parameter.numel() for name, parameter in make(config).named_parameters()}
    passed = {
        name: size * config.num_experts_per_tok // config.num_experts if ".experts." in name else size
        for name, size in sizes.items()
    }
    assert count_parameters(config) == (sum(sizes.values()), sum(passed.values()))
    products = sum(passed.values()) - ("lm_head.weight" in passed) * passed["model.embed_tokens.weight"]
    attention = 12 * config.num_hidden_layers * 4 * config.attention_head_dim * 100
    assert flops_per_token(config, 100) == 6 * products + attention
    matrices = sum(sum(layer_matrices(config, layer)) for layer in range(config.num_hidden_layers))
    assert matrices == sum(size for name, size in sizes.items() if "proj" in name)
