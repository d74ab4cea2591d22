"""Implementations of experts, attention and loss, and the choice between them."""

from llm_pretrain.model.kernels.attention import DocumentLayout, part_attention
from llm_pretrain.model.kernels.choice import (
    Kernels,
    configured_kernels,
    describe_kernels,
    experts_requirement,
    loss_implementation,
    supports_varlen,
)
from llm_pretrain.model.kernels.experts import combine, dispatch, inverse_order
from llm_pretrain.model.kernels.layers import (
    DTYPES,
    GPU_TYPES,
    autocast,
    is_gpu,
    linear,
    product_dtype,
    uncompiled,
)
from llm_pretrain.model.kernels.loss import (
    CPU_CHUNK,
    GPU_CHUNK,
    LossSums,
    fused_linear_cross_entropy,
    softmax_gradient_of_part,
)

__all__ = [
    "CPU_CHUNK",
    "DTYPES",
    "GPU_CHUNK",
    "GPU_TYPES",
    "DocumentLayout",
    "Kernels",
    "LossSums",
    "autocast",
    "combine",
    "configured_kernels",
    "describe_kernels",
    "dispatch",
    "experts_requirement",
    "fused_linear_cross_entropy",
    "inverse_order",
    "is_gpu",
    "linear",
    "loss_implementation",
    "part_attention",
    "product_dtype",
    "softmax_gradient_of_part",
    "supports_varlen",
    "uncompiled",
]
