"""`training.float8`: products of the layers' matrices in FP8, by torchao's float8 training.

Each product scales its operands by their largest value and rounds them to FP8; parameters stay fp32 and keep
their names: checkpoints and exports know nothing of it. Head, router and stacked experts stay as they are.
"""

from __future__ import annotations

import warnings
from importlib.util import find_spec

import torch
from torch import nn

from llm_pretrain.config import Config
from llm_pretrain.errors import ConfigError
from llm_pretrain.model import Decoder

LEAST_CAPABILITY = (8, 9)
"""CUDA compute capability from which on GPUs multiply in FP8 (Ada, Hopper)."""
MULTIPLE = 16
"""All sides of an FP8 product must be multiples of it."""


def check_float8(config: Config) -> None:
    """Stop where FP8 was asked for and cannot be had.

    Raises:
        ConfigError: no GPU, one without FP8, or no torchao.
    """
    if not config.training.float8:
        return
    if not torch.cuda.is_available():
        raise ConfigError(
            "training.float8: expected false on a CPU, found true, which needs a GPU with FP8 products "
            "(compute capability 8.9 or more)"
        )
    if (found := torch.cuda.get_device_capability()) < LEAST_CAPABILITY:
        raise ConfigError(
            f"training.float8: expected false on a GPU of compute capability {found[0]}.{found[1]}, found "
            "true, which needs 8.9 or more"
        )
    if find_spec("torchao") is None:
        raise ConfigError(
            "training.float8: expected the package torchao, found none; pip install 'llm_pretrain[float8]', "
            "or set it false"
        )


def use_float8(model: Decoder, *, emulate: bool = False) -> None:
    """Let the linear maps of the layers multiply in FP8; call it before the layers are compiled or sharded.

    Args:
        model: Not wrapped yet.
        emulate: Round to FP8 but multiply in the inputs' type, on any device; for tests.

    Raises:
        ConfigError: a matrix with a side that FP8 products do not take.
    """
    for name, module in model.model.layers.named_modules():
        if isinstance(module, nn.Linear) and any(side % MULTIPLE for side in module.weight.shape):
            raise ConfigError(
                f"training.float8: expected matrices with sides that are multiples of {MULTIPLE}, found "
                f"layers.{name} with {tuple(module.weight.shape)}; change the model's sizes, or set it false"
            )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about kernels that torchao brings and this does not use
        from torchao.float8 import (  # pyright: ignore[reportMissingImports] (an extra)
            Float8LinearConfig,
            convert_to_float8_training,
        )

        convert_to_float8_training(model.model.layers, config=Float8LinearConfig(emulate=emulate))
