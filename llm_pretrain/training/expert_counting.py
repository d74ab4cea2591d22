"""The counting pass: how many tokens of the whole global batch each expert gets, before anything is trained.

What the balance loss of scope `global_batch` needs and no micro batch can know. It computes no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from llm_pretrain.config import Config
from llm_pretrain.data import Batch
from llm_pretrain.training.engine import Engine, seed_dropout


def with_global_expert_counts(
    engine: Engine, config: Config, micro_batches: Sequence[Batch]
) -> Sequence[Batch]:
    """This rank's micro batches of a step, carrying the expert counts of all ranks' if the loss needs them.

    A forward pass per micro batch with the dropout, precision and mode of the training pass, so that each
    token goes where it will go then, and one integer all-reduce. Nothing of it where no balance loss of
    scope `global_batch` is trained, or where one micro batch is the whole batch and its own counts serve.
    Every rank makes the same number of forward passes, which sharded strategies need.

    Args:
        engine: Whose `forward` and `reduce_sum` are used.
        config: Of the run.
        micro_batches: The window that is about to be trained on, with loss tokens on some rank.
    """
    if not _is_counted(config) or engine.world_size * len(micro_batches) == 1:
        return micro_batches
    counts = torch.zeros((), dtype=torch.int64, device=engine.device)
    with torch.no_grad():
        for batch in micro_batches:
            seed_dropout(config, batch)
            counts = counts + engine.forward(batch).expert_counts
    total = engine.reduce_sum(counts)
    return [replace(batch, global_expert_counts=total) for batch in micro_batches]


def _is_counted(config: Config) -> bool:
    model = config.model
    is_global = model.router_aux_loss_scope == "global_batch"
    return is_global and model.router_aux_loss_coef > 0 and bool(model.moe_layers)
