"""The learning rate is a function of the step alone, and the optimizer's groups are what they should be."""

from __future__ import annotations

import itertools
from typing import get_args, get_type_hints

import pytest

from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.config.tree import Config, OptimizerConfig, ScheduleConfig, TrainingConfig
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.optim.build import build_optimizer
from llm_pretrain.optim.param_groups import parameter_groups
from llm_pretrain.optim.schedule import learning_rate

NAMES = get_args(get_type_hints(ScheduleConfig)["name"])


def config(
    name: str, *, warmup: int = 10, decay: int | None = None, steps: int = 100, offset: int = 0
) -> Config:
    return Config(
        optimizer=OptimizerConfig(learning_rate=1.0),
        schedule=ScheduleConfig(
            name=name,  # type: ignore[arg-type]  # parametrised
            warmup_steps=warmup,
            min_learning_rate=0.1,
            decay_steps=decay,
            offset_steps=offset,
        ),
        training=TrainingConfig(max_steps=steps),
    )


@pytest.mark.parametrize("name", NAMES)
def test_warm_up_rises_linearly_to_the_peak(name: str):
    assert [learning_rate(config(name), step) for step in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert learning_rate(config(name, warmup=0), 0) == 1.0


@pytest.mark.parametrize(
    ("name", "third", "end"), [("cosine", 0.775, 0.1), ("linear", 0.7, 0.1), ("constant", 1.0, 1.0)]
)
def test_shapes_after_the_warm_up(name: str, third: float, end: float):
    assert learning_rate(config(name), 40) == pytest.approx(third)  # in the middle the shapes are equal
    assert learning_rate(config(name), 100) == pytest.approx(end)
    rates = [learning_rate(config(name), step) for step in range(10, 120)]
    assert rates == sorted(rates, reverse=True)


def test_decay_steps_end_the_decay_early():
    assert learning_rate(config("linear", decay=20), 20) == pytest.approx(0.55)
    assert learning_rate(config("linear", decay=20), 70) == pytest.approx(0.1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("decay", [None, 30])
@pytest.mark.parametrize("offset", [5, 60])
def test_an_offset_goes_on_with_another_runs_schedule(name: str, decay: int | None, offset: int):
    whole, later = config(name, decay=decay), config(name, decay=decay, steps=100 - offset, offset=offset)
    rates = [learning_rate(whole, step) for step in range(offset, 110)]
    assert [learning_rate(later, step) for step in range(110 - offset)] == rates


def test_wsd_holds_the_peak_until_the_last_steps():
    short = config("wsd", decay=20)
    assert {learning_rate(short, step) for step in range(10, 81)} == {1.0}
    assert learning_rate(short, 90) == pytest.approx(0.55)
    assert learning_rate(short, 100) == pytest.approx(0.1)
    assert learning_rate(config("wsd"), 80) == 1.0
    assert learning_rate(config("wsd"), 81) < 1.0


def test_wsd_decays_after_the_warm_up_alone():
    """Where that leaves less than a fifth of the run."""
    rates = [learning_rate(config("wsd", warmup=90), step) for step in range(89, 101)]
    assert rates[:2] == [1.0, 1.0]
    falls = [before - after for before, after in itertools.pairwise(rates[1:])]
    assert falls == pytest.approx([0.09] * 10)
    assert learning_rate(config("wsd", warmup=100), 99) == 1.0


def test_only_matrices_decay_and_every_parameter_is_in_one_group():
    model = Decoder(
        ModelConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, num_experts=2, num_experts_per_tok=1,
        )
    )  # fmt: skip
    decayed, plain = parameter_groups(model, OptimizerConfig(weight_decay=0.1))
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() for p in plain["params"]} == {1}
    assert {p.dim() for p in decayed["params"]} == {2, 3}
    grouped = [id(p) for group in (decayed, plain) for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())


def test_adamw_takes_its_settings():
    model = Decoder(ModelConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    optimizer = build_optimizer(
        model, OptimizerConfig(learning_rate=0.5, adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-6)
    )
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"], group["fused"]) == (0.5, (0.8, 0.9), 1e-6, True)
