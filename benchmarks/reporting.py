"""A benchmark's figures as lines to read and, at its end, as rows to paste into docs/benchmarks.md.

A part calls `report` for each figure; `python -m benchmarks` begins and ends the part around it.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field

from benchmarks.machine import Witness, commit, machine
from benchmarks.measuring import Interval, Spread, goal

HEAD = "| what | goal | figure | command | commit | machine |"


class SkippedError(Exception):
    """A part that this machine cannot run; what it needs, in words."""


@dataclass
class _Part:
    """The part that is being measured."""

    command: str
    witness: Witness
    rows: list[tuple[str, str, str]] = field(default_factory=list)
    missed: int = 0


_part: _Part | None = None


def begin(command: str) -> None:
    """Print command, commit, machine and load, and start to collect rows; `command` begins with the name."""
    global _part
    malloc = [f"{name}={value}" for name, value in os.environ.items() if name.startswith("MALLOC_")]
    _part = _Part(" ".join([*malloc, "python -m benchmarks", command]), Witness())
    print(f"command  {_part.command}")
    print(f"commit   {commit()}")
    print(f"machine  {machine()}")
    print(
        f"load     {_part.witness.load:.1f} before the start (other processes disturb wall times)", flush=True
    )


def report(
    what: str,
    figure: Spread | str,
    *,
    unit: str = "",
    digits: int = 3,
    at_most: float | None = None,
    at_least: float | None = None,
    note: str = "",
    bound: str = "",
    met: bool = True,
) -> bool:
    """Print a figure, beside its goal if it has one, and keep it as a row.

    Args:
        what: What was measured, the row's first column.
        figure: An interval, which a goal is judged by at its worse end, or a text without a goal.
        unit: Of the figure and its goal.
        digits: After the point.
        at_most: The goal, in the figure's unit.
        at_least: Likewise; at most one of the two.
        note: What else to say in the figure's column.
        bound: The goal of a text figure, in words.
        met: Whether a text figure meets it.

    Returns:
        Whether the goal was met; True where there is none.
    """
    text = figure if isinstance(figure, str) else figure.text(unit, digits)
    text = f"{text}; {note}" if note else text
    print(f"{what}: {text}", flush=True)
    if bound:
        print(goal(f"{what} {bound}", met), flush=True)
    if at_most is not None or at_least is not None:
        if not isinstance(figure, Interval):
            raise TypeError(f"{what}: a goal is judged by an Interval, found {type(figure).__name__}")
        met = figure.meets(at_most=at_most, at_least=at_least)
        print(goal(what, figure, at_most=at_most, at_least=at_least), flush=True)
        bound = f"≤ {at_most:g}" if at_most is not None else f"≥ {at_least:g}"
        bound = f"{bound} {unit}".rstrip()
    if _part is not None:
        undecided = isinstance(figure, Interval) and math.isinf(figure.high)
        verdict = "" if met else ": undecided" if undecided else ": **missed**"
        _part.rows.append((what, bound, text + verdict))
        _part.missed += not met
    return met


def end() -> None:
    """Print how busy the machine was, and the rows."""
    global _part
    part, _part = _part, None
    if part is None:
        return
    print(f"busy     {part.witness.text()}", flush=True)
    if not part.rows:
        return
    place = machine().split(", Python")[0] + (", *busy*" if part.witness.busy() else "")
    print("", HEAD, "|---|---|---|---|---|---|", sep="\n")
    for number, (what, bound, figure) in enumerate(part.rows):
        command = f"`{part.command}`" if number == 0 else "the same"
        print(f"| {what} | {bound} | {figure} | {command} | {commit()} | {place} |")
    print(flush=True)
