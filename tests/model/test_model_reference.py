"""Sums and gradients of the decoder against the objective written out densely in float64.

The reference below shares no code with the package but the configuration: plain loops and einsums from
the published formulas.
"""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.model.kernels.choice import AUTO, Kernels
from llm_pretrain.model.kernels.layers import ACTIVATIONS
from llm_pretrain.model.kernels.loss import IGNORE_INDEX
from llm_pretrain.training.model_setup import initialize_weights

CONFIG = ModelConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.05,
    num_experts=5,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    first_k_dense_replace=1,
)
VARIANTS = {
    "moe": CONFIG,
    "unnormalised": dataclasses.replace(CONFIG, norm_topk_prob=False, tie_word_embeddings=False),
    "no-qk-norm": dataclasses.replace(CONFIG, qk_norm=False, num_key_value_heads=1),
    "micro-batch": dataclasses.replace(CONFIG, router_aux_loss_scope="micro_batch"),
    "dense": dataclasses.replace(CONFIG, num_experts=0),
    "shared": dataclasses.replace(CONFIG, n_shared_experts=2, routed_scaling_factor=1.7),
    "sigmoid": dataclasses.replace(CONFIG, scoring_func="sigmoid", n_shared_experts=1),
    "fine-grained": dataclasses.replace(
        CONFIG,
        num_hidden_layers=4,
        decoder_sparse_step=2,
        scoring_func="sigmoid",
        n_shared_experts=1,
        routed_scaling_factor=2.5,
        router_bias_update_rate=0.01,
        router_aux_loss_scope="micro_batch",
    ),
    "sigmoid-unnormalised": dataclasses.replace(
        CONFIG, scoring_func="sigmoid", norm_topk_prob=False, router_bias_update_rate=0.01
    ),
}
Z, AUX, ROUTER_Z = 1e-2, 0.5, 0.1


def make(config: ModelConfig, kernels: Kernels = AUTO) -> Decoder:
    model = Decoder(config, kernels=kernels)
    initialize_weights(model, 5)
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5, generator)
    for buffer in model.buffers():  # the router's bias, wide enough to change choices
        torch.nn.init.uniform_(buffer, -0.1, 0.1, generator)
    return model


def ragged_batch(rows: int = 4, columns: int = 24) -> dict[str, Tensor]:
    """Packed documents, restarting positions, ragged masks; the last row counts for nothing."""
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(0, 96, (rows, columns), generator=generator)
    labels = torch.randint(0, 96, (rows, columns), generator=generator)
    mask = torch.rand(rows, columns, generator=generator) < torch.linspace(0.9, 0.2, rows)[:, None]
    mask[-1] = False
    document = torch.zeros(rows, columns, dtype=torch.int64)
    position = torch.arange(columns).repeat(rows, 1)
    for row, cuts in enumerate([(7, 15), (1,), (), (23,)][:rows]):
        for cut in cuts:
            document[row, cut:] += 1
            position[row, cut:] = torch.arange(columns - cut)
    return {
        "input_ids": ids,
        "position_ids": position,
        "document_ids": document,
        "labels": labels.masked_fill(~mask, IGNORE_INDEX),
        "loss_mask": mask,
    }


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


ACTIVATION_FORMULAS = {
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu_pytorch_tanh": lambda x: x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu2": lambda x: torch.where(x > 0, x**2, 0),
}


