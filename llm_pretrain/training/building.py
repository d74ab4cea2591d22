"""The model that a configuration trains, before it is placed or wrapped."""

from __future__ import annotations

from llm_pretrain.config import Config
from llm_pretrain.model import Decoder, Kernels
from llm_pretrain.training.compiling import compile_layers


def build_model(config: Config) -> Decoder:
    """The decoder with the kernels that `config.training` names, compiled if it says so.

    Its values are still to be set.

    Args:
        config: Resolved.
    """
    training = config.training
    kernels = Kernels(
        experts=training.experts_implementation,
        attention=training.attention_implementation,
        loss=training.loss_implementation,
        z_loss_coef=training.z_loss_coef,
    )
    model = Decoder(config.model, activation_checkpointing=training.activation_checkpointing, kernels=kernels)
    compile_layers(model, config)
    return model
