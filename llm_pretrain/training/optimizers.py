"""Optimizers and their parameter groups."""

from __future__ import annotations

from torch import nn
from torch.optim import AdamW, Optimizer

from llm_pretrain.config import OptimizerConfig


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Matrices (two or more dimensions) decay; norms and biases do not. Order is that of the model."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """AdamW in its fused implementation on every device: one kernel, so both launch paths do the same."""
    return AdamW(
        parameter_groups(model, config.weight_decay),
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        fused=True,
    )
