"""Which optimizer updates which parameter, how fast. The updates themselves are torch's and `muon.py`'s."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import AdamW, Optimizer

from llm_pretrain.checkpoints import AVERAGE
from llm_pretrain.config import OptimizerConfig
from llm_pretrain.model import Decoder
from llm_pretrain.training.averaging import keep_average
from llm_pretrain.training.muon import Muon

_TABLES = ("embed_tokens.weight", "lm_head.weight")
_ROUTER = "mlp.gate.weight"
_PAIRS = "experts.gate_up_proj"


def parameter_groups(model: Decoder, config: OptimizerConfig) -> list[dict[str, Any]]:
    """The model's parameters in groups that are updated alike, in the order of the model.

    Matrices (two or more dimensions) decay; norms and biases do not. Muon takes the layers' matrices and
    AdamW the rest: embedding and head are tables with a row for each token, of which a step meets few, and
    a router's rows are scores of experts likewise; none is a map between two spaces whose directions count
    alike. An expert's gate and up stand in one parameter and are two maps, orthogonalised apart, as the two
    matrices of a dense layer are.

    A group's `lr_ratio` is its learning rate over `optimizer.learning_rate`.
    """
    groups: dict[tuple[str, ...], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        decays = parameter.dim() >= 2
        if is_muon := config.name == "muon" and _is_map(name, parameter):
            kind = ("muon", "pairs" if name.endswith(_PAIRS) else "single")
        else:
            kind = ("adamw", "decayed" if decays else "plain")
        group = groups.setdefault(
            kind,
            {"params": [], "weight_decay": config.weight_decay if decays else 0.0, "lr_ratio": 1.0},
        )
        group["params"].append(parameter)
        if config.name == "muon":
            group["algorithm"], group["blocks"] = kind[0], 2 if kind[1] == "pairs" else 1
        if is_muon:
            group["lr_ratio"] = config.muon_learning_rate / config.learning_rate
    for group in groups.values():
        group["lr"] = config.learning_rate * group["lr_ratio"]
    return list(groups.values())


def _is_map(name: str, parameter: Tensor) -> bool:
    """Whether it is a matrix, or a stack of them, between two spaces of features."""
    return parameter.dim() >= 2 and not name.endswith((*_TABLES, _ROUTER))


def state_tensors(name: str, parameter: Tensor, config: OptimizerConfig) -> tuple[str, ...]:
    """Keys of what the optimizer keeps of this parameter in its own shape, once it has stepped."""
    on_muon = config.name == "muon" and _is_map(name, parameter)
    moments = ("momentum_buffer",) if on_muon else ("exp_avg", "exp_avg_sq")
    return (*moments, AVERAGE) if config.ema_decay else moments


def build_optimizer(model: Decoder, config: OptimizerConfig) -> Optimizer:
    """The optimizer that `config` names, over all parameters of the model.

    AdamW in its fused implementation on every device: one kernel, so both launch paths do the same.
    """
    groups = parameter_groups(model, config)
    betas, eps = (config.adam_beta1, config.adam_beta2), config.adam_epsilon
    optimizer: Optimizer
    if config.name == "muon":
        optimizer = Muon(groups, lr=config.learning_rate, momentum=config.muon_momentum, betas=betas, eps=eps)
    else:
        optimizer = AdamW(groups, lr=config.learning_rate, betas=betas, eps=eps, fused=True)
    # a setting, which a resumed run takes from its configuration, as all that stands here
    optimizer.defaults["lr_ratio"] = 1.0
    if config.ema_decay:
        keep_average(optimizer, config.ema_decay)
    return optimizer
