"""Runs a job to its end or to a kill."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from llm_pretrain.launch.jobs import (
    _POLL_KILL_SECONDS,
    _POLL_SECONDS,
    Job,
    LaunchContext,
    RunningJob,
    _kill_all,
    last_error_lines,
    processes_of,
)
from llm_pretrain.runs.monitor import RunMonitor


class Outcome(NamedTuple):
    """How a started run ended.

    Args:
        killed: Whether it was killed; otherwise it ended by itself.
        last_step: Of the rows that it had written by then; None without any.
        saved_step: Step of the checkpoint or weights that it was writing when it was killed.
        failure: Why it did not end as it should; empty where it did.
    """

    killed: bool
    last_step: int | None
    saved_step: int | None
    failure: str


def run_until(
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
    monitor, saving = RunMonitor(job.folder), None
    with RunningJob(job, context, range(job.world_size)) as started:
        while (code := started.poll()) is None:
            monitor.update()
            if is_due is None:
                time.sleep(_POLL_SECONDS)
                continue
            saving = monitor.step_being_saved()
            if is_due(monitor, saving):
                break
            time.sleep(_POLL_KILL_SECONDS)
        if code is None:
            kill(started)
            failure = _wait_for_exit(started, exit_seconds)
        elif started.timed_out:
            failure = f"no end after {started.seconds:.0f} s, killed; see {job.log}"
        else:
            lines = "; ".join(last_error_lines(job.log))
            failure = f"ended by itself with exit code {code}: {lines}" if code else ""
    return Outcome(code is None, monitor.last_step, saving, failure)


def _wait_for_exit(started: RunningJob, seconds: float) -> str:
    """Wait until launcher and workers are gone; those left at the limit are named, and killed."""
    sent = time.monotonic()
    while time.monotonic() - sent < seconds:
        if started.process.poll() is not None and not processes_of(started.job.folder):
            return ""
        time.sleep(_POLL_SECONDS)
    left = processes_of(started.job.folder)
    _kill_all(left)
    who = ", ".join(f"process {process.pid}" for process in left) or "the launcher"
    return f"{who} was still there {seconds:.0f} s after the kill"


def newest_checkpoint(folder: Path) -> int:
    """Step of the newest committed checkpoint of a run; 0 without any."""
    from llm_pretrain.checkpoints.folders import committed_folders

    return max(committed_folders(folder / "checkpoints"), default=0)
