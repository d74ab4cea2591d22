"""AdamW: torch's fused implementation on every device, so that both launch paths run the same kernel."""

from __future__ import annotations

from torch.optim import AdamW

from llm_pretrain.config.tree import OptimizerConfig
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.optim.param_groups import parameter_groups


def build(model: Decoder, config: OptimizerConfig, precision: str) -> AdamW:
    """AdamW over all parameters; the arguments are those of `build_optimizer`."""
    groups, betas = parameter_groups(model, config), (config.adam_beta1, config.adam_beta2)
    return AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.adam_epsilon, fused=True)
