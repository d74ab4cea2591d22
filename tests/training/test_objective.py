"""The objective is the global token mean: against a float64 reference, at every split of the batch."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.corpora import make_config
from torch import Tensor

from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.config.tree import Config
from llm_pretrain.data.assembly import Batch
from llm_pretrain.data.loader import global_batches
from llm_pretrain.data.store import TokenStore
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.training.model_setup import initialize_weights
from llm_pretrain.training.step import Objective

MODEL = ModelConfig(
    vocab_size=320,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
    router_aux_loss_coef=0.02,
    router_z_loss_coef=0.003,
)


def build(config: Config, dtype: torch.dtype) -> Decoder:
    model = Decoder(config.model)
    initialize_weights(model, seed=3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0 if "gate.weight" in name else 1.5)  # away from a uniform router
    return model.to(dtype)


def config_of(store: TokenStore, micro_batch_size: int) -> Config:
    config = make_config(
        store, micro_batch_size=micro_batch_size, global_batch_size=8, max_steps=3, sequence_length=48
    )
    training = dataclasses.replace(config.training, z_loss_coef=1e-3)
    return dataclasses.replace(config, model=MODEL, training=training)


def reference_objective(model: Decoder, batches: list[Batch], config: Config) -> Tensor:
    """The sum over the whole global batch, written from its definition, one sequence at a time."""
    routers: list[Tensor] = []
    hooks = [
        module.register_forward_pre_hook(lambda module, inputs: routers.append(inputs[0] @ module.weight.T))
        for name, module in model.named_modules()
        if name.endswith("mlp.gate")
    ]
    total, loss_tokens = torch.zeros((), dtype=torch.float64), 0
    for batch in batches:
        for row in range(len(batch.input_ids)):
            routers.clear()
            mask = batch.loss_mask[row].double()
            logits = model(
                batch.input_ids[row : row + 1],
                batch.position_ids[row : row + 1],
                batch.document_ids[row : row + 1],
            ).logits[0]
            log_partition = logits.logsumexp(-1)
            picked = logits.gather(-1, batch.labels[row].clamp(min=0)[:, None])[:, 0]
            total = total + (mask * (log_partition - picked)).sum()
            total = total + config.training.z_loss_coef * (mask * log_partition**2).sum()
            n_i = mask.sum()
            loss_tokens += int(n_i)
            if n_i == 0:
                continue
            for scores in (each[0] for each in routers):
                probs = scores.softmax(-1)
                top = probs.topk(config.model.num_experts_per_tok, -1).indices
                chosen = torch.zeros_like(probs).scatter(-1, top, 1.0)
                share = (mask[:, None] * chosen).sum(0) / (config.model.num_experts_per_tok * n_i)
                mean_prob = (mask[:, None] * probs).sum(0) / n_i
                balance = config.model.num_experts * (share.detach() * mean_prob).sum()
                router_z = (mask * scores.logsumexp(-1) ** 2).sum()
                total = total + config.model.router_aux_loss_coef * n_i * balance / len(routers)
                total = total + config.model.router_z_loss_coef * router_z / len(routers)
    for hook in hooks:
        hook.remove()
    return total / loss_tokens


def accumulated_gradients(model: Decoder, config: Config, world_size: int) -> dict[str, Tensor]:
    """What W ranks and A micro batches give: mean over ranks of sums of objectives divided by A."""
    batches = list(global_batches(config, start_step=0))
    accumulation = config.gradient_accumulation_steps(world_size)
    window = batches[: accumulation * world_size]
    num_loss_tokens = sum(batch.num_loss_tokens for batch in window)
    objective = Objective(config, world_size)
    for batch in window:
        loss = objective(model(**batch.model_inputs()), num_loss_tokens) / accumulation
        (loss / world_size).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def store(masked_store) -> TokenStore:
    return TokenStore(masked_store)


@pytest.fixture(scope="module")
def reference(store: TokenStore) -> dict[str, Tensor]:
    """float64 gradients of the definition, over one whole global batch in a single process."""
    config = config_of(store, micro_batch_size=8)
    model = build(config, torch.float64)
    batches = list(global_batches(config, start_step=0))[:1]
    reference_objective(model, batches, config).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("world_size", "micro_batch_size", "dtype", "bound"),
    [
        (1, 8, torch.float64, 1e-12),
        (1, 1, torch.float64, 1e-12),
        (2, 2, torch.float64, 1e-12),
        (4, 1, torch.float64, 1e-12),
        (2, 2, torch.float32, 1e-6),
    ],
    ids=["1x1", "1x8", "2x2", "4x2", "fp32"],
)
def test_gradients_equal_the_float64_reference(
    store: TokenStore,
    reference: dict[str, Tensor],
    world_size: int,
    micro_batch_size: int,
    dtype: torch.dtype,
    bound: float,
):
    config = config_of(store, micro_batch_size)
    gradients = accumulated_gradients(build(config, dtype), config, world_size)
    assert gradients.keys() == reference.keys()
    assert any("mlp.gate.weight" in name for name in gradients)
    difference = torch.cat([(gradients[name].double() - reference[name]).flatten() for name in reference])
    whole = torch.cat([each.flatten() for each in reference.values()])
    assert difference.norm() / whole.norm() < bound
    for name in (name for name in reference if name.endswith("mlp.gate.weight")):
        error = (gradients[name].double() - reference[name]).norm() / reference[name].norm()
        assert error < bound, (name, float(error))
