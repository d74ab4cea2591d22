"""Parameters, FLOPs per token and activation memory of a model, computed without running it.

Letters: H hidden_size, Q and K widths of all query and all key heads, I intermediate_size, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from llm_pretrain.config import ModelConfig
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.model.kernels.attention import BLOCKS_FROM, BLOCKS_TO, KEPT_LENGTH, LOW_PRECISION_ROWS, ROWS
from llm_pretrain.model.kernels.layers import prefers_onednn
from llm_pretrain.model.kernels.loss import (
    CPU_CHUNK,
    CPU_CROSS_ENTROPY_ELEMENTS,
    CPU_SOFTMAX_ELEMENTS,
    CPU_WEIGHT_PARTS,
    GPU_CHUNK,
)

_FP32, _INT64 = 4, 8


class ParameterCounts(NamedTuple):
    """Numbers of trained scalars; a tied embedding counts once."""

    total: int
    active: int
    """Those used for one token: of a mixture-of-experts layer, the chosen experts only."""


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
    arXiv:2204.02311, appendix B). The head is included, the embedding lookup is not;
    attention is counted over all S positions although it is causal, as in published figures.
    """
    embedding = (config.vocab_size or 0) * config.hidden_size
    products = count_parameters(config).active - (0 if config.tie_word_embeddings else embedding)
    attention = config.num_hidden_layers * config.num_attention_heads * config.attention_head_dim
    return 6.0 * products + 12.0 * attention * sequence_length


