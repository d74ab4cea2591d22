"""Experts as a list of modules that run only when a token chose them: the layout that our decoder avoids."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.model.kernels.choice import AUTO, Kernels
from llm_pretrain.model.layers import FeedForward


class ListExperts(nn.ModuleList):
    """In the place of `Experts`; an expert without tokens takes no part in the forward pass."""

    def __init__(self, config: ModelConfig, kernels: Kernels = AUTO):
        size = config.expert_intermediate_size
        super().__init__([FeedForward(config.hidden_size, size) for _ in range(config.num_experts)])

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """As `Experts.forward`."""
        out = torch.zeros_like(x)
        for number, expert in enumerate(self):
            token, place = (chosen == number).nonzero(as_tuple=True)
            if len(token):
                out = out.index_add(0, token, expert(x[token]) * weights[token, place, None])
        return out
