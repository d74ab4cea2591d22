"""`llm-pretrain chaos`: kill a run repeatedly, and check that it ends bit for bit as an uninterrupted run."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_pretrain.commands._kill_schedule import ChaosPlan, Kill, Target, choose_target, make_plan
from llm_pretrain.commands._launch_options import (
    add_launch_options,
    call_facts,
    check_timeout,
    create_output,
    say,
    write_result,
)
from llm_pretrain.commands._launching import (
    Job,
    LaunchContext,
    exit_on_signals,
    newest_checkpoint,
    rows_of,
    this_machine,
)
from llm_pretrain.commands._parity_comparison import Rows
from llm_pretrain.errors import PretrainError

if TYPE_CHECKING:
    from llm_pretrain.commands._chaos_attempts import Attempt, Durations, FolderVerifier, Violation

EXAMPLES = """\
Every other option is a setting, --section.field VALUE, and applies to every launch.

kinds of kill: group, SIGKILL to launcher and workers at once; rank, to one worker (rank:1, to that one),
after which the launcher must end within 60 s; launcher, to the launcher alone, after which all workers must
end within 30 s; term, SIGTERM to the launcher. Rows, sample digests, parameters, every tensor of the last
checkpoint and every file of the weights must be those of the uninterrupted run; every attempt must begin
right after the newest checkpoint.
exit code: 0 where this holds, 1 where it does not or less was shown than asked for, 2 or 65 for wrong input

examples:
  llm-pretrain chaos --config configs/tiny-dense.yaml --kills 3 --steps 12
  llm-pretrain chaos --config configs/tiny-moe.yaml --kills 50 --seed 1 --in-save 10
  llm-pretrain chaos --config configs/tiny-moe.yaml --paths torchrun --world-size 2 --kinds rank:1,launcher
  llm-pretrain chaos --config configs/tiny-moe.yaml --kinds group,term --async-save --model.hidden_dropout 0.1
  llm-pretrain chaos --config configs/tiny-moe.yaml --seed 2 --reference runs/chaos-tiny-moe/reference
"""

_COLUMNS = ("kill", "launcher", "death", "moment", "began at", "committed", "gone in", "verdict")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options, and every setting of the configuration."""
    add_launch_options(parser, "chaos", "an attempt")
    add = parser.add_argument
    add("--kills", type=int, default=10, metavar="N", help="number of kills (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="S",
        help="of the times and kinds of the kills (default: %(default)s)")  # fmt: skip
    add("--kinds", default="group,rank,launcher", metavar="LIST",
        help="of group, rank, rank:R, launcher, term (default: %(default)s)")  # fmt: skip
    add("--in-save", "--in_save", type=int, metavar="K",
        help="at least so many kills fall into a save (default: a quarter)")  # fmt: skip
    add("--paths", default="torchrun,accelerate", metavar="LIST",
        help="launchers, used in turn (default: %(default)s)")  # fmt: skip
    add("--world-size", "--world_size", metavar="W", help="processes of every attempt (default: 2)")
    add("--steps", type=int, metavar="K", help="optimizer steps (default: enough for all kills)")
    add("--save-steps", "--save_steps", type=int, metavar="K",
        help="steps between saves (default: 4, or fewer in a short run)")  # fmt: skip
    add("--async-save", "--async_save", action="store_true",
        help="save while training continues (checkpoint.async_save)")  # fmt: skip
    add("--reference", metavar="FOLDER", help="a finished run of the same settings to compare with again")


def run(arguments: argparse.Namespace) -> int:
    """Launch, kill, compare, print a line per kill and write chaos.json; 0 if every check passed."""
    check_timeout(arguments)
    started, machine = time.time(), this_machine()
    plan = make_plan(arguments, machine)
    context = create_output(plan, arguments, machine)
    say(
        f"{len(plan.kills)} kills in {plan.steps} steps, a save every {plan.save_steps}, "
        f"seed {arguments.seed}; W={plan.world_size}, in {plan.output}"
    )
    for note in plan.notes:
        say(f"note   {note}")
    result = Result(plan.reference or plan.output / "reference", plan.output / "killed")
    file = plan.output / "chaos.json"
    try:
        with exit_on_signals():
            run_chaos(plan, context, result, say=say)
    finally:
        facts = {"seed": arguments.seed, **call_facts(plan, arguments, machine, started)}
        write_result(file, result_content(facts, result, plan))
    say("\n".join(["", *summary(result, plan)]))
    held = {
        "holds": "the killed run ended as the uninterrupted run, bit for bit",
        "violated": "what is promised does NOT hold",
        "not shown": "nothing wrong was found, but less was shown than asked for",
    }[result.verdict]
    say(f"{held}; {file}, {time.time() - started:.0f} s")
    return 0 if result.verdict == "holds" else 1


