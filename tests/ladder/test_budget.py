"""The rungs of a budget: its FLOPs are used, sizes and tokens keep their bounds, too little is refused."""

from __future__ import annotations

import itertools
import math
import re

import pytest
from support.presets import preset

from llm_pretrain.config import Config
from llm_pretrain.errors import ConfigError
from llm_pretrain.ladder import (
    Run,
    Rung,
    Sizes,
    Speed,
    best_order,
    check_runs,
    choose_rungs,
    family,
    flops_within,
    ladder_flops,
    ladder_runs,
    ladder_seconds,
    least_flops,
    most_ladder_flops,
    read_budget,
    tokens_per_step,
)
from llm_pretrain.ladder import budget as budget_module
from llm_pretrain.ladder import runs as runs_module
from llm_pretrain.ladder.budget import (
    BRANCHES,
    DECAY_SHARE,
    MAX_EPOCHS,
    MIN_TOKENS_PER_PARAMETER,
    SIZE_RATIOS,
    SMALLEST_BRANCHES,
    least_tokens,
)
from llm_pretrain.ladder.runs import makespan
from llm_pretrain.model import count_parameters

CASES = [
    ("ladder", 3_500_000, (1.5e14, 2e14, 4e14)),
    ("quickstart", 20_000_000, (1e15, 3e15)),
    ("tiny-dense", 3_500_000, (1e14, 3e14)),
    ("gpt2-124m", 10**10, (2e18, 1e20)),
    ("minimind-moe-145m", 10**9, (3e17,)),
    ("ladder", 2_600_000, (1.5e14, 5e14)),
]


