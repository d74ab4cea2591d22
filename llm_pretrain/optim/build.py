"""Builds the optimizer that `optimizer.name` names."""

from __future__ import annotations

from importlib import import_module

from torch.optim import AdamW, Optimizer

from llm_pretrain.config.optimizers import OPTIMIZERS, Role
from llm_pretrain.config.tree import OptimizerConfig
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.optim.ema import keep_ema
from llm_pretrain.optim.param_groups import parameter_groups


def build_optimizer(model: Decoder, config: OptimizerConfig, precision: str = "fp32") -> Optimizer:
    """The optimizer that `config` names, over all parameters.

    AdamW is torch's fused implementation on every device, so that both launch paths run the same kernel;
    `build` of its module makes any other.

    Args:
        model: Not wrapped yet.
        config: Settings of the optimizer.
        precision: `training.precision`; with fp32 Muon multiplies in fp32 too.
    """
    optimizer: Optimizer
    if config.name == "adamw":
        groups, betas = parameter_groups(model, config), (config.adam_beta1, config.adam_beta2)
        optimizer = AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.adam_epsilon, fused=True)
    else:
        module = config.name if config.name in OPTIMIZERS else "by_path"
        optimizer = import_module(f"llm_pretrain.optim.{module}").build(model, config, precision)
    # a resumed run takes settings that are in `defaults` from its configuration, not from the checkpoint
    optimizer.defaults["lr_ratio"] = 1.0
    if config.ema_decay:
        keep_ema(optimizer, config.ema_decay)
    return optimizer


def moments(config: OptimizerConfig, role: Role) -> float:
    """Number of fp32 values that the optimizer keeps for each element of a parameter of this role.

    Raises:
        ConfigError: `config.name` is the import path of a class that cannot be used.
    """
    if config.name in OPTIMIZERS:
        return OPTIMIZERS[config.name].moments.get(role, 2)
    from llm_pretrain.optim.by_path import measured_moments

    return measured_moments(config)
