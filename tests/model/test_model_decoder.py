"""Properties of the whole decoder: causality, isolation, precision, recomputation, initial weights, sizes."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.model.kernels.attention import DocumentLayout, document_attention, document_layout
from llm_pretrain.model.kernels.loss import cross_entropy_sums
from llm_pretrain.model.sizes import count_parameters, flops_per_token
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
@pytest.mark.parametrize("token", [0, 13, 29])
def test_a_token_changes_no_logit_before_it(config, token):
    model = make(config).eval()
    other = IDS.clone()
    other[:, token] = (other[:, token] + 1) % 96
    before, after = model(IDS).logits, model(other).logits
    torch.testing.assert_close(before[:, :token], after[:, :token], atol=1e-6, rtol=0)
    assert (before[:, token:] - after[:, token:]).abs().amax(-1).min() > 1e-6


@SHAPES
@pytest.mark.parametrize("lengths", [[30], [10, 20], [1, 1, 5, 22, 1]])
def test_packed_documents_equal_documents_alone(config, lengths):
    model = make(config).eval()
    together = model(IDS[:1], **packed(lengths)).logits
    alone = torch.cat([model(piece).logits for piece in IDS[:1].split(lengths, 1)], 1)
    # products of other sizes may round differently: some last bits (2^-24) of the largest logit
    assert (together - alone).abs().max() <= 1e-6 * alone.abs().max()


@SHAPES
def test_a_document_changes_no_logit_of_another(config):
    model = make(config).eval()
    other = IDS.clone()
    other[:, 10:18] = 7
    layout = {name: value.repeat(2, 1) for name, value in packed([10, 8, 12]).items()}
    before, after = model(IDS, **layout).logits, model(other, **layout).logits
    for outside in (slice(0, 10), slice(18, 30)):
        torch.testing.assert_close(before[:, outside], after[:, outside], atol=1e-6, rtol=0)
    plain_before, plain_after = model(IDS).logits, model(other).logits  # positions alone isolate nothing
    assert (plain_before - plain_after)[:, 18:].abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_only_distances_between_positions_matter_also_far_out(dtype):
    model = make(dataclasses.replace(DENSE, rope_theta=1e6)).eval()
    near = torch.arange(30).repeat(2, 1)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        here, there = (model(IDS, position_ids=near + shift).logits for shift in (0, 3001))
        other = model(IDS, position_ids=near * 2).logits
    tolerance = 0.2 if dtype else 1e-3
    assert (here - there).abs().max() < tolerance < (here - other).abs().max()


def test_rows_of_different_layouts_and_the_mask_of_other_devices_agree():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 30, heads, 8, generator=generator) for heads in (4, 2, 2))
    document = torch.cat([packed([30])["document_ids"], packed([4, 25, 1])["document_ids"]])
    layout = document_layout(document)
    assert layout.offsets is not None
    assert layout.offsets.tolist() == [0, 30, 34, 59, 60]
    mask = (document[:, :, None] == document[:, None]) & torch.ones(30, 30).bool().tril()
    by_pieces = document_attention(query, key, value, layout, 0.0)
    by_mask = document_attention(query, key, value, DocumentLayout(mask=mask[:, None]), 0.0)
    torch.testing.assert_close(by_pieces, by_mask, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("length", [40, 300])
def test_attention_in_low_precision_is_near_on_both_sides_of_the_threshold(length):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, length, heads, 8, generator=generator) for heads in (4, 2, 2))
    exact = document_attention(query, key, value, DocumentLayout(), 0.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = document_attention(query, key, value.bfloat16(), DocumentLayout(), 0.0)
    assert low.dtype == torch.bfloat16
    assert 1e-4 < (low.float() - exact).norm() / exact.norm() < 1e-2


def test_attention_dropout_drops_in_training_only_on_each_path():
    config = dataclasses.replace(DENSE, attention_dropout=0.5)
    model = make(config)
    for layout in ({}, {name: value.repeat(2, 1) for name, value in packed([10, 20]).items()}):
        model.train()
        first, second = model(IDS, **layout).logits, model(IDS, **layout).logits
        assert not torch.allclose(first, second)
        model.eval()
        torch.testing.assert_close(model(IDS, **layout).logits, make(DENSE)(IDS, **layout).logits)


def test_hidden_dropout_drops_in_training_only():
    model = make(dataclasses.replace(DENSE, hidden_dropout=0.5))
    assert not torch.allclose(model(IDS).logits, model(IDS).logits)
    model.eval()
    torch.testing.assert_close(model(IDS).logits, make(DENSE)(IDS).logits)


def losses_and_gradients(model: Decoder) -> list[Tensor]:
    torch.manual_seed(3)
    layout = {name: value.repeat(2, 1) for name, value in packed([10, 20]).items()}
    out = model(IDS, labels=IDS, **layout)
    (out.loss_sum + 0.1 * out.z_loss_sum + out.aux_loss_sum + out.router_z_loss_sum).backward()
    sums = [out.loss_sum, out.z_loss_sum, out.aux_loss_sum, out.router_z_loss_sum, out.expert_counts]
    return [*(value.detach() for value in sums), *(parameter.grad for parameter in model.parameters())]


@SHAPES
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("autocast", [False, True])
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@SHAPES
def test_losses_are_taken_in_fp32_under_autocast(config, dtype):
    model = make(config)
    with torch.autocast("cpu", dtype=dtype):
        out = model(IDS, labels=IDS)
    exact = model.double()(IDS, labels=IDS)
    for name in ("loss_sum", "z_loss_sum", "aux_loss_sum", "router_z_loss_sum", "token_losses"):
        assert getattr(out, name).dtype == torch.float32
    assert abs(out.loss_sum / exact.loss_sum - 1) < 1e-2


def test_the_loss_of_low_precision_logits_is_exact():
    """The same low-precision logits, fp32 arithmetic: a logsumexp in bf16 would be off by 1e-3."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(3, 17, 8, generator=generator), torch.randn(5000, 8, generator=generator)
    labels, mask = (
        torch.randint(0, 5000, (3, 17), generator=generator),
        torch.rand(3, 17, generator=generator) < 0.7,
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums = cross_entropy_sums(torch.nn.functional.linear(hidden, weight), labels, mask)
    logits = torch.nn.functional.linear(hidden.bfloat16(), weight.bfloat16()).double()
    log_partition = logits.logsumexp(-1)
    losses = (log_partition - logits.gather(-1, labels[..., None])[..., 0]) * mask
    torch.testing.assert_close(sums.token_losses.double(), losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(sums.z_loss.double(), (log_partition**2 * mask).sum(), rtol=1e-6, atol=0)


def test_the_loss_head_passes_gradcheck():
    logits = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    labels, mask = torch.tensor([[0, 6, -100], [2, 2, 5]]), torch.tensor([[1, 1, 0], [1, 0, 1]]).bool()
    assert torch.autograd.gradcheck(lambda x: cross_entropy_sums(x, labels, mask)[:2], (logits,))


def test_norms_and_rotation_are_exact_under_autocast(monkeypatch):
    from llm_pretrain.model import attention

    seen = []
    original = attention.apply_rotary
    monkeypatch.setattr(attention, "apply_rotary", lambda *a: (seen.append(original(*a)), seen[-1])[1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        make(DENSE)(IDS)
    assert {x.dtype for x in seen} == {torch.float32}
    assert any((x != x.bfloat16().float()).any() for x in seen)


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
    config = dataclasses.replace(MOE, hidden_size=128, initializer_range=0.02)
    for name, parameter in make(config).named_parameters():
        narrow = "o_proj" in name or "down_proj" in name
        expected = 0.02 / math.sqrt(2 * 2) if narrow else 0.02
        if parameter.dim() == 1:
            assert (parameter == 1).all(), name
        else:
            assert abs(parameter.std().item() / expected - 1) < 0.1, name


def test_tied_head_is_one_parameter():
    tied = make(DENSE)
    untied = make(dataclasses.replace(DENSE, tie_word_embeddings=False))
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert len(list(untied.parameters())) == len(list(tied.parameters())) + 1


def test_sizes_count_what_stands_in_the_model():
    model = make(MOE)
    counts = count_parameters(MOE)
    assert counts.total == sum(parameter.numel() for parameter in model.parameters())
    assert counts.total - counts.active == 2 * (4 - 2) * 3 * 32 * 32
    assert count_parameters(DENSE).active == count_parameters(DENSE).total
    attention = 12 * 2 * 4 * 8 * 100
    assert flops_per_token(MOE, 100) == 6 * counts.active + attention
    untied = dataclasses.replace(MOE, tie_word_embeddings=False)
    assert flops_per_token(untied, 100) == flops_per_token(MOE, 100)
    assert flops_per_token(MOE, 200) - flops_per_token(MOE, 100) == attention


@pytest.mark.parametrize(
    "changes",
    [
        {"n_shared_experts": 2},
        {"n_shared_experts": 1, "first_k_dense_replace": 1, "scoring_func": "sigmoid"},
        {"num_hidden_layers": 5, "decoder_sparse_step": 2, "first_k_dense_replace": 2, "n_shared_experts": 3},
    ],
)
def test_counts_are_right_for_shared_experts_and_mixed_layers(changes):
    config = dataclasses.replace(
        MOE, router_bias_update_rate=0.1, rope_type="yarn", rope_factor=4.0, **changes
    )
    state = make(config).state_dict()
    trained = {n: t.numel() for n, t in state.items() if n != "lm_head.weight" and "correction_bias" not in n}
    passed = {
        name: size * config.num_experts_per_tok // config.num_experts if ".experts." in name else size
        for name, size in trained.items()
    }
    assert count_parameters(config) == (sum(trained.values()), sum(passed.values()))
    assert any(".shared_experts." in name for name in passed)
    moe_layers = {int(name.split(".")[2]) for name in passed if ".experts." in name}
    assert moe_layers == {
        layer
        for layer in range(config.num_hidden_layers)
        if layer >= config.first_k_dense_replace and (layer + 1) % config.decoder_sparse_step == 0
    }
    attention = 12 * config.num_hidden_layers * 4 * 8 * 100
    assert flops_per_token(config, 100) == 6 * sum(passed.values()) + attention


def test_a_large_decoder_is_counted_without_being_built():
    config = dataclasses.replace(
        MOE, hidden_size=8192, num_hidden_layers=60, num_experts=256, moe_intermediate_size=2048
    )
    assert count_parameters(config).total > 7e11  # more than any machine that runs this could hold


def test_importing_the_model_loads_neither_torchs_compiler_nor_slow_libraries():
    import subprocess
    import sys

    slow = {"transformers", "datasets", "accelerate", "wandb", "sentencepiece"}
    compiler = {"torch._dynamo", "torch._inductor"}
    code = (
        f"import sys, llm_pretrain.model.decoder\nprint(*({slow | compiler} & set(sys.modules)))\n"
        f"import llm_pretrain.export.huggingface\nprint(*({slow} & set(sys.modules)))\n"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == []
