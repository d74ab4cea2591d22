"""Parameters, FLOPs per token and activation memory of a model, computed without running it.

Letters: H hidden_size, Q and K widths of all query and all key heads, I intermediate_size, E experts.
"""

from __future__ import annotations

from functools import cache
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
    arXiv:2204.02311, appendix B). The head is included, the embedding lookup is not;
    attention is counted over all S positions although it is causal, as in published figures.
    """
    embedding = (config.vocab_size or 0) * config.hidden_size
    products = count_parameters(config).active - (0 if config.tie_word_embeddings else embedding)
    attention = config.num_hidden_layers * config.num_attention_heads * config.attention_head_dim
    return 6.0 * products + 12.0 * attention * sequence_length


class LayerMatrices(NamedTuple):
    """Scalars of a layer's matrices in matrix products, without the router."""

    dense: int
    """Those that every token passes through."""
    experts: int
    """Those of all routed experts."""


def layer_matrices(config: ModelConfig, layer: int) -> LayerMatrices:
    """The matrices of decoder layer `layer`."""
    attention = config.num_attention_heads + config.num_key_value_heads
    attention *= 2 * config.hidden_size * config.attention_head_dim
    if not config.is_moe_layer(layer):
        return LayerMatrices(attention + 3 * config.hidden_size * config.intermediate_size, 0)
    expert = 3 * config.hidden_size * config.expert_intermediate_size
    return LayerMatrices(attention + config.n_shared_experts * expert, config.num_experts * expert)


class ActivationShape(NamedTuple):
    """A micro batch and its computation.

    Args:
        rows: Sequences.
        length: Positions of each.
        document_length: Mean tokens of a document piece; `length` or more means one document per row.
        low_precision: Whether the products run in bf16 or fp16, by autocast.
        on_gpu: Whether it runs on CUDA.
        compiled: Whether the layers are compiled; otherwise a GPU keeps what lies between their kernels too.
        masked: Whether attention takes a mask [rows, 1, length, length] of documents, as `sdpa` on CUDA does.
        checkpointed: Whether the backward pass of a layer computes it again.
        ep_size: Ranks that divide the experts.
    """

    rows: int
    length: int
    document_length: int
    low_precision: bool
    on_gpu: bool
    compiled: bool = False
    masked: bool = False
    checkpointed: bool = False
    ep_size: int = 1

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


def stream_bytes(config: ModelConfig, shape: ActivationShape) -> int:
    """Bytes of the residual stream, a layer's input, or of its gradient."""
    return shape.tokens * config.hidden_size * _FP32


def position_bytes(config: ModelConfig, shape: ActivationShape) -> int:
    """Bytes that all layers share: the rotation's cosine and sine, and the mask of attention."""
    mask = shape.tokens * shape.length if shape.masked else 0
    return shape.tokens * config.attention_head_dim * _FP32 + mask


def _norm_bytes(config: ModelConfig, shape: ActivationShape) -> int:
    """Per token of an RMSNorm: its input (the residual stream), its scale, and its result in the products."""
    return config.hidden_size * (_FP32 + shape.product_bytes) + _FP32


def _attention_bytes(config: ModelConfig, shape: ActivationShape) -> float:
    heads, keys, low = config.num_attention_heads, config.num_key_value_heads, shape.product_bytes
    query_size, key_size = (each * config.attention_head_dim for each in (heads, keys))
    kept: float = low * query_size  # o_proj's input
    if config.qk_norm:  # its input and scales
        width = _FP32 if shape.between_kernels else low
        kept += width * (query_size + key_size) + _FP32 * (heads + keys)
    if shape.on_gpu:  # query, key, value and log-partition; the result is o_proj's input
        if shape.masked:  # keys and values are repeated for every head; the mask as a bias
            return kept + low * (3 * query_size + shape.length) + _FP32 * heads
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
    return _kept_widths(shape) * config.intermediate_size * shape.product_bytes


def _kept_widths(shape: ActivationShape) -> int:
    """Tensors as wide as the gate that a SwiGLU keeps: gate, up and their product, or silu(gate) too."""
    return 4 if shape.between_kernels else 3


