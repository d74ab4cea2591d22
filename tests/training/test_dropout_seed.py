"""Dropout depends on the seed, the step and the micro batch's number, and on nothing else."""

from __future__ import annotations

import torch

from llm_pretrain.data import Batch
from llm_pretrain.training import seed_dropout


def draw(seed: int, step: int, micro_batch: int) -> torch.Tensor:
    ones = torch.ones((1, 2), dtype=torch.int64)
    batch = Batch(
        input_ids=ones,
        position_ids=ones,
        document_ids=ones,
        labels=ones,
        loss_mask=ones.bool(),
        num_loss_tokens=2,
        step=step,
        micro_batch=micro_batch,
        digest=torch.zeros(8, dtype=torch.int64),
    )
    seed_dropout(seed, batch)
    return torch.nn.functional.dropout(torch.ones(256), 0.5)


def test_the_same_place_in_the_run_drops_the_same():
    first = draw(1, 2, 3)
    torch.rand(7)  # whatever was drawn in between
    assert torch.equal(draw(1, 2, 3), first)


def test_another_seed_step_or_micro_batch_drops_otherwise():
    places = [(1, 2, 3), (0, 2, 3), (1, 3, 3), (1, 2, 4), (12, 3, 3)]
    drawn = {tuple(draw(*place).tolist()) for place in places}
    assert len(drawn) == len(places)
