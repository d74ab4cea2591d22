"""From a ladder to a run: the choice is the law's optimum, and what is planned is what was priced."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from support.ladders import LAW, make_ladder

from llm_pretrain.config import DistributedConfig, validate
from llm_pretrain.errors import ConfigError
from llm_pretrain.ladder import Outlook, Spending, tokens_per_step
from llm_pretrain.model import flops_per_token

FLOPS = Spending(3e14, lambda size: size.flops_per_token, 1.0)


@pytest.fixture(scope="module")
def outlook(tmp_path_factory: pytest.TempPathFactory) -> Outlook:
    ladder = make_ladder(tmp_path_factory.mktemp("planning") / "ladder")
    return Outlook.of(dataclasses.replace(ladder, rate_factor=2.0), samples=15)


def best(outlook: Outlook, spending: Spending, **limits: float):
    return min(outlook.choices(spending, **limits), key=lambda choice: choice.prediction.loss)


def test_the_size_of_least_loss_is_chosen_and_the_budget_spent(outlook: Outlook):
    choices = outlook.choices(FLOPS)
    found = best(outlook, FLOPS)
    for choice in choices:
        step = choice.flops / choice.steps
        assert 0 <= 3e14 - choice.flops < step
    exact = min(choices, key=lambda choice: LAW.loss(choice.parameters, choice.tokens, 50_000_000))
    assert found.config.model.hidden_size == exact.config.model.hidden_size
    assert choices[0].parameters < found.parameters < choices[-1].parameters
    assert found.prediction.low < LAW.loss(found.parameters, found.tokens, 50_000_000) < found.prediction.high


def test_limits_and_serving_make_it_smaller(outlook: Outlook):
    free = best(outlook, FLOPS)
    assert best(outlook, FLOPS, max_parameters=free.parameters - 1).parameters < free.parameters
    served = best(outlook, FLOPS._replace(served=1e8))
    assert served.parameters < free.parameters
    assert served.flops + 2 * served.parameters * 1e8 <= 3e14


def test_more_compute_makes_it_larger_and_better(outlook: Outlook):
    more = FLOPS._replace(budget=3e15)
    assert best(outlook, more).parameters > best(outlook, FLOPS).parameters
    assert best(outlook, more).prediction.loss < best(outlook, FLOPS).prediction.loss


def test_a_budget_for_nothing_is_refused(outlook: Outlook):
    with pytest.raises(ConfigError, match=r"expected a budget for .* steps"):
        outlook.choices(FLOPS._replace(budget=1e9))
    with pytest.raises(ConfigError, match="at most 10 parameters"):
        outlook.choices(FLOPS, max_parameters=10)


def test_the_planned_run_is_the_choice(outlook: Outlook):
    choice = best(outlook, FLOPS)
    config = outlook.planned(choice, DistributedConfig(cpu_threads=1), 2, "night")
    base = outlook.ladder.base
    assert validate(config, needs_data=False) == []
    assert config.training.max_steps * tokens_per_step(config) == choice.tokens
    assert flops_per_token(config.model, config.training.sequence_length) * choice.tokens == choice.flops
    assert config.optimizer.learning_rate == 2 * base.optimizer.learning_rate
    assert config.optimizer.base_hidden_size == base.model.hidden_size
    assert config.schedule.name == "wsd"
    assert config.schedule.decay_steps == round(choice.steps / 2)


def test_the_predicted_curve_ends_at_the_prediction(outlook: Outlook):
    choice = best(outlook, FLOPS)
    config = outlook.planned(choice, DistributedConfig(), 2, "night")
    curve = outlook.curve(config)
    assert [each.step for each in curve] == sorted({each.step for each in curve})
    assert curve[-1].step == choice.steps
    assert curve[-1].losses == tuple(choice.prediction)
    losses = [each.loss for each in curve]
    assert losses == sorted(losses, reverse=True)
    assert all(each.low < each.loss < each.high for each in curve)


def test_bits_per_byte_follow_the_loss(outlook: Outlook):
    assert outlook.bits_per_byte(2.0) == pytest.approx(0.9)


def test_what_may_not_hold_is_said(outlook: Outlook, tmp_path: Path):
    small = FLOPS._replace(budget=2e11)
    choice = best(outlook, small)
    assert any("not above the ladder's smallest" in line for line in outlook.warnings(choice))
    many = best(outlook, FLOPS._replace(budget=1e16))
    assert any("passed over" in line for line in outlook.warnings(many))
    noisy = Outlook.of(make_ladder(tmp_path / "noisy", noise=0.1), samples=15)
    far = min(noisy.choices(FLOPS._replace(budget=1e16)), key=lambda each: each.prediction.loss)
    assert any("too short to tell" in line for line in noisy.warnings(far))


def test_a_ladder_with_two_sizes_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="expected at least 7 points of 3 sizes"):
        Outlook.of(make_ladder(tmp_path / "short", sizes=(32, 64)))


def test_without_stable_points_there_is_the_end_alone(outlook: Outlook):
    ladder = outlook.ladder
    points = tuple(point for point in ladder.points if point.decayed)
    bare = Outlook.of(dataclasses.replace(ladder, points=points), samples=2)
    config = bare.planned(best(bare, FLOPS), DistributedConfig(), 2, "night")
    assert len(bare.curve(config)) == 1
