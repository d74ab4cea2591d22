"""The rungs of a budget, its FLOPs used and its bounds kept, and the family that its sizes are members of."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
from support.presets import preset

from llm_pretrain.config.loading import PRESETS, validate
from llm_pretrain.errors import ConfigError
from llm_pretrain.forecast import family
from llm_pretrain.forecast.budget import (
    BRANCHES,
    MAX_EPOCHS,
    MIN_TOKENS_PER_PARAMETER,
    SMALLEST_BRANCHES,
    WIDTH_RATIO,
    Speed,
    choose_rungs,
    ladder_flops,
    ladder_seconds,
    least_flops,
    least_tokens,
    read_budget,
    rungs_within,
)
from llm_pretrain.forecast.family import Sizes, member, width_step
from llm_pretrain.forecast.ladder_runs import LadderRun, ladder_runs, longest_first, makespan
from llm_pretrain.forecast.points import Rung
from llm_pretrain.model.sizes import count_parameters

CASES = [
    ("ladder", 3_500_000, (1.5e14, 2e14, 4e14)),
    ("quickstart", 20_000_000, (1e15, 3e15)),
    ("gpt2-124m", 10**10, (2e18, 1e20)),
    ("ladder", 2_600_000, (1.5e14, 5e14)),
]


@pytest.mark.parametrize(
    ("name", "unique_tokens", "flops"), [(n, u, f) for n, u, budgets in CASES for f in budgets]
)
def test_a_budget_is_used_and_its_bounds_are_kept(name, unique_tokens, flops):
    base = preset(name)
    sizes, rungs = Sizes(base), choose_rungs(Sizes(base), flops, unique_tokens)
    is_short_of_text = rungs[0].steps[-1] * base.training.tokens_per_step > 0.99 * MAX_EPOCHS * unique_tokens
    assert (0.85 if is_short_of_text else 0.95) * flops < ladder_flops(sizes, rungs) < 1.01 * flops
    assert 3 <= len(rungs) <= 5
    per_step = [sizes.of(rung.hidden_size).step_flops for rung in rungs]
    assert all(larger > smaller for smaller, larger in itertools.pairwise(per_step))
    numbers = [rung.hidden_size // sizes.width_step for rung in rungs]
    are_neighbours = numbers == list(range(numbers[0], numbers[0] + len(rungs)))  # there are no closer ones
    widening = rungs[-1].hidden_size / rungs[0].hidden_size / WIDTH_RATIO ** (len(rungs) - 1)
    assert are_neighbours or 0.9 < widening < 1.1
    assert per_step[-1] / per_step[0] > 1.2 ** (len(rungs) - 1)
    smallest, *others = rungs
    assert len({(rung.steps, rung.branches) for rung in others}) == 1, "all others see the same tokens"
    assert set(others[0].steps) < set(smallest.steps)
    shortest, longest = (smallest.steps[index] * base.training.tokens_per_step for index in (0, -1))
    assert longest <= 1.01 * MAX_EPOCHS * unique_tokens
    assert shortest == others[0].steps[0] * base.training.tokens_per_step
    assert shortest >= 0.99 * least_tokens(base) * 2 ** (len(rungs) - 3)


def test_branches_are_multiples_and_end_in_their_decays():
    rungs = choose_rungs(Sizes(preset("ladder")), 1.5e14, 3_500_000)
    unit = rungs[0].save_steps
    for rung in rungs:
        multiples = SMALLEST_BRANCHES if rung is rungs[0] else BRANCHES
        assert rung.branches == tuple(multiple * unit for multiple in multiples)
        assert not any(branch % rung.save_steps for branch in rung.branches)
        for steps, branch in zip(rung.steps, rung.branches, strict=True):
            assert steps == 2 * branch


@pytest.mark.parametrize(("name", "unique_tokens"), [("ladder", 3_500_000), ("gpt2-124m", 10**9)])
def test_the_budget_that_is_named_works_and_is_nearly_the_least(name, unique_tokens):
    sizes = Sizes(preset(name))
    with pytest.raises(ConfigError, match=r"--budget: expected at least .* for 3 sizes") as error:
        choose_rungs(sizes, 1e10, unique_tokens)
    (least,) = re.findall(r"at least ([\d.e+]+)", str(error.value))
    choose_rungs(sizes, float(least), unique_tokens)
    with pytest.raises(ConfigError):
        choose_rungs(sizes, 0.98 * float(least), unique_tokens)


def test_a_budget_that_is_huge_for_its_store_is_not_spent(monkeypatch):
    counted = list[int]()
    monkeypatch.setattr(
        family, "count_parameters", lambda model: counted.append(model.hidden_size) or count_parameters(model)
    )
    base = preset("ladder")
    for flops in (1e18, 1e27):
        rungs = choose_rungs(Sizes(base), flops, 3_500_000)
        parameters = Sizes(base).of(rungs[0].hidden_size).active_parameters
        tokens = rungs[0].steps[-1] * base.training.tokens_per_step
        assert 0.5 * MIN_TOKENS_PER_PARAMETER < tokens / parameters < 2 * MIN_TOKENS_PER_PARAMETER
        assert ladder_flops(Sizes(base), rungs) < flops
    assert max(counted) < 2000, "no size of 1e12 parameters is built"


def test_a_store_too_small_is_named():
    sizes = Sizes(preset("ladder"))
    with pytest.raises(ConfigError, match="--input: expected a store of about 2,343,750 tokens"):
        choose_rungs(sizes, 1e14, 500_000)
    least = least_flops(sizes, 2_343_750)
    assert choose_rungs(sizes, least, 2_343_750)
    with pytest.raises(ConfigError, match="--input: expected a store of about"):
        choose_rungs(sizes, least, 2_343_749)


TIMES = {"90s": 90, "20m": 1200, "1.5h": 5400, "1h05m": 3900}


def test_budgets_are_times_or_flops():
    assert [read_budget(text) for text in TIMES] == [(None, seconds) for seconds in TIMES.values()]
    assert read_budget("1e16") == (1e16, None)


WRONG = ("", "0", "-1h", "nan", "1e999", "5y", "5 5m")


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        *((text, "--budget", {}) for text in WRONG),
        *((text, "--time", {"only_time": True}) for text in ("1e16", "0")),
    ],
)
def test_what_is_no_budget_is_refused(text, name, options):
    or_flops = "" if options else ", or FLOPs"
    with pytest.raises(ConfigError, match=f"^{name}: expected a time such as 20m or 2h{or_flops}"):
        read_budget(text, name, **options)


def test_a_time_becomes_the_rungs_that_fit():
    sizes = Sizes(preset("ladder"))
    speed = Speed(2e11, start_up=7.0, slots=2, evaluated_tokens=32768)
    rungs = rungs_within(sizes, 900, 3_500_000, speed)
    assert 0.95 * 900 < ladder_seconds(sizes, rungs, speed) <= 900
    shortest = rungs_within(sizes, 20, 3_500_000, speed)
    assert ladder_flops(sizes, shortest) == pytest.approx(least_flops(sizes, 3_500_000), rel=0.01)
    assert ladder_seconds(sizes, shortest, speed) > 20
    longest = rungs_within(sizes, 1e8, 3_500_000, speed)
    assert longest == choose_rungs(sizes, 1e27, 3_500_000)


def test_a_ladders_time_counts_start_ups_and_evaluations():
    sizes, rungs = Sizes(preset("ladder")), (Rung(48, (900, 1800)),)
    fast = Speed(1e11, start_up=0.0, slots=1, evaluated_tokens=0)
    computing = ladder_seconds(sizes, rungs, fast)
    assert computing == pytest.approx(ladder_flops(sizes, rungs) / 1e11)
    assert ladder_seconds(sizes, rungs, fast._replace(start_up=7.0)) == pytest.approx(computing + 3 * 7)
    token = sizes.of(48).flops_per_token / 1e11
    found = ladder_seconds(sizes, rungs, fast._replace(evaluated_tokens=30_000))
    assert found == pytest.approx(computing + 5 * 10_000 * token), "at 0, 900 and 1,800, and after each decay"


def test_decays_follow_their_stable_runs():
    runs = ladder_runs([Rung(64, (8, 16))])
    assert [(run.name, run.trained_steps) for run in runs] == [("h64", 16), ("h64-16", 8), ("h64-32", 16)]
    assert [each.follows(runs[0]) for each in runs] == [False, True, True]
    costs = {run: float(run.trained_steps) for run in runs}
    assert makespan(runs, costs, 1) == 40
    assert makespan(runs, costs, 2) == 32


def test_what_a_long_decay_waits_for_goes_first():
    """A run of 1 with a decay of 10 after it, beside two of 5: 11, or else 16."""
    stable, decay = LadderRun(48, 0, 1), LadderRun(48, 1, 11)
    others = [LadderRun(64, 0, 5), LadderRun(80, 0, 5)]
    costs = {run: float(run.trained_steps) for run in (*others, decay, stable)}
    assert makespan([*others, stable, decay], costs, 2) == 16
    order = longest_first(costs)
    assert order[0] == stable
    assert makespan(order, costs, 2) == 11


BASES = [path.stem for path in sorted(PRESETS.glob("*.yaml")) if path.stem != "quickstart-chat"]


@pytest.mark.parametrize("name", BASES)
def test_every_size_of_a_preset_is_a_valid_model(name):
    base = preset(name)
    sizes = []
    for heads in (1, 2, 3, 5, 7, 12):
        config = member(base, heads * width_step(base))
        model = config.model
        assert validate(config, needs_data=False) == []
        assert model.attention_head_dim == base.model.attention_head_dim
        assert model.num_attention_heads % model.num_key_value_heads == 0
        assert (model.num_experts, model.num_experts_per_tok) == (
            base.model.num_experts,
            base.model.num_experts_per_tok,
        )
        assert bool(model.moe_layers) == bool(base.model.moe_layers)
        sizes.append(count_parameters(model).active)
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize("name", BASES)
def test_a_base_is_a_member_at_its_own_rates(name):
    base = preset(name)
    own = member(base, base.model.hidden_size)
    tuned_for = base.optimizer.base_hidden_size or base.model.hidden_size
    assert own == dataclasses.replace(
        base, optimizer=dataclasses.replace(base.optimizer, base_hidden_size=tuned_for)
    )


def test_sizes_follow_the_dial():
    model = member(preset("quickstart"), 96).model
    assert (model.num_hidden_layers, model.num_attention_heads, model.num_key_value_heads) == (2, 3, 1)
    assert (model.intermediate_size, model.moe_intermediate_size) == (192, 96)