def _moe_bytes(config: ModelConfig, shape: ActivationShape) -> int:
    """Router, experts and shared experts, with the fp32 input of all."""
    experts, chosen = config.num_experts, config.num_experts_per_tok
    router = 2 * experts * _FP32 + chosen * (_INT64 + 2 * _FP32) + 3 * _FP32
    inside = chosen * (_expert_row_bytes(config, shape) + shape.product_bytes + 2 * _INT64)
    wide_input = config.hidden_size * (_FP32 - shape.product_bytes)  # in fp32 instead of the product's type
    return router + inside + wide_input + _shared_expert_bytes(config, shape)


def _shared_expert_bytes(config: ModelConfig, shape: ActivationShape) -> int:
    """As `_dense_bytes`, and their input in the products' type."""
    if not config.n_shared_experts:
        return 0
    width = config.n_shared_experts * config.expert_intermediate_size
    low_input = config.hidden_size * shape.product_bytes if shape.low_precision else 0
    return _kept_widths(shape) * width * shape.product_bytes + low_input


def _expert_row_bytes(config: ModelConfig, shape: ActivationShape) -> int:
    """Gate, up and silu of an assignment; uncompiled on a GPU silu · up and their weighted product too.

    On every GPU the assignment has a copy of its token.
    """
    wide = (5 if shape.between_kernels else 3) * config.expert_intermediate_size
    return (wide + (config.hidden_size if shape.on_gpu else 0)) * shape.product_bytes


class WeightGradient(NamedTuple):
    """Bytes of an element of a weight's gradient.

    Args:
        computed: When it is computed, in fp32 unless FSDP reduces it later. The product in low precision then
            has the place of the weight's copy.
        kept: From then on until the layer's backward pass ends, unless it is added to another.
        copy: Of the weight's copy in low precision, which is free from then on.
    """

    computed: int
    kept: int
    copy: int


def layer_forward_bytes(config: ModelConfig, shape: ActivationShape, layer: int) -> int:
    """Most bytes that the forward pass of a layer adds to `layer_activation_bytes`: on a GPU of experts.

    These are their results, sorted by expert and by token, and each token's sum. Between ranks, rows are held
    in the order of both: before they leave, when they arrive, and before they return.
    """
    if not (shape.on_gpu and config.is_moe_layer(layer)):
        return 0
    token = shape.tokens * config.hidden_size * shape.product_bytes
    narrow = token * config.num_experts_per_tok
    return 5 * narrow if shape.ep_size > 1 else 2 * narrow + token


def layer_backward_bytes(
    config: ModelConfig, shape: ActivationShape, layer: int, gradient: WeightGradient
) -> int:
    """Most bytes that the backward pass of a layer adds to `layer_activation_bytes`.

    It has most inside the feed-forward part, beside the gradient of the residual stream; a checkpointed layer
    perhaps in the forward pass that it repeats.
    """
    stream = stream_bytes(config, shape)
    again = stream + layer_forward_bytes(config, shape, layer) if shape.checkpointed else 0
    if not config.is_moe_layer(layer):
        return stream + _dense_backward_bytes(config, shape, config.intermediate_size, gradient)
    if not shape.on_gpu:
        return stream + _streamed_backward_bytes(config, shape, gradient)
    inside = _grouped_backward_bytes(config, shape, gradient)
    if not config.n_shared_experts:
        return max(again, stream + inside)
    # Theirs is computed first: what they kept is free then, but for the gradient of their input.
    width = config.n_shared_experts * config.expert_intermediate_size
    inside += stream - _shared_expert_bytes(config, shape) * shape.tokens
    return max(again, stream + inside, stream + _dense_backward_bytes(config, shape, width, gradient))


