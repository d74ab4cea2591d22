"""The model that a configuration trains, before it is placed or wrapped."""

from __future__ import annotations

import torch

from llm_pretrain.config import Config
from llm_pretrain.errors import ConfigError
from llm_pretrain.model import Decoder, Kernels, experts_obstacle
from llm_pretrain.training.compiling import compile_layers
from llm_pretrain.training.float8 import use_float8

_PRODUCTS = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Type of the matrix products by precision; fp32 otherwise."""


def build_model(config: Config, device: torch.device | None = None) -> Decoder:
    """The decoder with the kernels that `config.training` names, compiled if it says so.

    Its values are still to be set.

    Args:
        config: Resolved.
        device: Where it will train; without one nobody asks whether its kernels can run there.

    Raises:
        ConfigError: a kernel was asked for that cannot run.
    """
    training = config.training
    kernels = Kernels(
        experts=training.experts_implementation,
        attention=training.attention_implementation,
        loss=training.loss_implementation,
        z_loss_coef=training.z_loss_coef,
    )
    if device is not None:
        _check_kernels(config, kernels, device)
    model = Decoder(config.model, activation_checkpointing=training.activation_checkpointing, kernels=kernels)
    if training.float8:
        use_float8(model)
    compile_layers(model, config)
    return model


def _check_kernels(config: Config, kernels: Kernels, device: torch.device) -> None:
    """A kernel that was asked for by name must not be replaced by another one in silence."""
    dtype = _PRODUCTS.get(config.training.precision, torch.float32)
    if needed := experts_obstacle(config.model, kernels, device, dtype):
        raise ConfigError(
            "training.experts_implementation: expected auto, streamed or reference, found "
            f"{kernels.experts}, which needs {needed}"
        )
    needs_cuda = {
        "training.attention_implementation": (kernels.attention, ("varlen", "flex"), "auto or sdpa"),
        "training.loss_implementation": (kernels.loss, ("liger",), "auto, full or fused"),
    }
    for name, (found, kinds, others) in needs_cuda.items():
        if found in kinds and device.type != "cuda":
            raise ConfigError(f"{name}: expected {others} on {device.type}, found {found}, which needs CUDA")