def gated_unit(config: ModelConfig, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (ACTIVATION_FORMULAS[config.hidden_act](x @ gate.T) * (x @ up.T)) @ down.T


def attention(p: dict[str, Tensor], config: ModelConfig, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
    rows, columns, _ = x.shape
    size = config.attention_head_dim
    q, k, v = ((x @ p[f"self_attn.{n}_proj.weight"].T).view(rows, columns, -1, size) for n in "qkv")
    if config.qk_norm:
        q = norm(q, p["self_attn.q_norm.weight"], config.rms_norm_eps)
        k = norm(k, p["self_attn.k_norm.weight"], config.rms_norm_eps)
    # The package takes angles in fp32 in every precision, as transformers does.
    frequency = 1 / config.rope_theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    angle = (batch["position_ids"].float()[..., None] * frequency)[:, :, None]
    turn = torch.complex(angle.cos().double(), angle.sin().double())

    def rotate(y: Tensor) -> Tensor:
        turned = torch.complex(*y.chunk(2, -1)) * turn
        return torch.cat([turned.real, turned.imag], -1)

    groups = config.num_attention_heads // config.num_key_value_heads
    q, k, v = rotate(q), rotate(k).repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    scores = torch.einsum("bsnd,btnd->bnst", q, k) / math.sqrt(size)
    document = batch["document_ids"]
    allowed = (document[:, :, None] == document[:, None, :]) & torch.ones(columns, columns).bool().tril()
    scores = scores.masked_fill(~allowed[:, None], -torch.inf).softmax(-1)
    out = torch.einsum("bnst,btnd->bsnd", scores, v).reshape(rows, columns, -1)
    return out @ p["self_attn.o_proj.weight"].T


def experts(
    p: dict[str, Tensor], config: ModelConfig, x: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, Σ_i n_i·bal(i), Σ m·lse²."""
    logits = x @ p["mlp.gate.weight"].T
    score = 1 / (1 + torch.exp(-logits)) if config.scoring_func == "sigmoid" else logits.softmax(-1)
    prob = score / score.sum(-1, keepdim=True)
    _, chosen = (score + p.get("mlp.gate.e_score_correction_bias", 0)).topk(config.num_experts_per_tok, -1)
    top = score.gather(-1, chosen)
    if config.norm_topk_prob:
        top = top / top.sum(-1, keepdim=True)
    top = top * config.routed_scaling_factor
    selected = torch.nn.functional.one_hot(chosen, config.num_experts).double()
    weight = (selected * top[..., None]).sum(-2)
    out = torch.zeros_like(x)
    for e in range(config.num_experts):
        gate, up = p["mlp.experts.gate_up_proj"][e].chunk(2)
        out = out + weight[..., e, None] * gated_unit(config, x, gate, up, p["mlp.experts.down_proj"][e])
    width = config.moe_intermediate_size
    for e in range(config.n_shared_experts):
        gate, up, down = (p[f"mlp.shared_experts.{n}_proj.weight"] for n in ("gate", "up", "down"))
        rows = slice(e * width, (e + 1) * width)
        out = out + gated_unit(config, x, gate[rows], up[rows], down[:, rows])
    groups = [slice(row, row + 1) for row in range(len(x))]
    if config.router_aux_loss_scope == "micro_batch":
        groups = [slice(None)]
    balance = torch.zeros((), dtype=torch.float64)
    for group in groups:
        m = mask[group].double()
        n = m.sum()
        if n > 0:
            share = (selected[group].sum(-2) * m[..., None]).sum((0, 1)) / (config.num_experts_per_tok * n)
            mean_prob = (prob[group] * m[..., None]).sum((0, 1)) / n
            balance = balance + n * config.num_experts * (share * mean_prob).sum()
    return out, balance, (mask * logits.exp().sum(-1).log() ** 2).sum()


def reference(model: Decoder, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The four sums of the objective, from a float64 copy of the parameters that requires gradients."""
    config = model.config
    parameters = {n: p.detach().double().requires_grad_() for n, p in model.named_parameters()}
    mask, labels = batch["loss_mask"], batch["labels"].clamp(min=0)
    x = parameters["model.embed_tokens.weight"][batch["input_ids"]]
    balances, router_zs = [], []
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        named = parameters | {n: b.double() for n, b in model.named_buffers()}
        p = {n.removeprefix(prefix): t for n, t in named.items() if n.startswith(prefix)}
        x = x + attention(p, config, norm(x, p["input_layernorm.weight"], config.rms_norm_eps), batch)
        normed = norm(x, p["post_attention_layernorm.weight"], config.rms_norm_eps)
        if config.is_moe_layer(layer):
            out, balance, router_z = experts(p, config, normed, mask)
            balances.append(balance)
            router_zs.append(router_z)
        else:
            out = gated_unit(config, normed, *(p[f"mlp.{n}_proj.weight"] for n in ("gate", "up", "down")))
        x = x + out
    x = norm(x, parameters["model.norm.weight"], config.rms_norm_eps)
    head = parameters.get("lm_head.weight", parameters["model.embed_tokens.weight"])
    log_partition = (x @ head.T).exp().sum(-1).log()
    target = (x * head[labels]).sum(-1)
    zero = torch.zeros((), dtype=torch.float64)
    return parameters | {
        "loss": (mask * (log_partition - target)).sum(),
        "z": (mask * log_partition**2).sum(),
        "aux": torch.stack(balances).mean() if balances else zero,
        "router_z": torch.stack(router_zs).mean() if router_zs else zero,
    }


def objective(loss: Tensor, z: Tensor, aux: Tensor, router_z: Tensor, tokens: int) -> Tensor:
    return (loss + Z * z + AUX * aux + ROUTER_Z * router_z) / tokens


def our_objective(model: Decoder, batch: dict[str, Tensor], tokens: int) -> Tensor:
    out = model(**batch)
    return objective(out.loss_sum, out.z_loss_sum, out.aux_loss_sum, out.router_z_loss_sum, tokens)


def relative(ours: Tensor, expected: Tensor) -> float:
    ours, expected = ours.detach().double(), expected.detach()
    return ((ours - expected).norm() / expected.norm().clamp(min=1e-12)).item()


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-13)])
def test_sums_and_gradients_equal_the_dense_reference(name, dtype, tolerance):
    check_against_reference(make(VARIANTS[name]).to(dtype), tolerance)


