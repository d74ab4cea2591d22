"""Kills a run repeatedly, and checks that it ends bit for bit as an uninterrupted run."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from llm_pretrain.audit.comparison import Difference, Rows, exact_differences
from llm_pretrain.audit.variants import build_variants, configured_mesh
from llm_pretrain.checkpoints.folders import newest_step
from llm_pretrain.config.loading import load_config, resolve_model
from llm_pretrain.config.tree import Config
from llm_pretrain.errors import ConfigError, PretrainError
from llm_pretrain.launch.jobs import (
    RESUMABLE_PATHS,
    SCRIPTS,
    Job,
    LaunchContext,
    Machine,
    RunningJob,
    kill_all,
    last_error_lines,
    processes_of,
    run_until,
)
from llm_pretrain.launch.options import (
    LaunchPlan,
    as_options,
    choose_output,
    find_scripts,
    forced_settings,
    given_options,
    parse_numbers,
    parse_words,
)
from llm_pretrain.runs.monitor import RunMonitor
from llm_pretrain.runs.rows import rows_of

PLACES = ("step", "start-up", "save")
KILLS = ("all", "rank", "launcher")
LAUNCHER_SECONDS, WORKER_SECONDS = 60.0, 30.0
"""Seconds that a launcher may live after a worker is killed, and workers after their launcher is killed."""
_SLOW_STEPS = 3
"""Such a limit grows by so many times the longest time between two rows of the uninterrupted run."""
_SAVE_STEPS, _EVALUATION_BATCHES = 4, 4
_POLL_SECONDS, _POLL_KILL_SECONDS = 0.02, 0.001


@dataclass(kw_only=True)
class ChaosPlan(LaunchPlan):
    """The plan of a `llm-pretrain chaos` call, with its options checked.

    Args:
        paths: Launch paths; attempts use them in turn.
        world_size: Processes of every attempt and of the uninterrupted run.
        save_steps: Steps between saves.
        kill: One of `KILLS`.
        places: One of `PLACES` for each kill.
    """

    paths: list[str]
    world_size: int
    save_steps: int
    kill: str
    places: list[str]


def make_plan(arguments: argparse.Namespace, machine: Machine) -> ChaosPlan:
    """Check the options of a call and build its plan.

    Raises:
        PretrainError: a launch would fail because of an option or a setting.
    """
    from llm_pretrain.data.loader import open_stores

    paths, given = parse_words("--paths", arguments.paths, RESUMABLE_PATHS), given_options(arguments)
    config = load_config(given)
    world_size = _world_size(arguments.world_size, config, machine, paths)
    # places and launchers both rotate (3 places, 1 or 2 launchers), so these kills cover every pair
    places: list[str] = [*PLACES] * len(paths)
    saves, save_steps = len(places) + 2, config.checkpoint.save_steps
    if "--checkpoint.save_steps" not in arguments.settings:
        save_steps = min(_SAVE_STEPS, max(2, (arguments.steps or _SAVE_STEPS * saves) // saves))
    steps = save_steps * saves if arguments.steps is None else arguments.steps
    if save_steps < 2 or steps < save_steps * saves:
        raise ConfigError(
            f"--steps, --checkpoint.save_steps: expected saves at least two steps apart, and {saves} of "
            f"them, one for each kill and two more, found --steps {steps} with a save every {save_steps}; "
            f"--steps {max(2, save_steps) * saves} would do"
        )
    threads = config.distributed.cpu_threads or max(1, machine.cores // world_size)
    forced, notes = forced_settings(config, steps, threads, machine)
    forced["checkpoint.save_steps"] = save_steps
    eval_steps = config.evaluation.eval_steps
    if eval_steps and "--evaluation.eval_steps" not in arguments.settings:
        eval_steps = min(eval_steps, save_steps + 1)  # some must fall into a short run
        batches = min(config.evaluation.max_batches or _EVALUATION_BATCHES, _EVALUATION_BATCHES)
        forced |= {"evaluation.eval_steps": eval_steps, "evaluation.max_batches": batches}
        notes.append(f"evaluated every {eval_steps} steps, on {batches} batches at most")
    scripts, options = find_scripts(paths), [*given, *as_options(forced)]
    resolved = load_config(options)
    resolved = resolve_model(resolved, open_stores(resolved)[0].vocab_size)
    return ChaosPlan(
        config=resolved, steps=steps, options=options, scripts=scripts,
        output=choose_output(arguments.output, f"chaos-{config.run.name}"), threads=threads, notes=notes,
        paths=paths, world_size=world_size, save_steps=save_steps, kill=arguments.kill, places=places,
    )  # fmt: skip


def _world_size(given: str | None, config: Config, machine: Machine, paths: Sequence[str]) -> int:
    """The given number of processes, else 2, or 1 if 2 do not fit; raises if a launch path cannot run it."""
    training = config.training
    if given is not None:
        size, *more = parse_numbers("--world-size", given)
        if more:
            raise ConfigError(f"--world-size: expected one number, the same for every attempt, found {given}")
    else:
        fits = training.global_batch_size % (2 * training.micro_batch_size) == 0
        size = 2 if machine.max_world_size > 1 and fits else 1
    variants, notes = build_variants(
        config, machine, paths=paths, world_sizes=[size], accumulations=None,
        precisions=[training.precision], meshes=[configured_mesh(config.distributed)],
    )  # fmt: skip
    if len(variants) < len(paths):
        raise ConfigError(f"--paths: {'; '.join(notes)}")
    return size


@dataclass
class KilledAttempt:
    """One start of the run.

    Args:
        path: Launch path.
        place: Where the kill was observed to happen; `to its end` if the attempt was not killed.
        missed: Whether a kill meant for the start-up came too late: the attempt had already written a row.
        began_at: First step; None if the attempt was killed before it recorded one.
        checkpoint: Step of the newest committed checkpoint when the attempt ended.
        violation: The first check that failed; None if all passed.
    """

    path: str
    place: str
    missed: bool
    began_at: int | None
    checkpoint: int
    violation: Difference | None


@dataclass
class ChaosResult:
    """Result of a call; after a signal it holds the attempts that had ended before the signal.

    Args:
        attempts: In order. The last one ran to its end, unless a check failed.
        failure: Why the uninterrupted run failed; empty if it did not.
        missing: Why not all planned kills could be tested; empty if they were.
        interrupted: Whether a signal ended the call.
    """

    attempts: list[KilledAttempt] = field(default_factory=list)
    failure: str = ""
    missing: str = ""
    interrupted: bool = True

    @property
    def verdict(self) -> str:
        """`holds`, `violated`, `not shown` or `interrupted`."""
        if self.failure or (self.attempts and self.attempts[-1].violation):
            return "violated"
        return "interrupted" if self.interrupted else "not shown" if self.missing else "holds"

    @property
    def summary(self) -> list[str]:
        """One line for each problem."""
        lines = [f"the uninterrupted run: {self.failure}"] if self.failure else []
        if self.attempts and (violation := self.attempts[-1].violation):
            lines.append(f"attempt {len(self.attempts)}: {violation.text}")
        return [*lines, *([f"not shown: {self.missing}"] if self.missing else [])]


def run_chaos(
    plan: ChaosPlan, context: LaunchContext, result: ChaosResult, *, say: Callable[[str], None]
) -> None:
    """Make an uninterrupted run, then kill and resume a second run until it ends or a check fails.

    Args:
        plan: The checked call.
        context: Where to launch.
        result: Receives each attempt as it ends.
        say: Prints a line of progress.
    """
    say(f"the uninterrupted run: {plan.paths[0]} W={plan.world_size}, {plan.steps} steps")
    reference = plan.output / "reference"
    if failure := run_or_kill(_job(plan, plan.paths[0], reference), context).failure:
        result.failure, result.interrupted = failure, False
        return
    rows = rows_of(reference)
    say(table_line(*_COLUMNS))
    while True:
        number = len(result.attempts)
        attempt, killed = _run_next(plan, context, number, rows)
        result.attempts.append(attempt)
        kill = f"{number + 1}/{len(plan.places)}" if killed else "end"
        began = "-" if attempt.began_at is None else str(attempt.began_at)
        checkpoint = f"step {attempt.checkpoint}" if attempt.checkpoint else "-"
        verdict = "VIOLATED" if attempt.violation else "ok"
        say(table_line(kill, attempt.path, attempt.place, began, checkpoint, verdict))
        if attempt.violation or not killed:
            break
    missed = [number for number, each in enumerate(result.attempts, start=1) if each.missed]
    if not attempt.violation and missed:
        result.missing = f"kill {missed[0]} was to fall into: {plan.places[missed[0] - 1]}"
    elif not attempt.violation and number < len(plan.places):
        result.missing = f"the run was done after {number} of {len(plan.places)} kills; ask for more --steps"
    result.interrupted = False


def _run_next(
    plan: ChaosPlan, context: LaunchContext, number: int, reference: Rows
) -> tuple[KilledAttempt, bool]:
    """Run attempt `number` (from 0) and check its folder; returns (attempt, whether it was killed)."""
    from llm_pretrain.audit import run_checks as checks

    folder = plan.output / "killed"
    job, before = _job(plan, plan.paths[number % len(plan.paths)], folder), checks.scan_folder(folder)
    place = plan.places[number] if number < len(plan.places) else None

    def is_due(monitor: RunMonitor, saving: int | None) -> bool:
        if place == "start-up":
            return monitor.has_begun
        if place == "save":  # of a checkpoint or of its exported weights
            return saving is not None and saving % plan.save_steps == 0
        # after two saves: the next attempt must not begin from the older one of two checkpoints
        return (monitor.last_step or 0) > (before.checkpoint // plan.save_steps + 2) * plan.save_steps

    times = [row["time"] for _, row in sorted(reference.items())]
    gap = max((later - earlier for earlier, later in pairwise(times)), default=0.0)
    outcome = run_or_kill(
        job,
        context,
        is_due if place else None,
        lambda started: send_kill(started, plan.kill, rank=number // 2 % plan.world_size),
        (WORKER_SECONDS if plan.kill == "launcher" else LAUNCHER_SECONDS) + _SLOW_STEPS * gap,
    )
    missed = outcome.killed and place == "start-up" and outcome.last_step is not None
    observed = "start-up" if outcome.last_step is None else f"after step {outcome.last_step}"
    if place == "save":
        observed = f"save of step {outcome.saved_step}"
    newest = newest_step(folder / "checkpoints")
    attempt = KilledAttempt(
        job.path, observed if outcome.killed else "to its end", missed, None, newest, None
    )
    try:
        written, declared = checks.steps_of_attempt(folder, before)
        attempt.began_at = next(iter([*written, *declared]), None)
        found = rows_of(folder)
        attempt.violation = (
            (Difference(None, "exit", text=outcome.failure) if outcome.failure else None)
            or checks.check_start(folder, before)
            or checks.check_committed(folder)
            or next(exact_differences(reference, found, owed=checks.postponed_evaluation(folder)), None)
        )
        if not outcome.killed:
            attempt.violation = (
                attempt.violation
                or next(exact_differences(reference, found, steps=plan.steps), None)
                or checks.check_end(plan.output / "reference", folder, plan.steps)
            )
    except PretrainError as error:  # an unreadable file is a violation too
        attempt.violation = attempt.violation or Difference(None, None, text=str(error))
    return attempt, outcome.killed


class Outcome(NamedTuple):
    """How a started run ended.

    Args:
        killed: Whether it was killed; otherwise it ended by itself.
        last_step: Last step whose row was written when it was killed; None without a row.
        saved_step: Step of the checkpoint or weights that it was writing when it was killed.
        failure: Why the run did not end as planned; empty if it did.
    """

    killed: bool
    last_step: int | None
    saved_step: int | None
    failure: str


def run_or_kill(
    job: Job,
    context: LaunchContext,
    is_due: Callable[[RunMonitor, int | None], bool] | None = None,
    kill: Callable[[RunningJob], None] = RunningJob.kill,
    exit_seconds: float = 60.0,
) -> Outcome:
    """Run a job to its end, or kill it as soon as `is_due` returns True.

    Args:
        job: What to start.
        context: Where to start it.
        is_due: Called 1000 times a second with the monitor and the step being saved; None: the run ends.
        kill: Sends the signals.
        exit_seconds: Time in which all processes of the run must exit after the kill.
    """
    monitor, saving, failure = RunMonitor(job.folder), None, ""

    def done(started: RunningJob) -> bool:
        nonlocal saving, failure
        if is_due is None:
            return False
        monitor.update()
        saving = monitor.step_being_saved()
        if not is_due(monitor, saving):
            return False
        kill(started)
        failure = _wait_for_exit(started, exit_seconds)
        return True

    every = _POLL_SECONDS if is_due is None else _POLL_KILL_SECONDS
    ((started, code),) = run_until([job], context, done, every=every)
    if started.timed_out:
        failure = f"no end after {started.seconds:.0f} s, killed; see {job.log}"
    elif code and not started.done:
        failure = f"ended by itself with exit code {code}: {'; '.join(last_error_lines(job.log))}"
    return Outcome(started.done, monitor.last_step, saving, failure)


def _wait_for_exit(started: RunningJob, seconds: float) -> str:
    """Wait until launcher and workers exit; after `seconds` kill the rest, and name them in the result."""
    sent = time.monotonic()
    while time.monotonic() - sent < seconds:
        if started.process.poll() is not None and not processes_of(started.job.folder):
            return ""
        time.sleep(_POLL_SECONDS)
    left = processes_of(started.job.folder)
    kill_all(left)
    who = ", ".join(f"process {process.pid}" for process in left) or "the launcher"
    return f"{who} was still there {seconds:.0f} s after the kill"


def send_kill(started: RunningJob, kind: str, rank: int) -> None:
    """Send SIGKILL to what `kind` (of `KILLS`) names; with kind `rank`, to the worker of this `rank`."""
    workers = started.find_workers()
    if kind == "all":
        started.kill()
    elif kind == "launcher":
        started.process.kill()
    for process in workers if kind == "rank" else []:
        with suppress(psutil.Error):
            is_worker = process.ppid() == started.process.pid and any(
                word.endswith(SCRIPTS[started.job.path]) for word in process.cmdline()
            )
            if is_worker and int(process.environ().get("RANK") or 0) == rank:
                process.kill()


def _job(plan: ChaosPlan, path: str, folder: Path) -> Job:
    return Job(
        path, plan.world_size, folder, folder.with_suffix(".log"), tuple(plan.options), plan.threads,
        plan.config.distributed.strategy, with_launcher=True,
    )  # fmt: skip


_COLUMNS, _WIDTHS = ("kill", "launcher", "place", "began at", "checkpoint", "verdict"), (6, 10, 20, 8, 10, 8)


def table_line(*cells: str) -> str:
    """A row of the table."""
    return "  ".join(map(str.ljust, cells, _WIDTHS)).rstrip()


def result_content(facts: Mapping[str, Any], result: ChaosResult, plan: ChaosPlan) -> dict[str, Any]:
    """Content of chaos.json; `facts` describe the call."""
    names = ("world_size", "paths", "save_steps", "kill", "places")
    return {
        "verdict": result.verdict,
        **facts,
        **{name: getattr(plan, name) for name in names},
        "failure": result.failure,
        "missing": result.missing,
        "attempts": [
            vars(attempt) | {"violation": attempt.violation and vars(attempt.violation)}
            for attempt in result.attempts
        ],
    }
