"""The initial weights, all of them, in one function."""

from __future__ import annotations

import math

import torch

from llm_pretrain.model.decoder import Decoder
from llm_pretrain.model.transfer import initial_factor

_RESIDUAL_OUTPUTS = ("o_proj.weight", "down_proj.weight", "experts.down_proj")


@torch.no_grad()
def initialize_weights(model: Decoder, seed: int, base_hidden_size: int | None = None) -> None:
    """Set every parameter and buffer to its initial value.

    Norms are one and router biases zero. Matrices are normal(0, initializer_range); those that write
    into the residual stream (o_proj, down_proj) are narrower by sqrt(2 · num_hidden_layers), so that
    its variance does not grow with depth (GPT-2, section 2.3), or zero with `zero_init_residual`. Values
    are drawn on the CPU in the order of `named_parameters`, those that zero replaces too: the same for
    every device, launcher and world size.

    Args:
        model: Any placement and floating type.
        seed: Decides all values.
        base_hidden_size: Width at which the learning rates were found, where they are to be transferred
            to the model's (`transfer.py`); initial values follow.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    for name, parameter in model.named_parameters():
        factor = initial_factor(name, parameter, model.config.hidden_size, base_hidden_size)
        if parameter.dim() == 1:
            parameter.fill_(factor)
            continue
        is_output = name.endswith(_RESIDUAL_OUTPUTS)
        narrower = math.sqrt(2 * model.config.num_hidden_layers) if is_output else 1.0
        values = torch.empty(parameter.shape, dtype=torch.float32)
        width = factor * model.config.initializer_range / narrower
        values.normal_(0.0, width, generator=generator)
        parameter.copy_(values.zero_() if is_output and model.config.zero_init_residual else values)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.zero_()