def check_against_reference(model: Decoder, tolerance: float) -> None:
    batch = ragged_batch()
    tokens = int(batch["loss_mask"].sum())
    expected = reference(model, batch)
    sums = [expected[key] for key in ("loss", "z", "aux", "router_z")]
    out = model(**batch)
    ours = [out.loss_sum, out.z_loss_sum, out.aux_loss_sum, out.router_z_loss_sum]
    for our, their in zip(ours, sums, strict=True):
        assert relative(our, their) < tolerance
    our_objective(model, batch, tokens).backward()
    objective(*sums, tokens).backward()
    gradients = {parameter_name: parameter.grad for parameter_name, parameter in model.named_parameters()}
    whole = torch.cat([gradient.flatten() for gradient in gradients.values()])
    assert relative(whole, torch.cat([expected[n].grad.flatten() for n in gradients])) < tolerance
    for parameter_name in gradients:
        # One norm's gradient is a sum of many terms that cancel; the router's must be as good as the whole.
        bound = tolerance if parameter_name.endswith("mlp.gate.weight") else 3 * tolerance
        assert relative(gradients[parameter_name], expected[parameter_name].grad) < bound, parameter_name


@pytest.mark.parametrize("experts", ["streamed", "reference"])
@pytest.mark.parametrize("hidden_act", ACTIVATIONS)
def test_every_activation_has_its_formula_in_every_feed_forward_network(hidden_act, experts):
    config = dataclasses.replace(VARIANTS["shared"], hidden_act=hidden_act)
    check_against_reference(make(config, Kernels(experts=experts)).double(), 1e-13)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", ["moe", "shared", "sigmoid"])
def test_splitting_a_batch_changes_no_gradient(name, rows):
    model, batch = make(VARIANTS[name]).double(), ragged_batch()
    tokens = int(batch["loss_mask"].sum())
    our_objective(model, batch, tokens).backward()
    whole = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    for start in range(0, 4, rows):
        part = {key: value[start : start + rows] for key, value in batch.items()}
        our_objective(model, part, tokens).backward()
    for name, parameter in model.named_parameters():
        assert relative(parameter.grad, whole[name]) < 1e-13, name


@pytest.mark.parametrize("name", ["moe", "fine-grained"])
def test_a_batch_without_loss_tokens_has_zero_sums_and_zero_gradients(name):
    model, batch = make(VARIANTS[name]), ragged_batch()
    batch = {key: value[-1:] for key, value in batch.items()}
    out = model(**batch)
    our_objective(model, batch, 1).backward()
    assert out.loss_sum == out.z_loss_sum == out.aux_loss_sum == out.router_z_loss_sum == 0
    assert out.expert_counts.sum() == 0
    assert all(not parameter.grad.any() for parameter in model.parameters())


def test_counts_losses_and_entropy_describe_the_tokens_that_count():
    model, batch = make(CONFIG), ragged_batch()
    mask = batch["loss_mask"]
    out = model(**batch)
    assert out.logits is None
    assert out.expert_counts.shape == (2, 5)
    assert out.expert_counts.dtype == torch.int64
    assert out.expert_counts.sum(-1).tolist() == [2 * int(mask.sum())] * 2
    assert not out.token_losses.requires_grad
    assert not out.token_losses[~mask].any()
    torch.testing.assert_close(out.token_losses.sum(), out.loss_sum.detach())
    logits = model(batch["input_ids"], batch["position_ids"], batch["document_ids"]).logits
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
    torch.testing.assert_close(out.token_losses, expected.detach(), atol=1e-5, rtol=1e-5)
    mean_entropy = out.router_entropy_sum / mask.sum()
    assert ((mean_entropy > 0.1) & (mean_entropy <= math.log(5))).all()


@pytest.mark.parametrize("name", ["moe", "sigmoid"])
def test_a_uniform_router_has_full_entropy_and_balance_one(name):
    model, batch = make(VARIANTS[name]), ragged_batch()
    for layer in (1, 2):
        model.model.layers[layer].mlp.gate.weight.data.zero_()
    out = model(**batch)
    tokens = batch["loss_mask"].sum()
    torch.testing.assert_close(out.router_entropy_sum / tokens, torch.full((2,), math.log(5)))
    torch.testing.assert_close(out.aux_loss_sum / tokens, torch.tensor(1.0))


@pytest.mark.parametrize("sign", [-1, 1])
def test_sigmoid_routing_stays_finite_where_every_score_under_or_overflows(sign):
    model, batch = make(VARIANTS["sigmoid"]).eval(), ragged_batch()
    for layer in (1, 2):  # every logit is far from 0, and all of one sign
        gate = model.model.layers[layer].mlp.gate.weight.data
        gate.copy_(torch.full_like(gate, 300.0 * sign))
        model.model.layers[layer].post_attention_layernorm.weight.data.fill_(1.0)
        model.model.layers[layer].post_attention_layernorm.register_forward_hook(lambda *x: x[2].abs() + 1)
    out = model(**batch)
    our_objective(model, batch, int(batch["loss_mask"].sum())).backward()
    assert all(torch.isfinite(each).all() for each in out[1:])
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
    mean_entropy = out.router_entropy_sum / batch["loss_mask"].sum()
    assert ((mean_entropy > 0) & (mean_entropy <= math.log(5) + 1e-5)).all()


def test_a_dense_model_has_empty_expert_statistics():
    out = make(VARIANTS["dense"])(**ragged_batch())
    assert out.expert_counts.shape == (0, 0)
    assert out.router_entropy_sum.shape == (0,)
    assert out.aux_loss_sum == 0
