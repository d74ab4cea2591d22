"""Two ladders compared by compute: what each needs for the same loss."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from llm_pretrain.errors import ConfigError
from llm_pretrain.ladder.points import Ladder, Point


class Reached(NamedTuple):
    """FLOPs for which a ladder reaches a loss.

    Args:
        flops: Interpolated; of the cheapest run where that is better already.
        is_bound: Whether fewer may be enough.
    """

    flops: float
    is_bound: bool


class EqualLoss(NamedTuple):
    """What two ladders need for a loss on the frontier of the first.

    Args:
        loss: Of a point of the first.
        flops: Of that point.
        second: None where the second ladder has not reached the loss.
    """

    loss: float
    flops: float
    second: Reached | None

    @property
    def ratio(self) -> float | None:
        """FLOPs of the second ÷ those of the first: below 1 the second learns more from the same compute."""
        if self.second is None or self.second.is_bound:
            return None
        return self.second.flops / self.flops


def frontier(points: Sequence[Point]) -> list[Point]:
    """The decayed points that no cheaper or equal one beats, by FLOPs."""
    found: list[Point] = []
    for point in sorted((each for each in points if each.decayed), key=lambda each: (each.flops, each.loss)):
        if not found or point.loss < found[-1].loss:
            found.append(point)
    return found


def flops_for_loss(points: Sequence[Point], loss: float) -> Reached | None:
    """FLOPs at which a frontier reaches a loss, interpolated between its points in logarithms of both."""
    if points[0].loss < loss:
        return Reached(points[0].flops, is_bound=True)
    for before, after in itertools.pairwise(points):
        if after.loss <= loss <= before.loss:
            share = math.log(before.loss / loss) / math.log(before.loss / after.loss)
            return Reached(before.flops * (after.flops / before.flops) ** share, is_bound=False)
    return None


def compare_ladders(first: Ladder, second: Ladder) -> list[EqualLoss]:
    """Compute to equal loss, at every loss of the first ladder's frontier, the highest first.

    Raises:
        ConfigError: they were trained or evaluated on different data, or one has no frontier.
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
    return [
        EqualLoss(point.loss, point.flops, flops_for_loss(frontiers[1], point.loss)) for point in frontiers[0]
    ]


def _evaluated_on(ladder: Ladder) -> dict[str, object]:
    """What decides on which positions, and with which context, the losses of a ladder are measured."""
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
