"""Two ladders compared by compute to equal loss."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from support.ladders import make_ladder

from llm_pretrain.errors import ConfigError
from llm_pretrain.forecast.ladder_comparison import compare_ladders, flops_for_loss, frontier
from llm_pretrain.forecast.points import Ladder, Point


@pytest.fixture
def ladder(tmp_path) -> Ladder:
    return make_ladder(tmp_path / "ladder")


def changed(ladder: Ladder, **factors: float) -> Ladder:
    """With fields of all points times factors."""
    points = tuple(
        dataclasses.replace(point, **{name: getattr(point, name) * by for name, by in factors.items()})
        for point in ladder.points
    )
    return dataclasses.replace(ladder, points=points)


def test_a_recipe_that_needs_a_quarter_less_is_measured_as_that(ladder):
    ratios = [row.ratio for row in compare_ladders(ladder, changed(ladder, flops=0.75))]
    assert len(ratios) >= 3
    assert ratios == pytest.approx([0.75] * len(ratios))


def test_what_one_has_not_reached_has_no_ratio(ladder):
    rows = compare_ladders(ladder, changed(ladder, loss=10))
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
    with pytest.raises(ConfigError, match=f"same {name}, whose losses compare"):
        compare_ladders(ladder, other)


def test_ladders_of_other_stores_are_refused(ladder):
    with pytest.raises(ConfigError, match="same store, whose losses compare"):
        compare_ladders(ladder, dataclasses.replace(ladder, store_hash="b" * 64))


def test_as_many_sequences_in_other_batches_are_compared(ladder):
    def evaluated(batches: int, sequences: int) -> Ladder:
        evaluation = dataclasses.replace(ladder.base.evaluation, max_batches=batches)
        training = dataclasses.replace(ladder.base.training, global_batch_size=sequences)
        base = dataclasses.replace(ladder.base, evaluation=evaluation, training=training)
        return dataclasses.replace(ladder, base=base)

    assert compare_ladders(evaluated(4, 8), evaluated(2, 16))
    with pytest.raises(ConfigError, match="max_batches x"):
        compare_ladders(evaluated(4, 8), evaluated(4, 16))


def test_a_ladder_that_is_better_from_its_cheapest_run_on_has_no_ratio(ladder):
    rows = compare_ladders(ladder, changed(ladder, loss=0.1))
    assert rows
    assert all(row.ratio is None for row in rows)