@pytest.mark.parametrize(
    ("name", "unique_tokens", "flops"), [(n, u, f) for n, u, budgets in CASES for f in budgets]
)
def test_a_budget_is_used_and_its_bounds_are_kept(name: str, unique_tokens: int, flops: float):
    base = preset(name)
    sizes, rungs = Sizes(base), choose_rungs(Sizes(base), flops, unique_tokens)
    assert ladder_flops(sizes, rungs) == pytest.approx(flops, rel=0.05)
    assert 3 <= len(rungs) <= 5
    per_step = [sizes.of(rung.hidden_size).step_flops for rung in rungs]
    assert all(larger > smaller for smaller, larger in itertools.pairwise(per_step))
    least, most = SIZE_RATIOS[-1] ** (len(rungs) - 1), SIZE_RATIOS[0] ** (len(rungs) - 1)
    numbers = [rung.hidden_size // sizes.width_step for rung in rungs]
    are_neighbours = numbers == list(range(numbers[0], numbers[0] + len(rungs)))  # there are no closer ones
    assert 0.6 * least < per_step[-1] / per_step[0] < (math.inf if are_neighbours else 1.5 * most)
    smallest, *others = rungs
    assert len({(rung.steps, rung.branches) for rung in others}) == 1, "all others see the same tokens"
    assert set(others[0].steps) < set(smallest.steps)
    shortest, longest = (smallest.steps[index] * tokens_per_step(base) for index in (0, -1))
    assert longest <= 1.01 * MAX_EPOCHS * unique_tokens
    assert shortest == others[0].steps[0] * tokens_per_step(base)
    assert shortest >= 0.99 * least_tokens(base) * 2 ** (len(rungs) - 3)


@pytest.mark.parametrize(
    ("unique_tokens", "flops", "count"), [(3_500_000, 1.5e14, 3), (10**7, 8e14, 4), (5 * 10**7, 5e15, 5)]
)
def test_a_larger_budget_has_more_sizes_around_the_best_for_its_tokens(
    unique_tokens: int, flops: float, count: int
):
    base = preset("ladder")
    rungs = choose_rungs(Sizes(base), flops, unique_tokens)
    assert len(rungs) == count
    middle = Sizes(base).of(rungs[count // 2].hidden_size)
    tokens = rungs[-1].steps[-1] * tokens_per_step(base)
    assert 14 < tokens / middle.active_parameters <= 20.1


def test_branches_are_multiples_and_end_in_their_decays():
    rungs = choose_rungs(Sizes(preset("ladder")), 1.5e14, 3_500_000)
    unit = rungs[0].save_steps
    for rung in rungs:
        multiples = SMALLEST_BRANCHES if rung is rungs[0] else BRANCHES
        assert rung.branches == tuple(multiple * unit for multiple in multiples)
        assert not any(branch % rung.save_steps for branch in rung.branches)
        for steps, branch in zip(rung.steps, rung.branches, strict=True):
            assert (steps - branch) / steps == pytest.approx(DECAY_SHARE, abs=0.01)


@pytest.mark.parametrize(
    ("name", "unique_tokens"), [("ladder", 3_500_000), ("quickstart", 20_000_000), ("gpt2-124m", 10**9)]
)
def test_the_budgets_that_are_named_work_and_are_nearly_the_least_and_the_most(name: str, unique_tokens: int):
    base = preset(name)
    least, most = (named_budget(base, flops, unique_tokens) for flops in (1e10, 1e25))
    for budget, further in ((least, least * 0.9), (most, most * 1.2)):
        choose_rungs(Sizes(base), budget, unique_tokens)
        with pytest.raises(ConfigError):
            choose_rungs(Sizes(base), further, unique_tokens)
    rungs = choose_rungs(Sizes(base), most, unique_tokens)
    parameters = Sizes(base).of(rungs[0].hidden_size).active_parameters
    tokens = rungs[0].steps[-1] * tokens_per_step(base)
    assert tokens > 0.5 * MIN_TOKENS_PER_PARAMETER * parameters
    with pytest.raises(ConfigError, match="for 5 sizes"):
        choose_rungs(Sizes(base), least * 0.99, unique_tokens, 5)


def named_budget(base: Config, flops: float, unique_tokens: int) -> float:
    """What the refusal of a budget names."""
    with pytest.raises(ConfigError, match=r"--budget: expected at (least|most) .* for 3 sizes") as error:
        choose_rungs(Sizes(base), flops, unique_tokens)
    (found,) = re.findall(r"at (?:least|most) ([\d.e+]+)", str(error.value))
    return float(found)


def test_a_budget_between_those_that_fit_names_both(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        budget_module, "first_fit", lambda _, flops, *__: None if 3e14 < flops < 2e15 else (1,)
    )
    with pytest.raises(ConfigError, match=r"at most 3e\+14 or at least 2(\.\d)?e\+15 FLOPs"):
        choose_rungs(Sizes(preset("ladder")), 1e15, 3_500_000)


def test_a_budget_that_is_huge_for_its_store_is_refused_at_once(monkeypatch: pytest.MonkeyPatch):
    counted = list[int]()
    monkeypatch.setattr(
        family,
        "count_parameters",
        lambda model: counted.append(model.hidden_size) or count_parameters(model),
    )
    for flops in (1e20, 1e24, 1e27):
        with pytest.raises(ConfigError, match=r"expected at most 7\.9e\+15 FLOPs.*bring text of") as caught:
            choose_rungs(Sizes(preset("ladder")), flops, 3_500_000)
        tokens = int(caught.value.problems[0].split()[-2].replace(",", ""))
        assert most_ladder_flops(tokens - 1) < flops < most_ladder_flops(tokens + 1)
    assert max(counted) < 2000, "no size of 1e12 parameters is built"


def test_a_store_too_small_is_named():
    sizes = Sizes(preset("ladder"))
    with pytest.raises(ConfigError, match="--input: expected a store of about 2,367,188 tokens"):
        choose_rungs(sizes, 1e14, 500_000)
    least = least_flops(sizes, 2_367_188)
    assert choose_rungs(sizes, least, 2_367_188)
    with pytest.raises(ConfigError, match="--input: expected a store of about"):
        least_flops(sizes, 2_367_188 * 99 // 100)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90s", (None, 90)),
        ("20m", (None, 1200)),
        ("1.5h", (None, 5400)),
        ("1h05m", (None, 3900)),
        ("1e16", (1e16, None)),
    ],
)
def test_budgets_are_times_or_flops(text: str, expected: tuple[float | None, float | None]):
    assert read_budget(text) == expected


@pytest.mark.parametrize("text", ["", "m", "0", "-1h", "20 m", "nan", "1e999", "5y", "1h5", "5 5m"])
def test_what_is_no_budget_is_refused(text: str):
    with pytest.raises(ConfigError, match="--budget: expected a time such as 20m or 2h, or FLOPs"):
        read_budget(text)


@pytest.mark.parametrize("text", ["1e16", "0", "30"])
def test_what_is_no_time_is_not_told_to_be_flops(text: str):
    with pytest.raises(ConfigError, match=f"^--time: expected a time such as 20m or 2h, found '{text}'$"):
        read_budget(text, "--time", only_time=True)


def test_a_time_becomes_the_flops_that_fit():
    base = preset("ladder")
    speed = Speed.of({2e6: 2e-5, 2e7: 9e-5}, start_up=7.0, slots=2, evaluated_tokens=32768)
    assert [speed.token_seconds(flops) for flops in (2e6, 2e7)] == pytest.approx([2e-5, 9e-5])
    flops = flops_within(Sizes(base), 900, 3_500_000, speed)
    expected = ladder_seconds(Sizes(base), choose_rungs(Sizes(base), flops, 3_500_000), speed)
    assert 0.95 * 900 < expected <= 900
    least = least_flops(Sizes(base), 3_500_000)
    assert flops_within(Sizes(base), 20, 3_500_000, speed) == least, "which takes longer"
    assert flops_within(Sizes(base), 1e8, 3_500_000, speed) == most_ladder_flops(3_500_000), (
        "which takes less"
    )


def test_noise_never_makes_flops_free():
    speed = Speed.of({1e6: 5e-5, 2e7: 5e-5}, start_up=1.0, slots=1)
    assert speed.per_flop > 0
    assert speed.token_seconds(2e7) == pytest.approx(5e-5)


def test_decays_follow_their_stable_runs():
    rung = Rung(64, (10, 20), (8, 16))
    runs = ladder_runs([rung], 2.0)
    assert [(run.name, run.after, run.trained_steps) for run in runs] == [
        ("h64-x2", None, 16),
        ("h64-x2-10", "h64-x2", 2),
        ("h64-x2-20", "h64-x2", 4),
    ]
    assert check_runs(rung, [2.0])[0] == Run(64, 2.0, 0, 8)  # continued by the stable run of the same name
    costs = {run.name: float(run.trained_steps) for run in runs}
    assert makespan(runs, costs, 1) == 22
    assert makespan(runs, costs, 2) == 20


def test_the_order_leaves_no_slot_idle_that_another_could_fill():
    """Of 3, 3, 2, 2 and 2 in two slots the longest first end after 7, and the best after 6."""
    runs = [Run(16 * number, 1.0, 0, steps) for number, steps in enumerate((3, 3, 2, 2, 2), 1)]
    costs = {run.name: float(run.end) for run in runs}
    assert makespan(runs, costs, 2) == 7
    order, cost = best_order(runs, costs, 2)
    assert makespan(order, costs, 2) == cost == 6
    first, *waiting = runs
    order, cost = best_order(waiting, costs, 2, [first])
    assert makespan([first, *order], costs, 2) == cost == 6


def test_what_a_long_decay_waits_for_goes_first(monkeypatch: pytest.MonkeyPatch):
    """A run of 1 with a decay of 10 after it, beside two of 5: 11 by the longest way, else 16."""
    monkeypatch.setattr(runs_module, "RANDOM_ORDERS", 0)
    stable, decay = Run(48, 1.0, 0, 1), Run(48, 1.0, 1, 11)
    others = [Run(64, 1.0, 0, 5), Run(80, 1.0, 0, 5)]
    costs = {run.name: float(run.trained_steps) for run in (stable, decay, *others)}
    assert makespan([*others, stable, decay], costs, 2) == 16
    order, cost = best_order([*others, decay, stable], costs, 2)
    assert order[0] in (stable, decay)
    assert makespan(order, costs, 2) == cost == 11