def matrix_parameters(config: ModelConfig, *, with_experts: bool, with_head: bool = True) -> int:
    """Scalars of the matrices in matrix products, without norms, routers and the embedding.

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


class ActivationShape(NamedTuple):
    """A micro batch and its computation.

    Args:
        rows: Sequences.
        length: Positions of each.
        document_length: Mean tokens of a document piece; `length` or more means one document per row.
        low_precision: Whether the products run in bf16 or fp16, by autocast.
        on_gpu: Whether it runs on CUDA.
        compiled: Whether the layers are compiled; otherwise a GPU keeps what lies between their kernels too.
    """

    rows: int
    length: int
    document_length: int
    low_precision: bool
    on_gpu: bool
    compiled: bool = False

    @property
    def between_kernels(self) -> bool:
        """Whether results of elementwise operations are kept: a CPU has kernels of its own."""
        return self.on_gpu and not self.compiled

    @property
    def tokens(self) -> int:
        """Tokens of the micro batch."""
        return self.rows * self.length

    @property
    def product_bytes(self) -> int:
        """Bytes of an element of a matrix product."""
        return 2 if self.low_precision else _FP32


def layer_activation_bytes(config: ModelConfig, shape: ActivationShape, layer: int) -> int:
    """Bytes that autograd saves in decoder layer `layer`, without low-precision copies of its weights."""
    per_token = _norm_bytes(config, shape) * 2 + _attention_bytes(config, shape)
    per_token += _moe_bytes(config, shape) if config.is_moe_layer(layer) else _dense_bytes(config, shape)
    return int(per_token * shape.tokens)


def _norm_bytes(config: ModelConfig, shape: ActivationShape) -> int:
    """Per token of an RMSNorm: its input (the residual stream), its scale, and its result in the products."""
    normed = _FP32 if shape.between_kernels else 0
    return config.hidden_size * (_FP32 + shape.product_bytes + normed) + _FP32


def _attention_bytes(config: ModelConfig, shape: ActivationShape) -> float:
    heads, keys, low = config.num_attention_heads, config.num_key_value_heads, shape.product_bytes
    query_size, key_size = (each * config.attention_head_dim for each in (heads, keys))
    kept: float = low * query_size  # o_proj's input
    if config.qk_norm:  # its input and scales
        kept += low * (query_size + key_size) + _FP32 * (heads + keys)
        if shape.between_kernels:  # input and result in fp32
            kept += (2 * _FP32 - low) * (query_size + key_size)
    if shape.on_gpu:  # query, key, value and log-partition; the result is o_proj's input
        return kept + low * (query_size + 2 * key_size) + _FP32 * heads
    mean = min(shape.document_length, shape.length)
    if mean >= BLOCKS_FROM and (shape.low_precision or mean <= BLOCKS_TO):
        probabilities = heads * low * _seen_keys(mean, shape) if mean <= KEPT_LENGTH else 0
        return kept + _FP32 * (query_size + key_size) + low * key_size + probabilities
    joined = mean < shape.length or shape.low_precision
    return kept + _FP32 * (query_size + 2 * key_size + heads + (query_size if joined else 0))


def _seen_keys(length: int, shape: ActivationShape) -> float:
    """Saved probabilities of a query, on average over a document: of the keys up to the end of its block."""
    size = LOW_PRECISION_ROWS if shape.low_precision else ROWS
    ends = [*range(size, length, size), length]
    return sum((end - start) * end for start, end in zip([0, *ends], ends, strict=False)) / length


def _dense_bytes(config: ModelConfig, shape: ActivationShape) -> int:
    """Gate and up, and their product for down_proj."""
    return (4 if shape.between_kernels else 3) * config.intermediate_size * shape.product_bytes


def _moe_bytes(config: ModelConfig, shape: ActivationShape) -> int:
    """Router and experts: gate, up and silu of every assignment; the fp32 input of both."""
    experts, chosen = config.num_experts, config.num_experts_per_tok
    router = 2 * experts * _FP32 + chosen * (_INT64 + 2 * _FP32) + 3 * _FP32
    wide = (5 if shape.between_kernels else 3) * config.expert_intermediate_size
    rows = config.hidden_size if shape.on_gpu else 0  # each assignment's copy of its token
    inside = chosen * (wide + rows + 1) * shape.product_bytes + chosen * 2 * _INT64
    wide_input = config.hidden_size * (_FP32 - shape.product_bytes)  # in fp32 instead of the product's type
    shared = config.n_shared_experts * config.expert_intermediate_size
    kept = 3 * shared * shape.product_bytes
    if shared and shape.low_precision:
        kept += config.hidden_size * shape.product_bytes
    return router + inside + wide_input + kept


def head_bytes(config: ModelConfig, shape: ActivationShape, *, is_fused: bool) -> int:
    """Peak bytes of head and cross-entropy.

    Whole logits: final norm, logits and their gradient. In chunks: final norm, the gradients of hidden states
    and weight, which are computed in the forward pass, and the logits of a chunk. Both: the softmax of some
    rows.
    """
    norm, vocabulary = _norm_bytes(config, shape) * shape.tokens, config.vocab_size or 0
    whole = shape.tokens * vocabulary
    if shape.on_gpu:  # the fused head's kernel has no temporaries
        at_a_time = 0 if is_fused else whole
    else:
        at_a_time = min(whole, CPU_SOFTMAX_ELEMENTS if is_fused else CPU_CROSS_ENTROPY_ELEMENTS)
    softmax = at_a_time * _FP32 * (2 if shape.low_precision else 1)  # and the logits in fp32 before it
    if not is_fused:
        return norm + 2 * whole * shape.product_bytes + softmax
    chunk = min(whole, GPU_CHUNK if shape.on_gpu else CPU_CHUNK) * shape.product_bytes
    weight = vocabulary * config.hidden_size * _FP32
    if not shape.on_gpu and (shape.low_precision or prefers_onednn()):
        # The product of a part of the weight's gradient, and its fp32 copy if it is narrower, before it is
        # added.
        part = -(-vocabulary // CPU_WEIGHT_PARTS) * config.hidden_size
        weight += part * (_FP32 + (shape.product_bytes if shape.low_precision else 0))
    return norm + shape.tokens * config.hidden_size * shape.product_bytes + weight + chunk + softmax
