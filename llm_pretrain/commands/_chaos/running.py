"""Runs a plan: the run that nobody kills, then the one that is killed again and again, each attempt judged.

It stops at the first thing that does not hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from llm_pretrain.commands._chaos.attempts import Attempt, run_attempt
from llm_pretrain.commands._chaos.ending import check_end, check_stop
from llm_pretrain.commands._chaos.moments import Kill, Target, aim
from llm_pretrain.commands._chaos.oracle import (
    Rows,
    Soundness,
    Violation,
    began_at,
    check_leftovers,
    check_rows,
    check_start,
    look_at,
    newest,
    owed_evaluation,
    rows_of,
)
from llm_pretrain.commands._chaos.plan import Plan
from llm_pretrain.commands._chaos.watching import Timing, timing_of
from llm_pretrain.commands._launching.launching import Job, Place
from llm_pretrain.errors import PretrainError


@dataclass
class Death:
    """An attempt and its judgement.

    Args:
        number: Of the attempt, from 1 on; the kill's number, too, where it was killed.
        kill, target: As drawn and aimed; None for the last attempt.
        attempt: What happened.
        began_at: First step, None where it died before it knew.
        checkpoint_before, checkpoint_after: Newest committed steps.
        moment: Where the death fell, in words.
        violation: The first thing that does not hold.
    """

    number: int
    kill: Kill | None
    target: Target | None
    attempt: Attempt
    began_at: int | None
    checkpoint_before: int
    checkpoint_after: int
    moment: str
    violation: Violation | None = None

    @property
    def name(self) -> str:
        """For a line about what does not hold."""
        return (
            f"kill {self.number}, attempt {self.number}" if self.attempt.fired else f"attempt {self.number}"
        )


@dataclass
class Result:
    """What came of a call.

    Args:
        reference: Folder of the run that nobody killed.
        folder: Of the other.
        deaths: Every attempt; the last one ended by itself, unless something does not hold before.
        violation: The first thing that does not hold, with the attempt's number; None where all does.
        missing: Why less was shown than was asked for; empty where all was.
        interrupted: Whether the call was ended from outside.
    """

    reference: Path
    folder: Path
    deaths: list[Death] = field(default_factory=list)
    violation: tuple[str, Violation] | None = None
    missing: str = ""
    interrupted: bool = True

    @property
    def verdict(self) -> str:
        """`holds`, `violated`, `not shown` or `interrupted`."""
        if self.violation:
            return "violated"
        return "interrupted" if self.interrupted else "not shown" if self.missing else "holds"

    @property
    def killed(self) -> list[Death]:
        return [death for death in self.deaths if death.attempt.fired]

    @property
    def in_save(self) -> int:
        """Kills that fell into a save."""
        return sum(death.attempt.in_save for death in self.killed)

    @property
    def committing(self) -> int:
        """Killed attempts that had committed a checkpoint."""
        return sum(death.checkpoint_after > death.checkpoint_before for death in self.killed)


def run_chaos(
    plan: Plan,
    place: Place,
    result: Result,
    *,
    say: Callable[[str], None],
    on_attempt: Callable[[Death], None],
) -> None:
    """Make the reference unless there is one, kill and continue the other run, and fill in `result`.

    Args:
        plan: Checked.
        place: Where.
        result: Filled as it goes, so that it is whole up to where the call was ended from outside.
        say: Takes a line of progress.
        on_attempt: Takes every judged attempt.
    """
    timing = Timing()
    if plan.reference is None:
        say(f"the run that nobody kills: {plan.paths[0]} W={plan.world_size}, {plan.steps} steps")
        attempt = run_attempt(_job(plan, plan.paths[0], result.reference), place, timing)
        if attempt.violation:
            result.violation = "the reference", attempt.violation
            result.interrupted = False
            return
    rows = rows_of(result.reference)
    starts = timing.start_up
    timing = timing_of(rows, plan.save_steps, plan.eval_steps)
    timing.start_up = starts
    _attempts(plan, place, result, rows, timing, on_attempt)
    result.interrupted = False


def _attempts(
    plan: Plan,
    place: Place,
    result: Result,
    rows: Rows,
    timing: Timing,
    on_attempt: Callable[[Death], None],
) -> None:
    sound, number = Soundness(), 0
    while True:
        kill = _next_kill(plan, result, number)
        path = plan.paths[number % len(plan.paths)]
        number += 1
        death = _attempt(plan, place, result, rows, timing, sound, number, path, kill)
        result.deaths.append(death)
        ended = not death.attempt.fired
        if ended and death.violation is None:
            death.violation = _judge_the_end(plan, result, rows, sound)
        on_attempt(death)
        if death.violation:
            result.violation = death.name, death.violation
            return
        if ended:
            result.missing = _missing(plan, result)
            return


def _next_kill(plan: Plan, result: Result, number: int) -> Kill | None:
    """The death drawn for this attempt; in a save where so many are still to fall into one."""
    if number >= len(plan.kills):
        return None
    kill, left = plan.kills[number], len(plan.kills) - number
    if plan.in_save - result.in_save >= left and kill.where != "save":
        return Kill(**{**vars(kill), "where": "save"})
    return kill


def _attempt(
    plan: Plan,
    place: Place,
    result: Result,
    rows: Rows,
    timing: Timing,
    sound: Soundness,
    number: int,
    path: str,
    kill: Kill | None,
) -> Death:
    """Run one attempt and judge what it left behind."""
    folder = result.folder
    before = look_at(folder)
    target = None
    if kill is not None:
        later = sum(each.progresses for each in plan.kills[number:])
        target = aim(
            kill, checkpoint=before.checkpoint, steps=plan.steps, save_steps=plan.save_steps,
            eval_steps=plan.eval_steps, going_on=later,
        )  # fmt: skip
    attempt = run_attempt(_job(plan, path, folder), place, timing, kill, target)
    violation, began = attempt.violation, None
    try:
        began = began_at(folder, before)[0]
        violation = (
            violation
            or check_start(folder, before)
            or sound.check(folder)
            or check_rows(rows, rows_of(folder), owed=owed_evaluation(folder))
            or check_leftovers(folder, before)
            or (check_stop(folder, attempt.last_step) if _is_stopped(attempt, kill) else None)
        )
    except PretrainError as error:  # a file that cannot be read is what this looks for
        violation = violation or Violation(str(error))
    return Death(
        number, kill, target, attempt, began, before.checkpoint, newest(folder),
        _moment(attempt, target, plan.eval_steps), violation,
    )  # fmt: skip


def _is_stopped(attempt: Attempt, kill: Kill | None) -> bool:
    return attempt.fired and kill is not None and kill.kind == "term"


def _judge_the_end(plan: Plan, result: Result, rows: Rows, sound: Soundness) -> Violation | None:
    folder = result.folder
    try:
        return (
            check_rows(rows, rows_of(folder), steps=plan.steps)
            or sound.check(folder, again=True)
            or check_end(result.reference, folder, plan.steps, same_call=plan.reference is None)
        )
    except PretrainError as error:
        return Violation(str(error))


def _moment(attempt: Attempt, target: Target | None, eval_steps: int) -> str:
    """Where a death fell, by what was seen of it."""
    if not attempt.fired:
        return "to its end"
    if attempt.in_save:
        return f"save of step {attempt.saved_step}" if attempt.saved_step else "save"
    if attempt.last_step is None:
        return "start-up"
    following = attempt.last_step + 1
    if target is not None and target.where == "evaluation" and following == target.step and eval_steps:
        return f"evaluation of step {following}"
    return f"after step {attempt.last_step}"


def _missing(plan: Plan, result: Result) -> str:
    """What was asked for and is not shown, though nothing else is wrong."""
    killed, asked = len(result.killed), len(plan.kills)
    if killed < asked:
        return f"the run was done after {killed} of {asked} kills; ask for more --steps"
    if result.in_save < plan.in_save:
        return f"{result.in_save} kills fell into a save, {plan.in_save} were asked for; try another --seed"
    return ""


def _job(plan: Plan, path: str, folder: Path) -> Job:
    return Job(
        path, plan.world_size, folder, folder.with_suffix(".log"), plan.options, plan.threads,
        plan.config.distributed.strategy, with_launcher=True,
    )  # fmt: skip
