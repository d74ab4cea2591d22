"""What optimizers share: each parameter's role, learning rate and weight decay, and this rank's part of it.

µP scales initial values and learning rates by width (arXiv:2203.03466, table 8; arXiv:2310.17813). n is the
width, b the base width at which the learning rates were tuned, and r = b / n. Inner sizes grow in proportion
to n, and heads grow in number, not in size.

- Hidden matrices (those of the layers): an output sums n products. At initialisation the products are
  independent and add up like sqrt(n), so the standard deviation of the entries is multiplied by sqrt(r). The
  entries of an AdamW update have one size, and signs that correlate with the inputs. Their products add up
  like n, so the rate is multiplied by r. `weight_decay` is multiplied by 1 / r, so that rate · weight_decay
  does not change (arXiv:2405.13698).
- Embedding and head: an embedding row is looked up, not summed, and does not change. The head sums n products
  into a logit, and its updates correlate with its inputs, so the logit needs a factor r. The final norm
  applies this factor, so that the head may be tied to the embedding: the norm's weight starts at r instead of
  1, and the norm's rate is multiplied by r.
- Router: scaled as a head whose outputs are experts. Its entries and its rate are multiplied by r.
- Other norms act on one feature each and do not change.
- Muon: an update has singular values of rate · sqrt(max(1, out / in)) at any width. The singular values of
  a hidden matrix with entries multiplied by sqrt(r) stay near a constant times sqrt(out / in). So the rate
  does not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from llm_pretrain.config.optimizers import Role
from llm_pretrain.config.tree import OptimizerConfig
from llm_pretrain.model.decoder import Decoder

if TYPE_CHECKING:  # importing it takes a second
    from torch.distributed.tensor import DTensor

Group = tuple[tuple[str, ...], dict[str, Any]]
"""The key of a parameter group, and the settings of this group."""


def parameter_role(name: str, parameter: Tensor) -> Role:
    """The role of a decoder's parameter, by its name."""
    if name == "model.norm.weight":
        return "final norm"
    if parameter.dim() < 2:
        return "norm"
    if name.endswith("mlp.gate.weight"):
        return "router"
    return "hidden" if ".layers." in name else "embedding"


def initial_factor(name: str, parameter: Tensor, hidden_size: int, base_hidden_size: int | None) -> float:
    """Factor on a matrix's initial standard deviation or a norm's initial value; 1 without a base width."""
    ratio = (base_hidden_size or hidden_size) / hidden_size
    role = parameter_role(name, parameter)
    if role == "hidden":
        return math.sqrt(ratio)
    return ratio if role in ("router", "final norm") else 1.0


def adamw_factor(role: Role, hidden_size: int, base_hidden_size: int | None) -> float:
    """Factor on the learning rate of a parameter that AdamW updates; 1 without a base width."""
    ratio = (base_hidden_size or hidden_size) / hidden_size
    return ratio if role in ("hidden", "router", "final norm") else 1.0


_SCALED_AS = {"router": "hidden"}
"""Roles with the settings of another role."""


def parameter_groups(
    model: Decoder, config: OptimizerConfig, own_group: Callable[[Role, str], Group | None] | None = None
) -> list[dict[str, Any]]:
    """The model's parameters in groups with equal settings, in the order of the model.

    Weight decay applies to matrices (two or more dimensions), not to norms and biases. A group's `lr_ratio`
    is its learning rate ÷ `optimizer.learning_rate`; with a base width, times the factors of µP (above).

    Args:
        model: Not wrapped yet.
        config: Settings of the optimizer.
        own_group: Returns another group for a parameter with this role and name; None for AdamW's group.
    """
    groups: dict[tuple[str, ...], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            role = parameter_role(name, parameter)
            own = own_group(role, name) if own_group else None
            kind, settings = own or _adamw_group(role, parameter, model, config)
            groups.setdefault(kind, {"params": [], **settings})["params"].append(parameter)
    for group in groups.values():
        group["lr"] = config.learning_rate * group["lr_ratio"]
    return list(groups.values())


def _adamw_group(role: Role, parameter: Tensor, model: Decoder, config: OptimizerConfig) -> Group:
    decay = config.weight_decay if parameter.dim() >= 2 else 0.0
    if config.base_hidden_size is None:
        kind = ("adamw", "decayed" if parameter.dim() >= 2 else "plain")
        return kind, {"lr_ratio": 1.0, "weight_decay": decay}
    factor = adamw_factor(role, model.config.hidden_size, config.base_hidden_size)
    # a step multiplies a matrix by 1 - lr * weight_decay, which must not depend on the width
    kind = ("adamw", _SCALED_AS.get(role, role))
    return kind, {"lr_ratio": factor, "weight_decay": decay / factor}


def as_sharded(tensor: Tensor) -> DTensor | None:
    """The tensor as a DTensor; None if it is not sharded."""
    return tensor if hasattr(tensor, "full_tensor") else None  # type: ignore[return-value]


def to_local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory; the tensor itself if it is not sharded."""
    sharded = as_sharded(tensor)
    return tensor if sharded is None else sharded.to_local()


def replicate_dims(sharded: DTensor) -> list[int]:
    """The dimensions of the mesh along which ranks hold the same part."""
    return [dim for dim, placement in enumerate(sharded.placements) if placement.is_replicate()]
