"""Activation sizes are those of the tensors that autograd keeps, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from llm_pretrain.config import ModelConfig
from llm_pretrain.model import (
    ActivationShape,
    Decoder,
    count_parameters,
    head_bytes,
    layer_activation_bytes,
    layer_matrices,
    sizes,
)
from llm_pretrain.model.kernels import layers
from llm_pretrain.model.kernels.loss import fused_linear_cross_entropy
from llm_pretrain.training import initialize_weights

DENSE = ModelConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=24,
)
MOE = replace(DENSE, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=80)
ROWS, LENGTH = 2, 360


def kept_bytes(config: ModelConfig, *, document_length: int, bf16: bool) -> int:
    """Storage that the forward pass keeps, parameters and low-precision copies of them left out."""
    model = Decoder(config)
    initialize_weights(model, 0)
    ids = torch.randint(0, 512, (ROWS, LENGTH))
    documents = (torch.arange(LENGTH) // document_length).expand(ROWS, LENGTH).contiguous()
    shapes = {tuple(p.shape) for p in model.parameters()} | {
        tuple(p.T.shape) for p in model.parameters() if p.dim() == 2
    }
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        is_copy = tensor.dtype == torch.bfloat16 and tuple(tensor.shape) in shapes
        if place not in parameters and not is_copy:
            found[place] = (tensor.untyped_storage().nbytes(), tensor)
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=bf16),
    ):
        model(ids, None, documents, ids, torch.ones(ROWS, LENGTH, dtype=torch.bool))
    return sum(size for size, _ in found.values())


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("document_length", [120, LENGTH])
@pytest.mark.parametrize("config", [DENSE, MOE, replace(DENSE, qk_norm=False)], ids=["dense", "moe", "llama"])
def test_a_layer_keeps_what_is_counted(config: ModelConfig, document_length: int, bf16: bool):
    def kept(layers: int) -> int:
        several = replace(config, num_hidden_layers=layers)
        return kept_bytes(several, document_length=document_length, bf16=bf16)

    shape = ActivationShape(ROWS, LENGTH, document_length, bf16, False)
    assert layer_activation_bytes(config, shape, 0) == pytest.approx(kept(3) - kept(2), rel=0.05)


def test_matrices_are_all_parameters_but_norms_routers_and_embeddings():
    for config in (
        DENSE,
        MOE,
        replace(MOE, num_hidden_layers=2, first_k_dense_replace=1, n_shared_experts=1),
    ):
        vectors = sum(p.numel() for p in Decoder(config).parameters() if p.dim() == 1)
        routers = len(config.moe_layers) * config.num_experts * config.hidden_size
        table = 512 * config.hidden_size * (1 if config.tie_word_embeddings else 2)
        matrices = sum(sum(layer_matrices(config, layer)) for layer in range(config.num_hidden_layers))
        assert matrices == count_parameters(config).total - vectors - routers - table


def peak_bytes(compute: Callable[[], Any]) -> int:
    """The most that torch has alive at once, inside its operations too, beyond what there is at the start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        compute()
    result = profiler.profiler
    assert result is not None
    # the one view with an entry for each allocation; `key_averages` only adds them up
    sizes = [event.nbytes() for event in result.kineto_results.events() if event.name() == "[memory]"]
    alive = most = 0
    for size in sizes:
        alive += size
        most = max(most, alive)
    return most


@pytest.mark.parametrize(("bf16", "onednn"), [(False, False), (False, True), (True, True)])
def test_the_head_takes_what_is_counted(monkeypatch, bf16: bool, onednn: bool):
    """At its peak; the processor decides whether oneDNN multiplies in fp32, which allocates its results.

    In bf16 no fp32 copy of the whole weight's gradient is allocated beside the sum.
    """
    for module in (layers, sizes):
        monkeypatch.setattr(module, "prefers_onednn", lambda: onednn)
    config = replace(DENSE, vocab_size=16384, hidden_size=128)
    hidden = torch.randn(1, 96, 128, dtype=torch.bfloat16 if bf16 else torch.float32, requires_grad=True)
    weight = torch.randn(16384, 128, requires_grad=True)
    labels = torch.randint(0, 16384, (1, 96))

    def compute() -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return fused_linear_cross_entropy(hidden, weight, labels, labels >= 0, 1e-4)

    copies = 2 * weight.numel() if bf16 else 0  # of the weight, which are counted elsewhere
    counted = head_bytes(config, ActivationShape(1, 96, 96, bf16, False), is_fused=True)
    assert counted == pytest.approx(peak_bytes(compute) - copies, rel=0.1)
