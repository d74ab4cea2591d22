"""What differs between a checkpoint and the run that wants to continue it, in words.

Every line names the key and both values. Loading itself would notice only a part of this: a tensor of
another dtype is converted without a word, and other data or another batch looks the same from within.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from llm_pretrain.checkpoints.manifest import Manifest
from llm_pretrain.checkpoints.state import TrainingState
from llm_pretrain.errors import MismatchError

_ABSENT = "absent"


def fingerprint_differences(saved: dict[str, str], expected: dict[str, str]) -> list[str]:
    """One line per key whose text differs or that stands on one side only."""
    return _compare(saved, expected)


def optimizer_differences(content: Manifest, optimizer: Optimizer) -> list[str]:
    """At most one line: the optimizer is of another class."""
    return _compare({"optimizer": content.optimizer["class"]}, {"optimizer": type(optimizer).__name__})


def mismatch(path: Path, differences: list[str]) -> MismatchError:
    """The error for differences that every rank sees alike."""
    error = MismatchError(
        f"checkpoint {path} does not match: {'; '.join(differences)}; "
        "continue with the configuration it was made with, or start another run (run.name)"
    )
    error.shared = True
    return error


def state_differences(content: Manifest, target: TrainingState) -> list[str]:
    """One line per tensor or scalar whose name, shape or dtype differs.

    Optimizer state follows its parameters: it is named only where the parameters agree.
    """
    saved = _describe(content.tensors, content.scalars, content.tied)
    current = _describe(target.describe_tensors(), target.scalars, target.tied)
    differences = _compare(*(_select(side, optimizer=False) for side in (saved, current)))
    return differences or _compare(*(_select(side, optimizer=True) for side in (saved, current)))


def _describe(
    tensors: dict[str, dict[str, Any]], scalars: dict[str, dict[str, Any]], tied: dict[str, str]
) -> dict[str, str]:
    shapes = {name: f"{tensor['dtype']}{tensor['shape']}" for name, tensor in tensors.items()}
    numbers = {name: scalar["dtype"] for name, scalar in scalars.items()}
    return {**shapes, **numbers, **{name: f"tied to {first}" for name, first in tied.items()}}


def _select(description: dict[str, str], *, optimizer: bool) -> dict[str, str]:
    return {key: text for key, text in description.items() if key.startswith("optimizer.state.") == optimizer}


def _compare(saved: dict[str, str], current: dict[str, str]) -> list[str]:
    return [
        f"{key} is {saved.get(key, _ABSENT)} in the checkpoint, {current.get(key, _ABSENT)} here"
        for key in sorted({*saved, *current})
        if saved.get(key) != current.get(key)
    ]
