"""What each optimizer keeps, needs and refuses; checks, memory forecasts and messages read it here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Role = Literal["embedding", "hidden", "router", "final norm", "norm"]
"""Role of a parameter: `embedding` is the embedding or the head, `hidden` a matrix of a layer or a stack."""
Feature = Literal["rows of experts", "tp", "pp", "deepspeed", "average"]
"""What an optimizer may refuse: experts with rows on several ranks, mesh axes, a strategy, `ema_decay`."""


@dataclass(frozen=True)
class Declaration:
    """What an optimizer keeps, needs and refuses.

    Args:
        title: Name of the optimizer in texts.
        moments: Number of state tensors with the parameter's shape, by role; 2 for a role without an entry.
        matrix_rate: Separate setting for the learning rate of the layers' matrices, if there is one.
        needs_whole_matrices: Whether ranks exchange the layers' matrices, to compute with whole matrices.
        refuses: Features that the optimizer refuses, each with the end of the message: the reason.
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
    """The declaration of the optimizer that `optimizer.name` names."""
    return OPTIMIZERS.get(name, _CLASS)


def refusal(name: str, feature: Feature, where: str, advice: str = "") -> list[str]:
    """The message about an optimizer that refuses `feature`; empty if it does not.

    In the message, `where` describes the feature, and `advice` says what else to do.
    """
    refuses = declaration(name).refuses
    if feature not in refuses:
        return []
    others = " or ".join(other for other in OPTIMIZERS if feature not in OPTIMIZERS[other].refuses)
    return [f"optimizer.name: expected {others} {where}, found {name}{refuses[feature]}{advice}"]