def _dense_backward_bytes(
    config: ModelConfig, shape: ActivationShape, intermediate: int, gradient: WeightGradient
) -> int:
    size, hidden = shape.product_bytes, config.hidden_size
    wide = shape.tokens * intermediate * size
    into_down = shape.tokens * hidden * size if shape.low_precision else 0  # the stream's gradient, cast
    return max(
        into_down + wide + hidden * intermediate * gradient.computed,  # down_proj: its input's gradient
        2 * wide
        + hidden * intermediate * gradient.kept,  # silu · up: three gradients, and the product is free
    )


def _grouped_backward_bytes(config: ModelConfig, shape: ActivationShape, gradient: WeightGradient) -> int:
    """Of experts by grouped products."""
    size, hidden, intermediate = shape.product_bytes, config.hidden_size, config.expert_intermediate_size
    rows = shape.tokens * config.num_experts_per_tok  # with even experts also those from other ranks
    narrow, wide = rows * hidden * size, rows * intermediate * size
    weight = config.num_experts // shape.ep_size * hidden * intermediate
    kept = rows * _expert_row_bytes(config, shape) - narrow
    token = shape.tokens * hidden * size
    # The routing weight's product has gradients of both factors and its own, and its result is free. Compiled
    # they are those of gate and up, and down_proj's input.
    weighing = 2 * wide
    if shape.between_kernels:
        frees_factor = shape.checkpointed or not shape.low_precision
        weighing = 3 * rows * intermediate * _FP32 - (wide if frees_factor else 0)
    return max(
        token + narrow + wide + weight * gradient.computed,  # down_proj: gradients of its result and input
        weighing + weight * gradient.kept,
        narrow
        + 2 * wide
        - kept
        + weight * (2 * gradient.computed + gradient.kept - gradient.copy),  # gate and up
    )


def _streamed_backward_bytes(config: ModelConfig, shape: ActivationShape, gradient: WeightGradient) -> int:
    """Experts one by one, with up to twice the mean of their rows; their weights' gradients are whole."""
    size, hidden, intermediate = shape.product_bytes, config.hidden_size, config.expert_intermediate_size
    assigned = shape.tokens * config.num_experts_per_tok
    rows = min(assigned, 2 * -(-assigned // config.num_experts))
    collected = assigned * hidden * size if shape.low_precision else 0
    weights = 3 * config.num_experts // shape.ep_size * hidden * intermediate * _FP32
    return rows * (5 * intermediate + hidden) * size + collected + weights


def head_bytes(config: ModelConfig, shape: ActivationShape, *, is_fused: bool) -> int:
    """Peak bytes of head and cross-entropy.

    Whole logits: final norm, logits and their gradient. In chunks: final norm, the gradients of hidden states
    and weight, which are computed in the forward pass, and the logits of a chunk. Both: the softmax of some
    rows.
    """
    hidden, vocabulary = shape.tokens * config.hidden_size, config.vocab_size or 0
    norm = hidden * (2 * _FP32 + (shape.product_bytes if shape.low_precision else 0))
    whole = shape.tokens * vocabulary
    if shape.on_gpu:  # the fused head's kernel has no temporaries
        at_a_time = 0 if is_fused else whole
    else:
        at_a_time = min(whole, CPU_SOFTMAX_ELEMENTS if is_fused else CPU_CROSS_ENTROPY_ELEMENTS)
    softmax = at_a_time * _FP32 * (2 if shape.low_precision else 1)  # and the logits in fp32 before it
    if not is_fused:
        return norm + 2 * whole * shape.product_bytes + softmax
    chunks = -(-whole // (GPU_CHUNK if shape.on_gpu else CPU_CHUNK))
    chunk = -(-shape.tokens // chunks) * vocabulary * shape.product_bytes
    weight = vocabulary * config.hidden_size * _FP32
    if not shape.on_gpu and (shape.low_precision or prefers_onednn()):
        # The product of a part of the weight's gradient, and its fp32 copy if it is narrower, before it is
        # added.
        part = -(-vocabulary // CPU_WEIGHT_PARTS) * config.hidden_size
        weight += part * (_FP32 + (shape.product_bytes if shape.low_precision else 0))
    return norm + hidden * shape.product_bytes + weight + chunk + softmax
