"""The decoder, dense or mixture of experts: its forward pass, initial weights and sizes."""

from llm_pretrain.model.activation_sizes import Shape as ActivationShape
from llm_pretrain.model.activation_sizes import head_bytes, layer_activation_bytes
from llm_pretrain.model.cache import KeyValueCache
from llm_pretrain.model.decoder import Decoder, DecoderOutput, full_precision_modules
from llm_pretrain.model.experts import Experts, experts_obstacle, experts_reference
from llm_pretrain.model.initialization import initialize_weights
from llm_pretrain.model.kernels import Kernels
from llm_pretrain.model.loss_head import IGNORE_INDEX
from llm_pretrain.model.router import update_router_bias
from llm_pretrain.model.sizes import (
    ParameterCounts,
    count_parameters,
    flops_per_token,
    matrix_parameters,
)
from llm_pretrain.model.transfer import Role, adamw_factor, parameter_role

__all__ = [
    "IGNORE_INDEX",
    "ActivationShape",
    "Decoder",
    "DecoderOutput",
    "Experts",
    "Kernels",
    "KeyValueCache",
    "ParameterCounts",
    "Role",
    "adamw_factor",
    "count_parameters",
    "experts_obstacle",
    "experts_reference",
    "flops_per_token",
    "full_precision_modules",
    "head_bytes",
    "initialize_weights",
    "layer_activation_bytes",
    "matrix_parameters",
    "parameter_role",
    "update_router_bias",
]
