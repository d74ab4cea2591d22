"""Choices of experts that differ between two runs: ties are told from errors by the routers' scores."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from llm_pretrain.audit.ties import Moves, Routing, compare_routing, find_ties, global_batch, loads, route
from llm_pretrain.audit.variants import Variant
from llm_pretrain.checkpoints.opening import open_model
from llm_pretrain.config.tree import Config
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.model.moe import Router
from llm_pretrain.runs.rows import rows_of


def routing(*ranking: list[list[float]]) -> Routing:
    """One expert for each position of each sequence, by scores [G, S, E]."""
    scores = torch.tensor(ranking, dtype=torch.float64)
    return Routing(scores, scores == scores.amax(-1, keepdim=True))


HIGH, LOW = [0.504, 0.496], [0.496, 0.504]
"""Two choices of which each is 1.6 % of the higher score away from the other."""


def test_a_choice_that_differs_has_the_gap_of_its_scores():
    same = compare_routing([routing([HIGH, LOW])], [routing([HIGH, LOW])])
    assert same == Moves(0, 0.0)
    near = compare_routing([routing([HIGH, LOW])], [routing([LOW, LOW])])
    assert near.count == 1
    assert near.gap == pytest.approx(0.008 / 0.504)
    far = compare_routing([routing([[0.9, 0.1], LOW])], [routing([LOW, LOW])])
    assert far.gap == pytest.approx(0.8 / 0.9), "the larger gap of the two runs"
    assert compare_routing([routing([LOW, LOW])], [routing([[0.9, 0.1], LOW])]).gap == far.gap


def test_what_follows_from_an_earlier_layers_choice_is_no_choice_of_its_own():
    """Its own token and those after it in the sequence; not those before, and no other sequence."""
    first = routing([HIGH, HIGH, HIGH], [HIGH, HIGH, HIGH])
    moved = routing([HIGH, LOW, HIGH], [HIGH, HIGH, HIGH])
    far = [0.1, 0.9]
    for position, counted in ((0, 1), (1, 0), (2, 0)):
        second = [HIGH, HIGH, HIGH]
        second[position] = far
        found = compare_routing([first, first], [moved, routing(second, [HIGH, HIGH, HIGH])])
        assert found.count == 1 + counted
        assert (found.gap > 0.5) == bool(counted)
    other = compare_routing([first, first], [moved, routing([HIGH, HIGH, HIGH], [HIGH, HIGH, far])])
    assert other.count == 2


@pytest.fixture(scope="module")
def trained(trained_run) -> tuple[Decoder, Config]:
    opened = open_model(trained_run.folder / "checkpoints" / "step-00000002")
    assert opened.run is not None
    return opened.model, opened.run


def variant_of(config: Config, precision: str, micro_batch_size: int = 4) -> Variant:
    steps = config.training.global_batch_size // micro_batch_size
    return Variant("torchrun", 1, steps, micro_batch_size, precision, "ddp")


def shifted(model: Decoder, amount: float) -> Decoder:
    """A copy whose routers' weights are off by `amount` of their size, in any direction."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(1)
    for module in other.modules():
        if isinstance(module, Router):
            noise = torch.randn(module.weight.shape, generator=generator)
            module.weight.data += amount * module.weight.data.std() * noise
    return other


def row_of(model: Decoder, config: Config, variant: Variant, step: int) -> dict[str, Any]:
    batches = global_batch(config, variant, step)
    mask: Tensor = torch.cat([batch.loss_mask for batch in batches])
    return {"moe/load": loads(route(model, batches, variant.precision), mask)}


def test_a_pass_chooses_as_the_run_did(trained_run, trained):
    """Of the step after its checkpoint, and of no other."""
    model, config = trained
    variant, row = variant_of(config, "fp32"), rows_of(trained_run.folder)[3]
    assert row_of(model, config, variant, 3)["moe/load"] == row["moe/load"]
    assert row_of(model, config, variant, 4)["moe/load"] != row["moe/load"]


@pytest.mark.parametrize(("precision", "amount", "ties"), [
    ("bf16", 5e-3, True), ("bf16", 1e-1, False), ("fp32", 5e-3, False), ("fp32", 0.0, False),
])  # fmt: skip
def test_ties_are_choices_between_scores_that_a_precision_cannot_tell_apart(trained, precision, amount, ties):
    model, config = trained
    variant, models = variant_of(config, precision), [model, shifted(model, amount)]
    rows = [row_of(each, config, variant, 3) for each in models]
    assert (rows[0] != rows[1]) == (amount > 0)
    found = find_ties(models, rows, [variant, variant], config, 3)
    assert found.startswith("choices that differ then: ") == ties, found
    assert bool(found) == ties


def test_choices_that_the_parameters_do_not_explain_are_no_ties(trained):
    """The fault is in the run's own forward pass, which a pass elsewhere does not repeat."""
    model, config = trained
    variant, models = variant_of(config, "bf16"), [model, shifted(model, 5e-3)]
    rows = [row_of(each, config, variant, 3) for each in models]
    assert find_ties(models, rows, [variant, variant], config, 3)
    other = copy.deepcopy(rows[1])
    other["moe/load"][0][:2] = other["moe/load"][0][1::-1]
    assert not find_ties(models, [rows[0], other], [variant, variant], config, 3)
    assert not find_ties(models, rows[::-1], [variant, variant], config, 3)
    smaller = dataclasses.replace(variant, micro_batch_size=2)
    own = row_of(models[1], config, smaller, 3)
    assert own != rows[1], "each pass is in the micro batches of its run"
    assert find_ties(models, [rows[0], own], [variant, smaller], config, 3)
