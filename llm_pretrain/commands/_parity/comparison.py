"""Compares two runs' rows under a promise: pure functions, from rows to a verdict and the first difference.

It knows what a row is, not where it comes from.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from llm_pretrain.commands._parity.contract import (
    DIGEST,
    KEYS,
    LARGEST_TIE,
    PARAMETERS,
    REQUIRED,
    ROUTING,
    SAMPLES,
    Promise,
)

Rows = Mapping[int, Mapping[str, Any]]
"""Step to row of metrics.jsonl."""
Verdict = Literal["identical", "within bound", "differs", "not compared", "failed"]


@dataclass(frozen=True)
class Difference:
    """A broken promise: where, the reference's value, the cell's, and by how much it may differ.

    Args:
        step: Optimizer step.
        key: Of the row, or `parameters`.
        expected, found: The two values; absent ones are the text `missing`.
        bound: Largest relative difference; None where the values must be the same.
    """

    step: int
    key: str
    expected: Any
    found: Any
    bound: float | None = None

    def __str__(self) -> str:
        if self.key == PARAMETERS:
            return f"step {self.step}: the parameters differ by {self.found:.2g}, more than {self.bound:.2g}"
        if self.key == ROUTING:
            return f"step {self.step}: {self.found:.1%} of a layer's choices go elsewhere, too many for ties"
        text = f"step {self.step} {self.key}: expected {_shown(self.expected)}, found {_shown(self.found)}"
        relative = relative_difference(self.expected, self.found)
        if self.bound is not None and relative is not None:
            text += f", {relative:.2g} apart instead of at most {self.bound:.2g}"
        return text


@dataclass
class Comparison:
    """What came of comparing one cell with another.

    Args:
        verdict: `identical`: every compared key at every step. `not compared`: only the samples were.
        first: The first broken promise, by step and then by the order of `KEYS`.
        largest: Key to its largest relative difference over all steps, judged or not.
        note: What was not promised, and why.
        parted: First step at which a token went to another expert; None where none did, or nothing routes.
    """

    verdict: Verdict
    first: Difference | None = None
    largest: dict[str, float] = field(default_factory=dict)
    note: str = ""
    parted: int | None = None


def compare(reference: Rows, rows: Rows, steps: int, promises: Sequence[tuple[int, Promise]]) -> Comparison:
    """Compare the rows of steps 1 to `steps`.

    Args:
        reference: The rows to compare with.
        rows: The cell's.
        steps: Both should have a row for each.
        promises: (first step, promise) in ascending order; each holds until the next begins.
    """
    largest: dict[str, float] = {}
    first, same, parted = None, True, None
    for step in range(1, steps + 1):
        current = [each for start, each in promises if start <= step][-1]
        left, right = reference.get(step), rows.get(step)
        if left is None or right is None:
            there = ["missing" if row is None else "there" for row in (left, right)]
            first = first or Difference(step, "row", there[0], there[1])
            continue
        moved = routing_moved(left, right) if current.parted else 0.0
        if parted is None and moved:
            parted = step
            if moved > LARGEST_TIE:
                first = first or Difference(step, ROUTING, 0.0, moved, LARGEST_TIE)
        if parted is not None:
            current = dataclasses.replace(current, within=current.parted)
        for key in KEYS:
            same = same and left.get(key) == right.get(key)
            relative = relative_difference(left.get(key), right.get(key))
            if relative is not None and key not in SAMPLES:
                largest[key] = max(largest.get(key, 0.0), relative)
            first = first or _broken(step, key, left, right, current)
    verdict = _verdict(first, promises, same and _has_digests(rows))
    notes = _notes(promises, steps)
    if parted is not None:
        notes.append(
            f"from step {parted} on a token goes to another expert of a tie: wider bounds from there"
        )
    return Comparison(verdict, first, largest, "; ".join(notes), parted)


def _verdict(first: Difference | None, promises: Sequence[tuple[int, Promise]], same: bool) -> Verdict:
    if first is not None:
        return "differs"
    if same or all(DIGEST in each.exact for _, each in promises):
        return "identical"
    return "within bound" if any(each.within for _, each in promises) else "not compared"


def _has_digests(rows: Rows) -> bool:
    """Whether equal rows say that the parameters are equal too; the trainer path's do not."""
    return bool(rows) and all(row.get(DIGEST) for step, row in rows.items() if step >= 1)


def _notes(promises: Sequence[tuple[int, Promise]], steps: int) -> list[str]:
    """What each promise that was in force says, once; the last one's note begins with those before."""
    notes = list(dict.fromkeys(each.note for start, each in promises if each.note and start <= steps))
    return [note for note in notes if not any(other != note and other.startswith(note) for other in notes)]


def routing_moved(left: Mapping[str, Any], right: Mapping[str, Any]) -> float:
    """Largest share of a layer's choices that two rows' `moe/load` distribute otherwise; 0 without."""
    mine, theirs = left.get(ROUTING), right.get(ROUTING)
    if mine is None or theirs is None or mine == theirs:
        return 0.0
    if [len(layer) for layer in mine] != [len(layer) for layer in theirs]:
        return 1.0
    pairs = zip(mine, theirs, strict=True)
    return max(sum(abs(a - b) for a, b in zip(*layers, strict=True)) / 2 for layers in pairs)


def judge_parameters(comparison: Comparison, distance: float, steps: int, promise: Promise) -> None:
    """Enter the relative norm of the final parameters' difference, and judge it where it is promised."""
    comparison.largest[PARAMETERS] = distance
    bound = promise.within.get(PARAMETERS) if comparison.parted is None else None
    if DIGEST in promise.exact:  # the checkpoints' word, where rows have no digest or say what is not so
        bound = 0.0
    if bound is not None and not distance <= bound and comparison.first is None:
        comparison.first = Difference(steps, PARAMETERS, 0.0, distance, bound)
        comparison.verdict = "differs"


def relative_difference(left: object, right: object) -> float | None:
    """|left - right| over the larger magnitude; None where one of them is no number."""
    if not (isinstance(left, int | float) and isinstance(right, int | float)):
        return None
    if left == right:
        return 0.0
    if not (math.isfinite(left) and math.isfinite(right)):
        return math.inf
    return abs(left - right) / max(abs(left), abs(right))


def _broken(
    step: int, key: str, left: Mapping[str, Any], right: Mapping[str, Any], promise: Promise
) -> Difference | None:
    """The broken promise of one key at one step, if it is."""
    bound = promise.within.get(key)
    if key not in promise.exact and bound is None:
        return None
    if key not in left and key not in right and key not in REQUIRED:
        return None
    expected, found = left.get(key, "missing"), right.get(key, "missing")
    if expected == found and expected != "missing":
        return None
    relative = relative_difference(expected, found)
    if bound is not None and relative is not None and relative <= bound:
        return None
    return Difference(step, key, expected, found, bound)


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, float) else str(value)
    return text if len(text) <= 24 else f"{text[:16]}…"
