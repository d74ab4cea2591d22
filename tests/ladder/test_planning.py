"""From a ladder to a run, by the law's optimum; and two ladders compared by compute to equal loss."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest
from support.ladders import LAW, make_ladder

from llm_pretrain.config.distributed_config import DistributedConfig
from llm_pretrain.config.loading import validate
from llm_pretrain.errors import ConfigError
from llm_pretrain.forecast.family import Sizes
from llm_pretrain.forecast.ladder_comparison import compare_ladders, flops_for_loss, frontier
from llm_pretrain.forecast.planning import EVALUATIONS, Forecast, best_of
from llm_pretrain.forecast.points import Ladder, Point
from llm_pretrain.model.sizes import flops_per_token

FLOPS = 3e14


@pytest.fixture(scope="module")
def forecast(tmp_path_factory) -> Forecast:
    ladder = make_ladder(tmp_path_factory.mktemp("planning") / "ladder")
    return Forecast(ladder, samples=6)


def best(forecast: Forecast, flops: float, **limits: float):
    return best_of(forecast.choices(flops, **limits))


def test_the_size_of_least_loss_is_chosen_and_the_budget_spent(forecast):
    choices = forecast.choices(FLOPS)
    found = best(forecast, FLOPS)
    for choice in choices:
        step = choice.training.flops / choice.steps
        assert 0 <= 3e14 - choice.training.flops < step
    exact = min(
        choices, key=lambda choice: LAW.loss(choice.size.total_parameters, choice.training.tokens, 50_000_000)
    )
    assert found.size == exact.size
    assert choices[0].size.total_parameters < found.size.total_parameters < choices[-1].size.total_parameters
    assert (
        found.prediction.low
        < LAW.loss(found.size.total_parameters, found.training.tokens, 50_000_000)
        < found.prediction.high
    )


def test_a_limit_makes_it_smaller_and_more_compute_larger_and_better(forecast):
    free, more = best(forecast, FLOPS), best(forecast, 10 * FLOPS)
    count = free.size.total_parameters
    assert best(forecast, FLOPS, max_parameters=count - 1).size.total_parameters < count
    assert more.size.total_parameters > count
    assert more.prediction.loss < free.prediction.loss


def test_a_budget_for_nothing_is_refused(forecast):
    per_token = Sizes(forecast.ladder.base).size(3).flops_per_token
    paid, times = round(1e9 / per_token), f"{3_750_000 * per_token / 1e9:.3g}"
    message = f"for 3,750,000 tokens .*, found one for {paid:,}; raise it {re.escape(times)} times$"
    with pytest.raises(ConfigError, match=message):
        forecast.choices(1e9)
    with pytest.raises(ConfigError, match=r"found one for 0$"):
        forecast.choices(-1e9)  # starting takes longer
    with pytest.raises(ConfigError, match=r"--max-parameters: expected 246,064 or more, .* found 10$"):
        forecast.choices(FLOPS, max_parameters=10)


def test_the_planned_run_is_the_choice(forecast):
    choice = best(forecast, FLOPS)
    config = forecast.config(choice, DistributedConfig(cpu_threads=1), 2, "night")
    base = forecast.ladder.base
    assert validate(config, needs_data=False) == []
    assert config.training.max_steps * config.training.tokens_per_step == choice.training.tokens
    assert (
        flops_per_token(config.model, config.training.sequence_length) * choice.training.tokens
        == choice.training.flops
    )
    assert math.ceil(choice.steps / config.evaluation.eval_steps) <= EVALUATIONS
    assert config.optimizer.learning_rate == base.optimizer.learning_rate
    assert config.optimizer.base_hidden_size == base.model.hidden_size
    assert config.schedule.name == "wsd"
    assert config.schedule.decay_steps == round(choice.steps / 2)


def test_the_predicted_curve_ends_at_the_prediction(forecast):
    choice = best(forecast, FLOPS)
    config = forecast.config(choice, DistributedConfig(), 2, "night")
    curve = forecast.curve(config)
    assert curve[0].step >= min(rung.branches[0] for rung in forecast.ladder.rungs)
    assert [each.step for each in curve] == sorted({each.step for each in curve})
    assert curve[-1].step == choice.steps
    assert curve[-1].losses == tuple(choice.prediction)
    losses = [each.loss for each in curve]
    assert losses == sorted(losses, reverse=True)
    assert all(each.low < each.loss < each.high for each in curve)
    assert forecast.bits_per_byte(2.0) == pytest.approx(0.9)


def test_what_may_not_hold_is_said(forecast, tmp_path):
    wide = Forecast(make_ladder(tmp_path / "wide", sizes=(48, 64, 96, 128)), samples=6)
    warnings = wide.warnings(best(wide, 1e13))
    assert any("not above the ladder's smallest" in line for line in warnings)
    assert any("passed over" in line for line in forecast.warnings(best(forecast, 1e16)))
    noisy = Forecast(make_ladder(tmp_path / "noisy", noise=0.1), samples=6)
    warnings = noisy.warnings(best(noisy, 1e16))
    assert any("the interval is wider than a tenth of the loss" in line for line in warnings)
    assert any("predictions are meant for up to 30 times" in line for line in warnings)


@pytest.fixture
def ladder(tmp_path) -> Ladder:
    return make_ladder(tmp_path / "ladder")


def changed(ladder: Ladder, **factors: float) -> Ladder:
    points = tuple(
        dataclasses.replace(point, **{name: getattr(point, name) * by for name, by in factors.items()})
        for point in ladder.points
    )
    return dataclasses.replace(ladder, points=points)


def test_a_recipe_that_needs_a_quarter_less_is_measured_as_that(ladder):
    ratios = [row.ratio for row in compare_ladders(ladder, changed(ladder, flops=0.75))]
    assert len(ratios) >= 3
    assert ratios == pytest.approx([0.75] * len(ratios))


@pytest.mark.parametrize("better", [10, 0.1])
def test_what_one_has_not_reached_or_always_had_has_no_ratio(ladder, better):
    rows = compare_ladders(ladder, changed(ladder, loss=better))
    assert rows
    assert all(row.ratio is None for row in rows)


def test_a_frontier_falls(tmp_path):
    ladder = make_ladder(tmp_path / "ladder", noise=0.05)
    points: list[Point] = frontier(ladder.points)
    losses, flops = [point.loss for point in points], [point.flops for point in points]
    assert losses == sorted(losses, reverse=True)
    assert flops == sorted(flops)
    assert 2 < len(points) < sum(each.decayed for each in ladder.points)
    for each in ladder.points:
        assert not each.decayed or any(p.flops <= each.flops and p.loss <= each.loss for p in points)
    middle = (points[0].loss * points[1].loss) ** 0.5
    assert flops_for_loss(points, middle) == pytest.approx((flops[0] * flops[1]) ** 0.5)
    assert flops_for_loss(points, points[-1].loss - 1) is None
    assert flops_for_loss(points, points[0].loss + 1) is None


OTHER: dict[str, dict[str, dict[str, Any]]] = {
    "store": {},
    "data.packing": {"data": {"packing": "pad"}},
    "data.isolate_documents": {"data": {"isolate_documents": False}},
    "training.sequence_length": {"training": {"sequence_length": 32}},
    "evaluation.max_batches x training.global_batch_size": {"evaluation": {"max_batches": 3}},
}
"""Name in the message -> section and values of the second ladder's base."""


@pytest.mark.parametrize("name", OTHER)
def test_ladders_that_were_evaluated_otherwise_are_refused(ladder, name):
    sections = {
        section: dataclasses.replace(getattr(ladder.base, section), **values)
        for section, values in OTHER[name].items()
    }
    other = dataclasses.replace(ladder, base=dataclasses.replace(ladder.base, **sections))
    if name == "store":
        other = dataclasses.replace(ladder, store_hash="b" * 64)
    with pytest.raises(ConfigError, match=f"same {name}, whose losses compare"):
        compare_ladders(ladder, other)


def test_as_many_sequences_in_other_batches_are_compared(ladder):
    def evaluated(batches: int, sequences: int) -> Ladder:
        evaluation = dataclasses.replace(ladder.base.evaluation, max_batches=batches)
        training = dataclasses.replace(ladder.base.training, global_batch_size=sequences)
        base = dataclasses.replace(ladder.base, evaluation=evaluation, training=training)
        return dataclasses.replace(ladder, base=base)

    assert compare_ladders(evaluated(4, 8), evaluated(2, 16))
    with pytest.raises(ConfigError, match="max_batches x"):
        compare_ladders(evaluated(4, 8), evaluated(4, 16))
