"""How many parameters a model has and what a token costs, without building it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from llm_pretrain.config import ModelConfig
from llm_pretrain.model.decoder import Decoder


class ParameterCounts(NamedTuple):
    """Trained scalars; a tied embedding counts once."""

    total: int
    active: int
    """Those that one token passes through: of an expert layer, the chosen experts' only."""


def count_parameters(config: ModelConfig) -> ParameterCounts:
    """Count on the meta device: no memory, no time."""
    with torch.device("meta"):
        total = sum(parameter.numel() for parameter in Decoder(config).parameters())
    expert = 3 * config.hidden_size * config.expert_intermediate_size
    idle = len(config.moe_layers) * (config.num_experts - config.num_experts_per_tok) * expert
    return ParameterCounts(total=total, active=total - idle)


def flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """Floating-point operations per trained token, forward and backward: the numerator of MFU.

    `6 · active parameters in matrix products + 12 · layers · heads · head_dim · S` (PaLM,
    arXiv:2204.02311, appendix B). The head counts, the embedding lookup does not; attention counts
    whole rows of S, causal or not, as published figures do.
    """
    embedding = (config.vocab_size or 0) * config.hidden_size
    products = count_parameters(config).active - (0 if config.tie_word_embeddings else embedding)
    attention = config.num_hidden_layers * config.num_attention_heads * config.attention_head_dim
    return 6.0 * products + 12.0 * attention * sequence_length


def matrix_parameters(config: ModelConfig, *, with_experts: bool, with_head: bool = True) -> int:
    """Scalars of the matrices that tokens are multiplied by: no norms, routers or embedding lookup.

    Args:
        config: With its vocabulary.
        with_experts: Count routed experts, all of them.
        with_head: Count the output projection.
    """
    head_dim = config.attention_head_dim
    attention = 2 * config.hidden_size * head_dim * (config.num_attention_heads + config.num_key_value_heads)
    moe, experts = len(config.moe_layers), config.num_experts if with_experts else 0
    total = config.num_hidden_layers * attention
    total += (config.num_hidden_layers - moe) * 3 * config.hidden_size * config.intermediate_size
    expert = 3 * config.hidden_size * config.expert_intermediate_size
    total += moe * (experts + config.n_shared_experts) * expert
    return total + ((config.vocab_size or 0) * config.hidden_size if with_head else 0)
