"""Contradictions between the kernels that a configuration names and other fields; part of `validation.py`.

What needs a GPU is refused where the device is known, in `training/building.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from llm_pretrain.config.tree import Config
from llm_pretrain.config.validation_model import Relation


def kernel_problems(config: Config) -> Iterator[str]:
    """Kernels whose package is not there."""
    if config.training.loss_implementation == "liger" and find_spec("liger_kernel") is None:
        yield (
            "training.loss_implementation: expected the package liger-kernel with liger, found none; "
            "pip install 'llm_pretrain[liger]', or set auto"
        )


def kernel_relations(config: Config) -> Iterator[Relation]:
    """Kernels of attention and loss that cannot do what other fields ask of them."""
    training, dropout = config.training, config.model.attention_dropout
    attention, loss = training.attention_implementation, training.loss_implementation
    names = ("training.attention_implementation", "model.attention_dropout")
    if attention in ("varlen", "flex") and dropout > 0:
        yield names, f"{names[0]}: expected auto or sdpa with {names[1]} {dropout}, found {attention}"
    names = ("training.attention_implementation", "training.precision")
    if attention == "varlen" and training.precision == "fp32":
        yield names, f"{names[0]}: expected another than varlen with {names[1]} fp32, found varlen; use bf16"
    names = ("training.loss_implementation", "training.precision")
    if loss in ("fused", "liger") and training.precision == "fp16":
        yield (
            names,
            f"{names[0]}: expected auto or full with {names[1]} fp16, found {loss}, whose gradients are made "
            "before the loss scale is known",
        )
