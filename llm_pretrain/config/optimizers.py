"""What each optimizer declares of itself, for all that depends on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Role = Literal["embedding", "hidden", "router", "final norm", "norm"]
"""Role of a parameter: `embedding` is the embedding or the head, `hidden` a matrix of a layer or a stack."""
Feature = Literal["rows of experts", "tp", "pp", "deepspeed", "average"]
"""What an optimizer may refuse: experts whose rows several ranks share, axes, a strategy, `ema_decay`."""


@dataclass(frozen=True)
class Declaration:
    """What an optimizer keeps, needs and refuses.

    Args:
        title: Its name in texts.
        moments: Tensors of a parameter's shape in its state, by role; 2 for a role without an entry.
        matrix_rate: The setting of its own with the learning rate of the layers' matrices, if there is one.
        needs_whole_matrices: Whether ranks exchange the layers' matrices, to compute with whole ones.
        refuses: What it cannot be combined with, and why: the end of the message.
    """

    title: str
    moments: Mapping[Role, int] = field(default_factory=dict)
    matrix_rate: str | None = None
    needs_whole_matrices: bool = False
    refuses: Mapping[Feature, str] = field(default_factory=dict)


OPTIMIZERS = {
    "adamw": Declaration("AdamW"),
    "muon": Declaration(
        "Muon",
        moments={"hidden": 1},
        matrix_rate="muon_learning_rate",
        needs_whole_matrices=True,
        refuses={
            "rows of experts": ", which needs whole matrices",
            "tp": "",
            "pp": "",
            "deepspeed": ", which needs whole matrices, but ZeRO's optimizer sees flat parts of them",
        },
    ),
}
"""The optimizers by `optimizer.name`; any other name is the import path of a class."""
_CLASS = Declaration(
    "class",
    refuses={
        "pp": ", which may need the parameters of all stages",
        "deepspeed": ", whose state ZeRO's optimizer may not hold",
        "average": ", which may not count the steps that an average needs",
    },
)


def declaration(name: str) -> Declaration:
    """What the optimizer declares that `optimizer.name` names."""
    return OPTIMIZERS.get(name, _CLASS)


def refusal(name: str, feature: Feature, where: str, advice: str = "") -> list[str]:
    """The message about an optimizer that refuses `feature`; empty if it does not.

    `where` and `advice` are the message's words for the feature and for what else to do.
    """
    refuses = declaration(name).refuses
    if feature not in refuses:
        return []
    others = " or ".join(other for other in OPTIMIZERS if feature not in OPTIMIZERS[other].refuses)
    return [f"optimizer.name: expected {others} {where}, found {name}{refuses[feature]}{advice}"]
