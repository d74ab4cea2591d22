"""The decoder, dense or mixture of experts: its forward pass, kernels and sizes."""

from llm_pretrain.model.attention import Attention, LayerCache
from llm_pretrain.model.decoder import (
    Decoder,
    DecoderLayer,
    DecoderOutput,
    OutputHead,
    compile_layer,
    full_precision_modules,
)
from llm_pretrain.model.kernels import (
    Kernels,
    configured_kernels,
    describe_kernels,
    experts_requirement,
    loss_implementation,
    resolved_kernels,
    supports_varlen,
)
from llm_pretrain.model.kernels.attention import DocumentLayout, part_attention
from llm_pretrain.model.kernels.experts import combine, dispatch, experts_reference, inverse_order
from llm_pretrain.model.kernels.layers import is_gpu, linear, product_dtype, uncompiled
from llm_pretrain.model.kernels.loss import (
    CPU_CHUNK,
    GPU_CHUNK,
    IGNORE_INDEX,
    LossSums,
    fused_linear_cross_entropy,
    softmax_gradient_of_part,
)
from llm_pretrain.model.kernels.self_check import FIXED, PARTS, KernelCheck, Part, check_kernels
from llm_pretrain.model.layers import Embedding, FeedForward, Linear
from llm_pretrain.model.moe import Experts, Router, RouterSums, update_router_bias
from llm_pretrain.model.sizes import (
    ParameterCounts,
    count_parameters,
    flops_per_token,
    layer_matrices,
)

__all__ = [
    "CPU_CHUNK",
    "FIXED",
    "GPU_CHUNK",
    "IGNORE_INDEX",
    "PARTS",
    "Attention",
    "Decoder",
    "DecoderLayer",
    "DecoderOutput",
    "DocumentLayout",
    "Embedding",
    "Experts",
    "FeedForward",
    "KernelCheck",
    "Kernels",
    "LayerCache",
    "Linear",
    "LossSums",
    "OutputHead",
    "ParameterCounts",
    "Part",
    "Router",
    "RouterSums",
    "check_kernels",
    "combine",
    "compile_layer",
    "configured_kernels",
    "count_parameters",
    "describe_kernels",
    "dispatch",
    "experts_reference",
    "experts_requirement",
    "flops_per_token",
    "full_precision_modules",
    "fused_linear_cross_entropy",
    "inverse_order",
    "is_gpu",
    "layer_matrices",
    "linear",
    "loss_implementation",
    "part_attention",
    "product_dtype",
    "resolved_kernels",
    "softmax_gradient_of_part",
    "supports_varlen",
    "uncompiled",
    "update_router_bias",
]
