"""Dropout depends on the seed, the step and the micro batch's number, and on nothing else."""

from __future__ import annotations

import pytest
import torch

from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.config.tree import Config, RunConfig
from llm_pretrain.data.assembly import Batch
from llm_pretrain.training.engine import seed_dropout


def batch_at(step: int, micro_batch: int, device: str = "cpu") -> Batch:
    ones = torch.ones((1, 2), dtype=torch.int64, device=device)
    return Batch(
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


def with_seed(seed: int, dropout: float = 0.5) -> Config:
    return Config(run=RunConfig(seed=seed), model=ModelConfig(hidden_dropout=dropout))


def draw(seed: int, step: int, micro_batch: int) -> torch.Tensor:
    seed_dropout(with_seed(seed), batch_at(step, micro_batch))
    return torch.nn.functional.dropout(torch.ones(256), 0.5)


def test_the_same_place_in_the_run_drops_the_same():
    first = draw(1, 2, 3)
    torch.rand(7)  # whatever was drawn in between
    assert torch.equal(draw(1, 2, 3), first)


def test_another_seed_step_or_micro_batch_drops_otherwise():
    places = [(1, 2, 3), (0, 2, 3), (1, 3, 3), (1, 2, 4), (12, 3, 3)]
    drawn = {tuple(draw(*place).tolist()) for place in places}
    assert len(drawn) == len(places)


def test_a_device_of_another_kind_is_seeded_too(monkeypatch: pytest.MonkeyPatch):
    seeded: list[int] = []
    monkeypatch.setattr(torch, "manual_seed", seeded.append)
    seed_dropout(with_seed(1), batch_at(2, 3))
    assert seeded == []  # a CPU's costs less by itself
    for _ in range(2):
        seed_dropout(with_seed(1), batch_at(2, 3, "meta"))
    assert len(seeded) == 2
    assert seeded[0] == seeded[1] == torch.initial_seed()


@pytest.mark.parametrize(
    "model", [ModelConfig(hidden_dropout=0.1), ModelConfig(attention_dropout=0.1), ModelConfig()]
)
def test_without_dropout_nothing_is_seeded(model: ModelConfig):
    torch.manual_seed(5)
    seed_dropout(Config(model=model), batch_at(2, 3))
    has_dropout = model != ModelConfig()
    assert (torch.initial_seed() != 5) == has_dropout
