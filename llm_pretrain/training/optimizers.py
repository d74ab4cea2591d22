"""Which optimizer updates which parameter, how fast. The updates themselves are torch's and `muon.py`'s."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import AdamW, Optimizer

from llm_pretrain.checkpoints import AVERAGE
from llm_pretrain.config import OptimizerConfig
from llm_pretrain.model import Decoder, Role, adamw_factor, parameter_role
from llm_pretrain.training.averaging import keep_average
from llm_pretrain.training.muon import Muon

_PAIRS = "experts.gate_up_proj"
_SCALED_ALIKE = {"router": "map"}


def parameter_groups(model: Decoder, config: OptimizerConfig) -> list[dict[str, Any]]:
    """The model's parameters in groups that are updated alike, in the order of the model.

    Matrices (two or more dimensions) decay; norms and biases do not. Muon takes the layers' matrices and
    AdamW the rest: embedding and head are tables with a row for each token, of which a step meets few, and
    a router's rows are scores of experts likewise; none is a map between two spaces whose directions count
    alike. An expert's gate and up stand in one parameter and are two maps, orthogonalised apart, as the two
    matrices of a dense layer are.

    A group's `lr_ratio` is its learning rate over `optimizer.learning_rate`. With a base width it has the
    factors of `model/transfer.py`.
    """
    groups: dict[tuple[str, ...], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kind, settings = _settings(name, parameter, model, config)
            groups.setdefault(kind, {"params": [], **settings})["params"].append(parameter)
    for group in groups.values():
        group["lr"] = config.learning_rate * group["lr_ratio"]
    return list(groups.values())


def _settings(
    name: str, parameter: Tensor, model: Decoder, config: OptimizerConfig
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Which group a parameter belongs to, and that group's settings."""
    role = parameter_role(name, parameter)
    decay = config.weight_decay if parameter.dim() >= 2 else 0.0
    if _is_muons(role, config):
        blocks = 2 if name.endswith(_PAIRS) else 1
        ratio = config.muon_learning_rate / config.learning_rate
        settings = {"algorithm": "muon", "blocks": blocks, "lr_ratio": ratio, "weight_decay": decay}
        return ("muon", str(blocks)), settings
    settings: dict[str, Any] = {"algorithm": "adamw", "blocks": 1} if config.name == "muon" else {}
    if config.base_hidden_size is None:
        kind = ("adamw", "decayed" if parameter.dim() >= 2 else "plain")
        return kind, settings | {"lr_ratio": 1.0, "weight_decay": decay}
    factor = adamw_factor(role, model.config.hidden_size, config.base_hidden_size)
    # what a step takes off a matrix is lr * weight_decay, and stays
    return ("adamw", _SCALED_ALIKE.get(role, role)), settings | {
        "lr_ratio": factor,
        "weight_decay": decay / factor,
    }


def _is_muons(role: Role, config: OptimizerConfig) -> bool:
    return config.name == "muon" and role == "map"


def state_tensors(name: str, parameter: Tensor, config: OptimizerConfig) -> tuple[str, ...]:
    """Keys of what the optimizer keeps of this parameter in its own shape, once it has stepped."""
    on_muon = _is_muons(parameter_role(name, parameter), config)
    moments = ("momentum_buffer",) if on_muon else ("exp_avg", "exp_avg_sq")
    return (*moments, AVERAGE) if config.ema_decay else moments


def build_optimizer(model: Decoder, config: OptimizerConfig, precision: str = "fp32") -> Optimizer:
    """The optimizer that `config` names, over all parameters of the model.

    AdamW in its fused implementation on every device: one kernel, so both launch paths do the same.

    Args:
        model: The model, before any launcher has wrapped it.
        config: Settings of the optimizer.
        precision: `training.precision`; where it is fp32 the update is computed in fp32 throughout.
    """
    groups = parameter_groups(model, config)
    betas, eps = (config.adam_beta1, config.adam_beta2), config.adam_epsilon
    optimizer: Optimizer
    if config.name == "muon":
        momentum, in_bf16 = config.muon_momentum, precision != "fp32"
        optimizer = Muon(
            groups, lr=config.learning_rate, momentum=momentum, betas=betas, eps=eps, in_bf16=in_bf16
        )
    else:
        optimizer = AdamW(groups, lr=config.learning_rate, betas=betas, eps=eps, fused=True)
    # a setting, which a resumed run takes from its configuration, as all that stands here
    optimizer.defaults["lr_ratio"] = 1.0
    if config.ema_decay:
        keep_average(optimizer, config.ema_decay)
    return optimizer
