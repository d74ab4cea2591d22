"""From a ladder to a run, by the law's optimum."""

from __future__ import annotations

import math
import re

import pytest
from support.ladders import LAW, make_ladder

from llm_pretrain.config.distributed_config import DistributedConfig
from llm_pretrain.config.loading import validate
from llm_pretrain.errors import ConfigError
from llm_pretrain.forecast.family import Sizes
from llm_pretrain.forecast.planning import EVALUATIONS, Forecast, best_of
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
