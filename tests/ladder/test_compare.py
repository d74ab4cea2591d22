"""Two ladders compared by compute to equal loss."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from ladder.test_scaling_law import measured

from llm_pretrain.config import Config
from llm_pretrain.errors import ConfigError
from llm_pretrain.ladder import Budget, Ladder, Point, compare_ladders
from llm_pretrain.ladder.compare import flops_for_loss, frontier


def ladder(points: list[Point], store: str = "same") -> Ladder:
    return Ladder(Path("somewhere"), Config(), store, 1, (), Budget("1m", 1.0), 1.0, 1, tuple(points))


def cheaper(points: list[Point], factor: float) -> list[Point]:
    return [dataclasses.replace(point, flops=point.flops * factor) for point in points]


def test_a_recipe_that_needs_a_quarter_less_is_measured_as_that():
    first = measured(0.0)
    rows = compare_ladders(ladder(first), ladder(cheaper(first, 0.75)))
    ratios = [row.ratio for row in rows]
    assert len(ratios) >= 3
    assert ratios == pytest.approx([0.75] * len(ratios))


def test_what_one_has_not_reached_has_no_ratio():
    first = measured(0.0)
    worse = [dataclasses.replace(point, loss=point.loss + 10) for point in first]
    assert all(
        row.second is None and row.ratio is None for row in compare_ladders(ladder(first), ladder(worse))
    )


def test_a_frontier_falls():
    points = frontier(measured(0.05))
    losses, flops = [point.loss for point in points], [point.flops for point in points]
    assert losses == sorted(losses, reverse=True)
    assert flops == sorted(flops)
    middle = (points[0].loss * points[1].loss) ** 0.5
    reached = flops_for_loss(points, middle)
    assert reached is not None
    assert reached.flops == pytest.approx((flops[0] * flops[1]) ** 0.5)
    assert not reached.is_bound
    assert flops_for_loss(points, points[-1].loss - 1) is None
    assert flops_for_loss(points, points[0].loss + 1) == (flops[0], True)


def test_ladders_of_other_data_are_refused():
    with pytest.raises(ConfigError, match="same store, whose losses compare"):
        compare_ladders(ladder(measured(0.0)), ladder(measured(0.0), store="other"))


def test_a_ladder_that_is_better_from_its_cheapest_run_on_has_reached_every_loss():
    first = measured(0.0)
    better = [dataclasses.replace(point, loss=point.loss / 10) for point in first]
    rows = compare_ladders(ladder(first), ladder(better))
    assert all(row.second is not None and row.second.is_bound and row.ratio is None for row in rows)
