"""Parameter groups: which algorithm updates which parameter, at which rate and weight decay.

µP scales initial values and learning rates by width (arXiv:2203.03466, table 8; arXiv:2310.17813). n is the
width, b the base width at which the learning rates were tuned, and r = b / n. Inner sizes grow in proportion
to n, and heads grow in number, not in size.

- Hidden matrices (those of the layers): an output sums n products. At initialisation they are independent and
  add up like sqrt(n), so the standard deviation of the entries is multiplied by sqrt(r). The entries of an
  AdamW update have one size and signs that correlate with the inputs: the products add up like n, so the rate
  is multiplied by r. `weight_decay` is multiplied by 1 / r, so that rate · weight_decay does not change
  (arXiv:2405.13698).
- Embedding and head: an embedding row is looked up, not summed, and does not change. The head sums n products
  into a logit, and its updates correlate with its inputs, so the logit needs a factor r. The final norm
  applies that factor, so that the head may be tied to the embedding: its weight starts at r instead of 1, and
  its rate is multiplied by r.
- Router: scaled as a head whose outputs are experts; its entries and its rate are multiplied by r.
- Other norms act on one feature each and do not change.
- Muon: the singular values of an update are rate · sqrt(max(1, out / in)) at any width, and those of a hidden
  matrix with entries multiplied by sqrt(r) stay near a constant times sqrt(out / in), so the rate does not
  change.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from torch import Tensor
from torch.optim import AdamW, Optimizer

from llm_pretrain.config.tree import OptimizerConfig
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.optim.ema import keep_ema

Role = Literal["embedding", "hidden", "router", "final norm", "norm"]


def parameter_role(name: str, parameter: Tensor) -> Role:
    """The role of a decoder's parameter, by its name.

    `embedding` is the embedding or the head; `hidden` is a matrix of a layer, or a stack of matrices.
    """
    if name == "model.norm.weight":
        return "final norm"
    if parameter.dim() < 2:
        return "norm"
    if name.endswith("mlp.gate.weight"):
        return "router"
    return "hidden" if ".layers." in name else "embedding"


def initial_factor(name: str, parameter: Tensor, hidden_size: int, base_hidden_size: int | None) -> float:
    """Factor on the standard deviation of a matrix or the initial value of a norm; 1 without a base."""
    ratio = (base_hidden_size or hidden_size) / hidden_size
    role = parameter_role(name, parameter)
    if role == "hidden":
        return math.sqrt(ratio)
    return ratio if role in ("router", "final norm") else 1.0


def adamw_factor(role: Role, hidden_size: int, base_hidden_size: int | None) -> float:
    """Factor on the learning rate of a parameter that AdamW updates; 1 without a base."""
    ratio = (base_hidden_size or hidden_size) / hidden_size
    return ratio if role in ("hidden", "router", "final norm") else 1.0


_GATE_UP = "experts.gate_up_proj"
_SCALED_AS = {"router": "hidden"}
"""Roles with the settings of another role."""


def parameter_groups(model: Decoder, config: OptimizerConfig) -> list[dict[str, Any]]:
    """The model's parameters in groups with equal settings, in the order of the model.

    Weight decay applies to matrices (two or more dimensions), not to norms and biases. Muon updates the
    matrices of the layers, AdamW the rest: embedding and head have one row per token, of which a step updates
    few, and a router has one row per expert. The gate and up projections of an expert share a parameter but
    are orthogonalised separately, like the two matrices of a dense layer.

    A group's `lr_ratio` is its learning rate ÷ `optimizer.learning_rate`; a base width multiplies it by the
    factors of µP, above.
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
    """The key of a parameter's group, and the settings of that group."""
    role = parameter_role(name, parameter)
    decay = config.weight_decay if parameter.dim() >= 2 else 0.0
    if _uses_muon(role, config):
        blocks = 2 if name.endswith(_GATE_UP) else 1
        ratio = config.muon_learning_rate / config.learning_rate
        settings = {"algorithm": "muon", "blocks": blocks, "lr_ratio": ratio, "weight_decay": decay}
        return ("muon", str(blocks)), settings
    settings: dict[str, Any] = {"algorithm": "adamw", "blocks": 1} if config.name == "muon" else {}
    if config.base_hidden_size is None:
        kind = ("adamw", "decayed" if parameter.dim() >= 2 else "plain")
        return kind, settings | {"lr_ratio": 1.0, "weight_decay": decay}
    factor = adamw_factor(role, model.config.hidden_size, config.base_hidden_size)
    # a step multiplies a matrix by 1 - lr * weight_decay, which must not depend on the width
    return ("adamw", _SCALED_AS.get(role, role)), settings | {
        "lr_ratio": factor,
        "weight_decay": decay / factor,
    }


def _uses_muon(role: Role, config: OptimizerConfig) -> bool:
    return config.name == "muon" and role == "hidden"


def build_optimizer(model: Decoder, config: OptimizerConfig, precision: str = "fp32") -> Optimizer:
    """The optimizer that `config` names, over all parameters of the model.

    AdamW is torch's fused implementation on every device, so that both launch paths run the same kernel.

    Args:
        model: Not wrapped yet.
        config: Settings of the optimizer.
        precision: `training.precision`; with fp32 Muon multiplies in fp32 too.
    """
    groups = parameter_groups(model, config)
    betas, eps = (config.adam_beta1, config.adam_beta2), config.adam_epsilon
    optimizer: Optimizer
    if config.name == "muon":
        from llm_pretrain.optim.muon import Muon

        in_bf16 = precision != "fp32"
        optimizer = Muon(groups, lr=config.learning_rate, betas=betas, eps=eps, in_bf16=in_bf16)
    else:
        optimizer = AdamW(groups, lr=config.learning_rate, betas=betas, eps=eps, fused=True)
    # a resumed run takes settings that are in `defaults` from its configuration, not from the checkpoint
    optimizer.defaults["lr_ratio"] = 1.0
    if config.ema_decay:
        keep_ema(optimizer, config.ema_decay)
    return optimizer
