"""Parameters and FLOPs per token of a model, computed without running it."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.model.decoder import Decoder


class ParameterCounts(NamedTuple):
    """Numbers of trained scalars; a tied embedding counts once."""

    total: int
    active: int
    """Scalars that one token uses: the whole model except the experts that the token is not routed to."""


@cache
def count_parameters(config: ModelConfig) -> ParameterCounts:
    """Count the parameters of a model on the meta device, which takes no memory."""
    with torch.device("meta"):
        total = sum(parameter.numel() for parameter in Decoder(config).parameters())
    expert = 3 * config.hidden_size * config.expert_intermediate_size
    idle = len(config.moe_layers) * (config.num_experts - config.num_experts_per_tok) * expert
    return ParameterCounts(total=total, active=total - idle)


def flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """Floating-point operations per trained token, forward and backward: the numerator of MFU.

    `6 · active parameters in matrix products + 12 · layers · heads · head_dim · S` (PaLM,
    arXiv:2204.02311, appendix B). The count includes the head, but not the embedding lookup. It has attention
    over all S positions although attention is causal, as in published figures.
    """
    embedding = (config.vocab_size or 0) * config.hidden_size
    products = count_parameters(config).active - (0 if config.tie_word_embeddings else embedding)
    attention = config.num_hidden_layers * config.num_attention_heads * config.attention_head_dim
    return 6.0 * products + 12.0 * attention * sequence_length


class LayerMatrices(NamedTuple):
    """Numbers of scalars in a layer's weight matrices, without the router."""

    dense: int
    """Scalars that every token passes through."""
    experts: int
    """Scalars of all routed experts."""


def layer_matrices(config: ModelConfig, layer: int) -> LayerMatrices:
    """The matrices of decoder layer `layer`."""
    attention = config.num_attention_heads + config.num_key_value_heads
    attention *= 2 * config.hidden_size * config.attention_head_dim
    if not config.is_moe_layer(layer):
        return LayerMatrices(attention + 3 * config.hidden_size * config.intermediate_size, 0)
    expert = 3 * config.hidden_size * config.expert_intermediate_size
    return LayerMatrices(attention + config.n_shared_experts * expert, config.num_experts * expert)
