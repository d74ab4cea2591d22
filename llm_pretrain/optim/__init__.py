"""Optimizers: AdamW and Muon, parameter groups, EMA, the learning-rate schedule and µP."""

from llm_pretrain.optim.ema import AVERAGE, average_name, ema_parameters
from llm_pretrain.optim.muon import BATCH_ELEMENTS, Muon
from llm_pretrain.optim.orthogonal import product_dtype
from llm_pretrain.optim.param_groups import (
    Role,
    adamw_factor,
    build_optimizer,
    initial_factor,
    parameter_role,
)
from llm_pretrain.optim.schedule import decay_length, learning_rate, set_learning_rate
from llm_pretrain.optim.sharded import as_sharded, replicate_dims, to_local

__all__ = [
    "AVERAGE",
    "BATCH_ELEMENTS",
    "Muon",
    "Role",
    "adamw_factor",
    "as_sharded",
    "average_name",
    "build_optimizer",
    "decay_length",
    "ema_parameters",
    "initial_factor",
    "learning_rate",
    "parameter_role",
    "product_dtype",
    "replicate_dims",
    "set_learning_rate",
    "to_local",
]
