"""Activation sizes are those of the tensors that autograd keeps, layer by layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from llm_pretrain.config import ModelConfig
from llm_pretrain.model import (
    ActivationShape,
    Decoder,
    count_parameters,
    initialize_weights,
    layer_activation_bytes,
    matrix_parameters,
)

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


def test_matrices_are_all_parameters_but_norms_routers_and_a_lookup():
    for config in (DENSE, MOE):
        vectors = sum(p.numel() for p in Decoder(config).parameters() if p.dim() == 1)
        routers = len(config.moe_layers) * config.num_experts * config.hidden_size
        total = count_parameters(config).total
        assert matrix_parameters(config, with_experts=True) == total - vectors - routers