@dataclass
class Result:
    """Result of a call.

    Args:
        reference: Folder of the uninterrupted run.
        folder: Folder of the killed run.
        attempts: All attempts; the last one ended by itself, unless a promise was broken before.
        violation: The first broken promise, and where it was found.
        missing: Why less was shown than asked for; empty where all was.
        interrupted: Whether a signal ended the call.
    """

    reference: Path
    folder: Path
    attempts: list[Attempt] = field(default_factory=list)
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
    def killed(self) -> list[Attempt]:
        return [attempt for attempt in self.attempts if attempt.killed]

    @property
    def in_save(self) -> int:
        """Number of kills during a save."""
        return sum(attempt.in_save for attempt in self.killed)

    @property
    def after_save(self) -> int:
        """Number of killed attempts that had committed a checkpoint."""
        return sum(attempt.checkpoint_after > attempt.checkpoint_before for attempt in self.killed)


def run_chaos(plan: ChaosPlan, context: LaunchContext, result: Result, *, say: Callable[[str], None]) -> None:
    """Make the reference if needed, kill and resume the other run until it ends or a check fails.

    Args:
        plan: Of the call.
        context: Where to launch.
        result: Filled step by step, so that it is complete up to a signal that ends the call.
        say: Prints a line of progress.
    """
    from llm_pretrain.commands._chaos_attempts import (
        Durations,
        FolderVerifier,
        measure_durations,
        run_attempt,
    )

    start_ups = Durations()
    if plan.reference is None:
        say(f"the uninterrupted run: {plan.paths[0]} W={plan.world_size}, {plan.steps} steps")
        attempt = run_attempt(_job(plan, plan.paths[0], result.reference), context, start_ups)
        if attempt.violation:
            result.violation, result.interrupted = ("the reference", attempt.violation), False
            return
    rows = rows_of(result.reference)
    durations = measure_durations(rows, plan.save_steps, plan.eval_steps)
    durations.start_up = start_ups.start_up
    verifier, ended = FolderVerifier(), False
    while not ended and result.violation is None:
        attempt = _run_next(plan, context, result, rows, durations, verifier)
        if not result.attempts:
            say(table_line(_COLUMNS, plan))
        result.attempts.append(attempt)
        say(attempt_line(attempt, plan))
        ended = not attempt.killed
        if attempt.violation:
            result.violation = attempt.label, attempt.violation
        elif ended:
            result.missing = _missing(plan, result)
    result.interrupted = False


def _run_next(
    plan: ChaosPlan,
    context: LaunchContext,
    result: Result,
    rows: Rows,
    durations: Durations,
    verifier: FolderVerifier,
) -> Attempt:
    """Run one attempt and check what it left in the run's folder."""
    from llm_pretrain.commands import _chaos_attempts as checks

    folder, number = result.folder, len(result.attempts)
    kill, before = next_kill(plan, result), checks.scan_folder(folder)
    later = sum(each.makes_progress for each in plan.kills[number + 1 :])
    target = kill and choose_target(
        kill, checkpoint=before.checkpoint, steps=plan.steps, save_steps=plan.save_steps,
        eval_steps=plan.eval_steps, later_progress=later,
    )  # fmt: skip
    job = _job(plan, plan.paths[number % len(plan.paths)], folder)
    attempt = checks.run_attempt(job, context, durations, kill, target)
    attempt.number, attempt.kill, attempt.target = number + 1, kill, target
    attempt.moment = _moment(attempt, target, plan.eval_steps)
    attempt.checkpoint_before, attempt.checkpoint_after = before.checkpoint, newest_checkpoint(folder)
    is_stopped = attempt.killed and kill is not None and kill.kind == "term"
    try:
        written, declared = checks.steps_of_attempt(folder, before)
        attempt.began_at = next(iter([*written, *declared]), None)
        found = rows_of(folder)
        attempt.violation = (
            attempt.violation
            or checks.check_start(folder, before)
            or verifier.check(folder)
            or checks.check_rows(rows, found, owed=checks.postponed_evaluation(folder))
            or checks.check_temporary(folder, before)
            or (checks.check_stop(folder, attempt.last_step) if is_stopped else None)
        )
        if not attempt.killed:
            attempt.violation = (
                attempt.violation
                or checks.check_rows(rows, found, steps=plan.steps)
                or verifier.check(folder, again=True)
                or checks.check_end(result.reference, folder, plan.steps, same_call=plan.reference is None)
            )
    except PretrainError as error:  # unreadable files are what the checks look for
        attempt.violation = attempt.violation or checks.Violation(str(error))
    return attempt


