"""Compares two ladders by the compute that each needs for equal loss."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from llm_pretrain.errors import ConfigError
from llm_pretrain.forecast.points import Ladder, Point


class EqualLoss(NamedTuple):
    """The compute that two ladders need for a loss on the first ladder's frontier.

    Args:
        loss: A loss on the first ladder's frontier.
        flops: FLOPs that the first ladder needs.
        ratio: FLOPs of the second ladder ÷ FLOPs of the first; below 1 the second learns more per FLOP.
            None if the loss lies outside of the second ladder's frontier.
    """

    loss: float
    flops: float
    ratio: float | None


def frontier(points: Sequence[Point]) -> list[Point]:
    """The decayed points, by FLOPs, whose loss no other one reaches with equal or fewer FLOPs."""
    found: list[Point] = []
    for point in sorted((each for each in points if each.decayed), key=lambda each: (each.flops, each.loss)):
        if not found or point.loss < found[-1].loss:
            found.append(point)
    return found


def flops_for_loss(points: Sequence[Point], loss: float) -> float | None:
    """FLOPs at which a frontier reaches a loss, interpolated log-log between points; None outside of it."""
    for before, after in itertools.pairwise(points):
        if after.loss <= loss <= before.loss:
            share = math.log(before.loss / loss) / math.log(before.loss / after.loss)
            return before.flops * (after.flops / before.flops) ** share
    return None


def compare_ladders(first: Ladder, second: Ladder) -> list[EqualLoss]:
    """Compare the compute for equal loss, at every loss of the first ladder's frontier, the highest first.

    Raises:
        ConfigError: the ladders differ in data or in how they evaluate, or one has no frontier.
    """
    left, right = _evaluated_on(first), _evaluated_on(second)
    for name in left:
        if left[name] != right[name]:
            raise ConfigError(
                f"--compare: expected ladders with the same {name}, whose losses compare, found "
                f"{str(left[name])[:12]} in {first.folder} and {str(right[name])[:12]} in {second.folder}"
            )
    frontiers = [frontier(ladder.points) for ladder in (first, second)]
    for ladder, found in zip((first, second), frontiers, strict=True):
        if len(found) < 2:
            raise ConfigError(
                f"{ladder.folder}: expected two points or more on its frontier, found {len(found)}"
            )
    rows = [(point.loss, point.flops, flops_for_loss(frontiers[1], point.loss)) for point in frontiers[0]]
    return [EqualLoss(loss, flops, second and second / flops) for loss, flops, second in rows]


def _evaluated_on(ladder: Ladder) -> dict[str, object]:
    """The facts that decide on which positions, and with which context, a ladder's losses are measured."""
    base = ladder.base
    batches = base.evaluation.max_batches
    return {
        "store": ladder.store_hash,
        "data.packing": base.data.packing,
        "data.isolate_documents": base.data.isolate_documents,
        "training.sequence_length": base.training.sequence_length,
        "evaluation.max_batches x training.global_batch_size": batches
        and batches * base.training.global_batch_size,
    }
