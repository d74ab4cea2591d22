"""Runs a job to its end or to a kill."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from llm_pretrain.launch.jobs import (
    Job,
    LaunchContext,
    RunningJob,
    kill_all,
    last_error_lines,
    processes_of,
    run_until,
)
from llm_pretrain.runs.monitor import RunMonitor

_POLL_SECONDS, _POLL_KILL_SECONDS = 0.02, 0.001


class Outcome(NamedTuple):
    """How a started run ended.

    Args:
        killed: Whether it was killed; otherwise it ended by itself.
        last_step: Of the rows that it had written when it was killed; None without any.
        saved_step: Step of the checkpoint or weights that it was writing when it was killed.
        failure: Why it did not end as it should; empty where it did.
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
    """Run a job to its end, or kill it when that is due.

    Args:
        job: What to start.
        context: Where to start it.
        is_due: Asked a thousand times a second, with the step that is being saved; None to let the run end.
        kill: Sends the signals.
        exit_seconds: Time limit from then until no process of the run is left.
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
    """Wait until launcher and workers are gone; those left at the limit are named, and killed."""
    sent = time.monotonic()
    while time.monotonic() - sent < seconds:
        if started.process.poll() is not None and not processes_of(started.job.folder):
            return ""
        time.sleep(_POLL_SECONDS)
    left = processes_of(started.job.folder)
    kill_all(left)
    who = ", ".join(f"process {process.pid}" for process in left) or "the launcher"
    return f"{who} was still there {seconds:.0f} s after the kill"
