"""From finished runs to verdicts: which cell each is compared with, and what came of it.

It reads rows and final checkpoints; it starts nothing and prints nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llm_pretrain.checkpoints import open_model
from llm_pretrain.commands._launching.records import last_words, rows_of
from llm_pretrain.commands._parity.cells import Cell, reference_of, twin_of
from llm_pretrain.commands._parity.comparison import (
    Comparison,
    Difference,
    Rows,
    compare,
    judge_parameters,
)
from llm_pretrain.commands._parity.contract import DIGEST, KEYS, Promise, by_steps, promise
from llm_pretrain.commands._parity.interruption import Attempt
from llm_pretrain.config import Config
from llm_pretrain.errors import PretrainError


@dataclass
class Run:
    """A launch of a cell that has ended.

    Args:
        cell: What it was.
        folder, log: Its run folder; its output.
        exit_code: Of the launcher.
        seconds: From start to end.
        timed_out: Whether it was killed for taking too long.
    """

    cell: Cell
    folder: Path
    log: Path
    exit_code: int
    seconds: float
    timed_out: bool = False

    @property
    def failed(self) -> bool:
        return self.exit_code != 0

    @property
    def rows(self) -> Rows:
        """Its rows by step; empty where there are none that can be read."""
        return rows_of(self.folder)

    @property
    def last_words(self) -> list[str]:
        """Why it failed: the last lines of its log that say something."""
        if self.timed_out:
            return [f"no end after {self.seconds:.0f} s, killed"]
        return last_words(self.log)


@dataclass
class Judged:
    """A row of the table.

    Args:
        run: The cell's.
        comparison: Its verdict.
        against: The cell that it was compared with; None for a reference.
        is_reference: Whether others were compared with it alone.
        failure: Last lines of the output of a failed launch.
    """

    run: Run
    comparison: Comparison
    against: Cell | None = None
    is_reference: bool = False
    failure: tuple[str, ...] = ()


def judge(runs: Sequence[Run], config: Config, steps: int) -> list[Judged]:
    """Each run against its twin on another path, or against its precision's first run."""
    good = [run.cell for run in runs if not run.failed]
    by_cell = {run.cell: run for run in runs}
    judged = []
    for run in runs:
        other = _other(run.cell, good, config, steps)
        against = by_cell[other] if other else None
        judged.append(_judge_one(run, against, config, steps, alone=len(good) == 1))
    return judged


def _judge_one(run: Run, against: Run | None, config: Config, steps: int, *, alone: bool) -> Judged:
    if run.failed:
        comparison, rows = Comparison("failed"), run.rows
        if against is not None and rows:
            made = promise(run.cell, against.cell, config, steps)
            comparison.first = compare(against.rows, rows, min(max(rows), steps), by_steps(made)).first
        return Judged(run, comparison, against.cell if against else None, failure=tuple(run.last_words))
    if against is None:
        if alone:
            return Judged(run, Comparison("not compared", note="no other cell to compare it with"))
        complete = compare(run.rows, run.rows, steps, [(1, Promise(exact=KEYS))])
        return Judged(run, complete, is_reference=True)
    made = promise(run.cell, against.cell, config, steps)
    comparison = compare(against.rows, run.rows, steps, by_steps(made))
    _compare_parameters(comparison, against, run, steps, made)
    return Judged(run, comparison, against.cell)


def _other(cell: Cell, good: Sequence[Cell], config: Config, steps: int) -> Cell | None:
    """What to compare a cell with: its twin, else the first of its precision that promises most."""
    pool = [each for each in good if each.precision == cell.precision]
    pool = [*pool, cell] if cell not in pool else pool
    if twin := twin_of(cell, pool):
        return twin
    first = reference_of(cell, pool) if any(each.path != "trainer" for each in pool) else cell
    if first == cell:
        return None
    earlier = [each for each in pool[: pool.index(cell)] if each.path != "trainer"]
    promised = [each for each in earlier if promise(cell, each, config, steps).within]
    return promised[0] if promised else first


def judge_interrupted(
    reference: Run, folder: Path, attempts: Sequence[Attempt], config: Config, steps: int
) -> Comparison:
    """An interrupted run against one that nobody stopped: the same bits up to the first other world size."""
    made = promise(reference.cell, reference.cell, config, steps)
    promises = [(1, made)]
    for attempt in attempts:
        if attempt.world_size != reference.cell.world_size and attempt.first_step is not None:
            made = promise(_resplit(reference.cell, attempt.world_size), reference.cell, config, steps)
            promises += by_steps(made, max(attempt.first_step, 2))
            break
    comparison = compare(reference.rows, rows_of(folder), steps, promises)
    run = Run(reference.cell, folder, reference.log, 0, 0.0)
    _compare_parameters(comparison, reference, run, steps, made)
    for attempt in attempts:
        if attempt.wrong_start:
            comparison.verdict = "differs"
            wrong = Difference(attempt.checkpoint + 1, "attempt", attempt.checkpoint + 1, attempt.first_step)
            comparison.first = wrong
            break
    return comparison


def _resplit(cell: Cell, world_size: int) -> Cell:
    sequences = cell.world_size * cell.accumulation
    return Cell(
        cell.path, world_size, sequences // world_size, cell.micro_batch_size, cell.precision, cell.strategy
    )


def _compare_parameters(comparison: Comparison, left: Run, right: Run, steps: int, made: Promise) -> None:
    """Enter the distance of the final parameters, where both runs have a checkpoint of their last step."""
    if comparison.verdict == "not compared" or "trainer" in (left.cell.path, right.cell.path):
        return
    digests = [run.rows.get(steps, {}).get(DIGEST) for run in (left, right)]
    try:  # also where the digests are equal: they are what the scripts say, and a checkpoint is what they did
        distance = parameters_distance(left.folder, right.folder, steps)
    except PretrainError as error:
        if digests[0] is not None and digests[0] == digests[1]:
            return judge_parameters(comparison, 0.0, steps, made)
        comparison.note = "; ".join(filter(None, [comparison.note, f"parameters not compared: {error}"]))
        return None
    judge_parameters(comparison, distance, steps, made)


def parameters_distance(left: Path, right: Path, step: int) -> float:
    """‖left − right‖ / ‖left‖ over all parameters of two runs' checkpoints of `step`, in float64.

    Raises:
        PretrainError: a checkpoint is missing or damaged.
    """
    paths = [folder / "checkpoints" / f"step-{step:08d}" for folder in (left, right)]
    models = [open_model(path, average=False).model for path in paths]
    shapes = [{name: each.shape for name, each in model.named_parameters()} for model in models]
    if shapes[0] != shapes[1]:
        return math.inf
    others = dict(models[1].named_parameters())
    difference = norm = 0.0
    for name, parameter in models[0].named_parameters():
        mine = parameter.detach().double()
        difference += float((mine - others[name].detach().double()).square().sum())
        norm += float(mine.square().sum())
    return math.sqrt(difference / norm) if norm else math.sqrt(difference)
