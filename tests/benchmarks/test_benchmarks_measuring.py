"""How figures are judged: the interval's coverage, its worse end, and turns that alternate."""

from __future__ import annotations

import math
import random

import pytest

from benchmarks import reporting
from benchmarks.measuring import Interval, goal, interleaved, ratio


def test_of_seven_values_the_interval_is_their_extremes():
    assert Interval.of([7.0, 1.0, 3.0, 2.0, 5.0, 4.0, 6.0]) == Interval(4.0, 1.0, 7.0, 7)


@pytest.mark.parametrize(("count", "rank"), [(8, 1), (9, 2), (12, 3), (15, 4), (20, 6), (30, 10), (100, 40)])
def test_ranks_are_those_of_the_sign_test(count, rank):
    # the table of the binomial distribution, e.g. Conover, Practical Nonparametric Statistics, A3
    values = [float(value) for value in range(1, count + 1)]
    found = Interval.of(values)
    assert (found.low, found.high) == (rank, count + 1 - rank)


@pytest.mark.parametrize("count", [7, 12, 20])
def test_the_interval_holds_the_median_of_a_skewed_distribution(count):
    drawn = random.Random(0)
    found = [Interval.of(drawn.expovariate(1.0) for _ in range(count)) for _ in range(2000)]
    share = sum(each.low <= math.log(2) <= each.high for each in found) / len(found)
    assert share >= 0.94


def test_a_goal_is_judged_by_the_worse_end():
    found = Interval(1.0, 0.9, 1.2, 9)
    assert found.meets(at_most=1.2)
    assert not found.meets(at_most=1.1)
    assert found.meets(at_least=0.9)
    assert not found.meets(at_least=0.95)
    assert goal("step", found, at_most=1.1) == "goal: step at most 1.1: MISSED by the worse end, 1.200"


def test_too_few_pairs_meet_no_goal():
    found = Interval.of([1.0] * 6)
    assert not found.meets(at_most=100.0)
    assert not found.meets(at_least=0.0)
    assert found.text() == "1.000 (of 6: no interval)"
    assert goal("step", found, at_most=1.1) == "goal: step at most 1.1: undecided, it takes 7 pairs"


def test_sides_take_turns_in_alternating_order():
    order: list[str] = []
    ticks = iter(range(1000))
    sides = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    times = interleaved(sides, pairs=3, warmup=1, clock=lambda: float(next(ticks)))
    assert "".join(order) in ("baabbaab", "abbaabba")
    assert times == {"a": [1.0] * 3, "b": [1.0] * 3}


def test_a_slow_spell_falls_on_both_sides_of_a_ratio():
    times = [1.0] * 5 + [9.0] * 5
    assert ratio([2 * each for each in times], times) == Interval(2.0, 2.0, 2.0, 10)


def test_a_part_ends_with_rows_of_one_form(capsys):
    reporting.begin("some_part --pairs 7")
    assert not reporting.report("step", Interval(1.0, 0.9, 1.2, 9), at_most=1.1)
    assert reporting.report("speed", Interval(5.0, 4.0, 6.0, 9), unit="GB/s", digits=1, at_least=3)
    reporting.end()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| s")]
    assert [row.count("|") for row in rows] == [7, 7]
    assert "| ≤ 1.1 | 1.000 (0.900 to 1.200): **missed** |" in rows[0]
    assert "| speed | ≥ 3 GB/s | 5.0 GB/s (4.0 to 6.0) | the same |" in rows[1]
