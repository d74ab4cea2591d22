"""Counted parameters against the model's own."""

from __future__ import annotations

from dataclasses import replace

from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.model.sizes import count_parameters, layer_matrices

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
