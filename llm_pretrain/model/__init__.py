"""The decoder, dense or mixture of experts: its forward pass, initial weights and sizes."""

from llm_pretrain.model.attention import Attention
from llm_pretrain.model.cache import KeyValueCache
from llm_pretrain.model.decoder import Decoder, DecoderOutput, full_precision_modules
from llm_pretrain.model.experts import Experts, experts_reference
from llm_pretrain.model.initialization import initialize_weights
from llm_pretrain.model.kernels import Kernels
from llm_pretrain.model.loss_head import IGNORE_INDEX
from llm_pretrain.model.router import update_router_bias
from llm_pretrain.model.sizes import ParameterCounts, count_parameters, flops_per_token

__all__ = [
    "IGNORE_INDEX",
    "Attention",
    "Decoder",
    "DecoderOutput",
    "Experts",
    "Kernels",
    "KeyValueCache",
    "ParameterCounts",
    "count_parameters",
    "experts_reference",
    "flops_per_token",
    "full_precision_modules",
    "initialize_weights",
    "update_router_bias",
]
