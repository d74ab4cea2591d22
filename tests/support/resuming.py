"""A small decoder in training, with checkpoints, in one process and without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from support.checkpoint_helpers import SINGLE_RANK, Run
from torch import Tensor

from llm_pretrain.checkpoints.store import CheckpointStore
from llm_pretrain.config.tree import Config
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.optim.build import build_optimizer
from llm_pretrain.training.model_setup import initialize_weights


class Attempt(Run):
    """One attempt at a run: trains on random tokens that depend on the step alone."""

    def __init__(self, config: Config, folder: Path, *, seed: int = 0, scaler: Any = None):
        self.config, self.step, self.scaler, self.world_size = config, 0, scaler, 1
        self.model: Any = Decoder(config.model)
        initialize_weights(self.model, seed)
        self.optimizer = build_optimizer(self.model, config.optimizer, config.training.precision)
        self.store = CheckpointStore(folder, SINGLE_RANK, keep_last=2)

    def train(self, steps: int, module: Any = None) -> Attempt:
        """Take steps of AdamW; a scaler, where there is one, scales the loss."""
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.step)
            ids = torch.randint(self.config.model.vocab_size or 0, (2, 17), generator=generator)
            loss = self.model(ids[:, :-1], labels=ids[:, 1:]).loss_sum / 32
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.step += 1
        return self

    def parameters(self) -> dict[str, Tensor]:
        """Copies by name."""
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}


def drift(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Norm of the difference over the norm, all parameters together; 0.0 means the same bits."""
    assert left.keys() == right.keys()
    pairs: Sequence[tuple[Tensor, Tensor]] = [(left[name].double(), right[name].double()) for name in left]
    difference = sum(float((a - b).square().sum()) for a, b in pairs)
    return (difference / sum(float(b.square().sum()) for _, b in pairs)) ** 0.5