def next_kill(plan: ChaosPlan, result: Result) -> Kill | None:
    """The kill drawn for the next attempt; moved into a save where all remaining ones have to be in one."""
    number = len(result.attempts)
    if number >= len(plan.kills):
        return None
    kill, left = plan.kills[number], len(plan.kills) - number
    return dataclasses.replace(kill, where="save") if plan.in_save - result.in_save >= left else kill


def _moment(attempt: Attempt, target: Target | None, eval_steps: int) -> str:
    """Where a kill fell, as observed."""
    if not attempt.killed:
        return "to its end"
    if attempt.in_save:
        return f"save of step {attempt.saved_step}" if attempt.saved_step else "save"
    if attempt.last_step is None:
        return "start-up"
    following = attempt.last_step + 1
    if target is not None and target.where == "evaluation" and following == target.step and eval_steps:
        return f"evaluation of step {following}"
    return f"after step {attempt.last_step}"


def _missing(plan: ChaosPlan, result: Result) -> str:
    """The requested checks that a run without a violation did not reach."""
    killed, asked = len(result.killed), len(plan.kills)
    if killed < asked:
        return f"the run was done after {killed} of {asked} kills; ask for more --steps"
    if result.in_save < plan.in_save:
        return f"{result.in_save} kills fell into a save, {plan.in_save} were asked for; try another --seed"
    return ""


def _job(plan: ChaosPlan, path: str, folder: Path) -> Job:
    return Job(
        path, plan.world_size, folder, folder.with_suffix(".log"), tuple(plan.options), plan.threads,
        plan.config.distributed.strategy, with_launcher=True,
    )  # fmt: skip


def attempt_line(attempt: Attempt, plan: ChaosPlan) -> str:
    """An attempt as a row of the table."""
    is_new = attempt.checkpoint_after > attempt.checkpoint_before
    cells = (
        f"{attempt.number}/{len(plan.kills)}" if attempt.killed else "end",
        attempt.path,
        _kill_name(attempt) if attempt.killed else "",
        attempt.moment,
        "-" if attempt.began_at is None else str(attempt.began_at),
        f"step {attempt.checkpoint_after}" if is_new else "-",
        "" if attempt.ended_within is None else f"{attempt.ended_within:.1f} s",
        "VIOLATED" if attempt.violation else "ok",
    )
    return table_line(cells, plan)


def table_line(cells: Sequence[str], plan: ChaosPlan) -> str:
    """A row of the table; widths are known before the first attempt."""
    digits = len(str(plan.steps))
    widths = (2 * len(str(len(plan.kills))) + 1, 10, 8, 19 + digits, 8, 5 + digits, 7, 8)
    padded = (
        cell.ljust(max(width, len(name))) for cell, width, name in zip(cells, widths, _COLUMNS, strict=True)
    )
    return "  ".join(padded).rstrip()


def _kill_name(attempt: Attempt) -> str:
    assert attempt.kill is not None
    return f"rank {attempt.kill.rank}" if attempt.kill.kind == "rank" else attempt.kill.kind


def summary(result: Result, plan: ChaosPlan) -> list[str]:
    """What was checked, or the first violation."""
    kinds = Counter(attempt.kill.kind for attempt in result.killed if attempt.kill)
    shares = ", ".join(f"{count} {name}" for name, count in sorted(kinds.items()))
    lines = [
        f"{len(result.killed)} of {len(plan.kills)} kills ({shares or 'none'}), {result.in_save} in a save, "
        f"{result.after_save} after a new checkpoint"
    ]
    if result.violation:
        where, violation = result.violation
        lines.append(f"{where}: {violation.text}")
    if result.missing:
        lines.append(f"not shown: {result.missing}")
    return lines


def result_content(facts: Mapping[str, Any], result: Result, plan: ChaosPlan) -> dict[str, Any]:
    """Content of chaos.json; `facts` are those of the call."""
    violation = None
    if result.violation:
        where, found = result.violation
        violation = {"where": where, **dataclasses.asdict(found)}
    return {
        "verdict": result.verdict,
        **facts,
        "world_size": plan.world_size,
        "paths": plan.paths,
        "save_steps": plan.save_steps,
        "eval_steps": plan.eval_steps,
        "reference": str(result.reference),
        "folder": str(result.folder),
        "kills_asked": len(plan.kills),
        "kills": len(result.killed),
        "in_save_asked": plan.in_save,
        "in_save": result.in_save,
        "after_a_new_checkpoint": result.after_save,
        "violation": violation,
        "missing": result.missing,
        "attempts": [_attempt_content(attempt) for attempt in result.attempts],
    }


def _attempt_content(attempt: Attempt) -> dict[str, Any]:
    content = dataclasses.asdict(attempt)
    del content["saved_step"], content["target"]
    return content | {
        "aimed_at": str(attempt.target) if attempt.target else None,
        "seconds": round(attempt.seconds, 2),
        "verdict": "violated" if attempt.violation else "ok",
    }
