"""How every benchmark measures and judges: interleaved pairs, medians with intervals, goals.

What a figure is worth nothing without (commit, command, machine, how busy it was) is in `reporting.py`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from benchmarks.machine import ROOT, commit

__all__ = ["ENOUGH", "ROOT", "Interval", "Spread", "commit", "goal", "interleaved", "ratio"]

ENOUGH = 7
"""Pairs below which no interval is given: the extremes of 7 hold the median with 98.4 %, of 5 with 93.8 %."""

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Spread:
    """Median, minimum and maximum of repeated measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """The spread of at least one value."""
        found = list(values)
        return cls(statistics.median(found), min(found), max(found))

    def text(self, unit: str = "", digits: int = 3) -> str:
        """`1.012 (0.990 to 1.034)`, with a unit where there is one."""
        space = f" {unit}" if unit else ""
        low, high = f"{self.low:.{digits}f}", f"{self.high:.{digits}f}"
        return f"{self.median:.{digits}f}{space} ({low} to {high})"


@dataclass(frozen=True)
class Interval(Spread):
    """A median and the interval that holds the true median with 95 % probability, whatever the distribution.

    The interval is that of order statistics: of n sorted values, the k-th from below and from above hold the
    median between them unless fewer than k values fall on one side of it, each value with probability one
    half (the sign test's interval). With 7 values these are the extremes; of 20, five odd ones do not matter.
    With fewer than `ENOUGH` values it is unbounded, so that no goal is met by chance.
    """

    count: int = 0

    @classmethod
    def of(cls, values: Iterable[float]) -> Interval:
        """The interval of the median of independent values; at least one."""
        found = sorted(values)
        rank = _rank(len(found))
        if rank is None:
            return cls(statistics.median(found), -math.inf, math.inf, len(found))
        return cls(statistics.median(found), found[rank - 1], found[-rank], len(found))

    def text(self, unit: str = "", digits: int = 3) -> str:
        """`1.012 (0.990 to 1.034)`; says so where there are too few values for an interval."""
        if math.isinf(self.high):
            space = f" {unit}" if unit else ""
            return f"{self.median:.{digits}f}{space} (of {self.count}: no interval)"
        return super().text(unit, digits)

    def worse_end(self, *, at_most: float | None = None, at_least: float | None = None) -> float:
        """The end of the interval that a goal is judged by."""
        if (at_most is None) == (at_least is None):
            raise ValueError("expected one of at_most and at_least")
        return self.high if at_least is None else self.low

    def meets(self, *, at_most: float | None = None, at_least: float | None = None) -> bool:
        """Whether even the worse end of the interval meets the goal."""
        end = self.worse_end(at_most=at_most, at_least=at_least)
        return end <= at_most if at_most is not None else end >= (at_least or 0.0)


def _rank(count: int) -> int | None:
    """The largest k whose order statistics hold the median with `CONFIDENCE`; None of too few values."""
    if count < ENOUGH:
        return None
    missed, rank = 0.0, 0
    # missed = P(Binomial(count, 1/2) < rank + 1), the chance that the interval of rank + 1 lies to one side
    while 2 * (missed + math.comb(count, rank) / 2**count) <= 1 - CONFIDENCE:
        missed += math.comb(count, rank) / 2**count
        rank += 1
    return rank


def interleaved(
    sides: Mapping[str, Callable[[], object]],
    pairs: int,
    warmup: int = 2,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, list[float]]:
    """Seconds of each side, `pairs` times, in turns; the order of a round is the reverse of the one before.

    Entry i of every list is of the same round, so that a disturbance falls on all sides of a ratio. The first
    `warmup` rounds are not kept. A side that returns a float has measured itself, as one in another process.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(warmup + pairs):
        for name in list(sides) if number % 2 else reversed(list(sides)):
            before = clock()
            own = sides[name]()
            elapsed = own if isinstance(own, float) else clock() - before
            if number >= warmup:
                times[name].append(elapsed)
    return times


def ratio(numerators: Iterable[float], denominators: Iterable[float]) -> Interval:
    """The interval of the ratios of pairs, one measurement each."""
    return Interval.of(one / other for one, other in zip(numerators, denominators, strict=True))


def goal(
    description: str,
    found: bool | Interval,
    *,
    at_most: float | None = None,
    at_least: float | None = None,
) -> str:
    """The line that says whether a goal was reached; an interval is judged by its worse end."""
    if isinstance(found, bool):
        return f"goal: {description}: {'met' if found else 'MISSED'}"
    met = found.meets(at_most=at_most, at_least=at_least)
    end = found.worse_end(at_most=at_most, at_least=at_least)
    bound = f"at most {at_most:g}" if at_most is not None else f"at least {at_least:g}"
    if math.isinf(end):
        return f"goal: {description} {bound}: undecided, it takes {ENOUGH} pairs"
    return f"goal: {description} {bound}: {'met' if met else 'MISSED'} by the worse end, {end:.3f}"
