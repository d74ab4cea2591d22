"""What a forward pass keeps for its backward pass, in bytes, without running it.

Every term names the tensor that it stands for; a test compares the sums with what autograd really keeps. Not
the memory of a step: weights, gradients and optimizer state are `training/estimation.py`'s.

Letters: H hidden_size, Q and K widths of all query and all key heads, I intermediate_size, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

from llm_pretrain.config import ModelConfig

_FP32, _INT64 = 4, 8
_CPU_CHUNK, _GPU_CHUNK = 1 << 24, 1 << 27
"""Logits of a chunk of the fused loss head (see loss_head_fused.py)."""
_CPU_PARTS = 4
"""In which that head computes the weight's gradient on a CPU."""
_CPU_SOFTMAX, _CPU_CROSS_ENTROPY = 1 << 17, 1 << 18
"""Logits whose softmax a CPU takes at a time, in that head and in the other (see loss_head.py)."""
_BLOCKS_FROM, _BLOCKS_TO, _KEPT_LENGTH = 64, 1024, 512
_ROWS, _LOW_PRECISION_ROWS = 64, 128
"""Of attention in blocks on a CPU (see attention.py and attention_blocks.py)."""


class Shape(NamedTuple):
    """The micro batch and how it is computed.

    Args:
        rows: Sequences.
        length: Positions of each.
        document_length: Mean tokens of a document piece; `length` or more is one document a row.
        low_precision: Whether autocast makes the products bf16 or fp16.
        on_gpu: Whether it runs on CUDA.
    """

    rows: int
    length: int
    document_length: int
    low_precision: bool
    on_gpu: bool

    @property
    def tokens(self) -> int:
        """Of the micro batch."""
        return self.rows * self.length

    @property
    def product_bytes(self) -> int:
        """Of an element of a matrix product."""
        return 2 if self.low_precision else _FP32


def layer_activation_bytes(config: ModelConfig, shape: Shape, layer: int) -> int:
    """What decoder layer `layer` keeps; low-precision copies of its weights are not in it."""
    per_token = _norm_bytes(config, shape) * 2 + _attention_bytes(config, shape)
    per_token += _moe_bytes(config, shape) if config.is_moe_layer(layer) else _dense_bytes(config, shape)
    return int(per_token * shape.tokens)


def _norm_bytes(config: ModelConfig, shape: Shape) -> int:
    """Of an RMSNorm: its input, which is the residual stream, and the scale; the result for the products."""
    return config.hidden_size * (_FP32 + shape.product_bytes) + _FP32


def _attention_bytes(config: ModelConfig, shape: Shape) -> float:
    heads, keys, low = config.num_attention_heads, config.num_key_value_heads, shape.product_bytes
    query_size, key_size = (each * config.attention_head_dim for each in (heads, keys))
    kept: float = low * query_size  # o_proj's input
    if config.qk_norm:  # its input and scales
        kept += low * (query_size + key_size) + _FP32 * (heads + keys)
    if shape.on_gpu:  # query, key, value and log-partition; the result is o_proj's input
        return kept + low * (query_size + 2 * key_size) + _FP32 * heads
    mean = min(shape.document_length, shape.length)
    if mean >= _BLOCKS_FROM and (shape.low_precision or mean <= _BLOCKS_TO):
        probabilities = heads * low * _seen_keys(mean, shape) if mean <= _KEPT_LENGTH else 0
        return kept + _FP32 * (query_size + key_size) + low * key_size + probabilities
    joined = mean < shape.length or shape.low_precision
    return kept + _FP32 * (query_size + 2 * key_size + heads + (query_size if joined else 0))


def _seen_keys(length: int, shape: Shape) -> float:
    """Keys that a query's probabilities are kept of, on average over a document: up to its block's end."""
    size = _LOW_PRECISION_ROWS if shape.low_precision else _ROWS
    ends = [*range(size, length, size), length]
    return sum((end - start) * end for start, end in zip([0, *ends], ends, strict=False)) / length


def _dense_bytes(config: ModelConfig, shape: Shape) -> int:
    """Gate and up, and their product for down_proj."""
    return 3 * config.intermediate_size * shape.product_bytes


def _moe_bytes(config: ModelConfig, shape: Shape) -> int:
    """Router and experts: gate, up and silu of every assignment; the input in fp32 for both."""
    experts, chosen = config.num_experts, config.num_experts_per_tok
    router = 2 * experts * _FP32 + chosen * (_INT64 + 2 * _FP32) + 3 * _FP32
    inside = chosen * (3 * config.expert_intermediate_size + 1) * shape.product_bytes + chosen * 2 * _INT64
    wide_input = config.hidden_size * (_FP32 - shape.product_bytes)  # in fp32 in place of the product's type
    shared = config.n_shared_experts * config.expert_intermediate_size
    kept = 3 * shared * shape.product_bytes
    if shared and shape.low_precision:
        kept += config.hidden_size * shape.product_bytes
    return router + inside + wide_input + kept


def head_bytes(config: ModelConfig, shape: Shape, *, is_fused: bool) -> int:
    """At the peak of head and cross-entropy.

    Whole logits: final norm, logits and their gradient. In chunks: final norm, the gradients of hidden states
    and weight, which are made in the forward pass, and a chunk's logits. Either: a softmax at a time.
    """
    norm, vocabulary = _norm_bytes(config, shape) * shape.tokens, config.vocab_size or 0
    whole = shape.tokens * vocabulary
    if shape.on_gpu:  # of all logits of a chunk at once, in fp32
        at_a_time = min(whole, _GPU_CHUNK) if is_fused else whole
    else:
        at_a_time = min(whole, _CPU_SOFTMAX if is_fused else _CPU_CROSS_ENTROPY)
    softmax = at_a_time * _FP32 * (2 if shape.low_precision else 1)  # and the logits in fp32 before it
    if not is_fused:
        return norm + 2 * whole * shape.product_bytes + softmax
    chunk = min(whole, _GPU_CHUNK if shape.on_gpu else _CPU_CHUNK) * shape.product_bytes
    weight = vocabulary * config.hidden_size * _FP32
    if not shape.on_gpu:  # a part's product, and a narrow one's copy in fp32, before they are added
        part = -(-vocabulary // _CPU_PARTS) * config.hidden_size
        weight += part * (_FP32 + (shape.product_bytes if shape.low_precision else 0))
    return norm + shape.tokens * config.hidden_size * shape.product_bytes + weight + chunk + softmax
