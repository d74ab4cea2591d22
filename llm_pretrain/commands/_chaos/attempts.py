"""One attempt of a run: started, watched, killed where its death was aimed, and what is left looked at.

Whether the numbers are right is the oracle's business; here it is only whether processes end as promised.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import psutil
from filelock import FileLock, Timeout

from llm_pretrain.commands._chaos.moments import Kill, Target
from llm_pretrain.commands._chaos.oracle import Violation
from llm_pretrain.commands._chaos.watching import Timing, Watch
from llm_pretrain.commands._launching.launching import (
    Job,
    Launched,
    Place,
    killed_at_the_end,
    processes_of,
    visible_gpus,
)
from llm_pretrain.commands._launching.machine import SCRIPTS
from llm_pretrain.commands._launching.records import last_words

LAUNCHER_SECONDS, WORKER_SECONDS = 60.0, 30.0
"""A launcher that lost a worker ends within, and a worker that lost its launcher; see `_limit`."""
_SLOW_STEPS = 3.0
"""Where a step, save or evaluation takes long, a limit is this many of them instead."""
_POLL_SECONDS, _POLL_SAVE_SECONDS = 0.004, 0.0005


@dataclass
class Attempt:
    """One start of the run.

    Args:
        path: Its launcher.
        exit_code: The launcher's; None where it outlived its limit.
        last_step: Of its rows, None where it wrote none.
        in_save: Whether something was being written when it died.
        saved_step: Of what was being written.
        fired: Whether it was killed; else it ended by itself.
        seconds: From its start to its death.
        ended_within: Seconds from the death blow until no process was left.
        violation: Processes that did not end, or an end of its own that failed.
    """

    path: str
    exit_code: int | None = None
    last_step: int | None = None
    in_save: bool = False
    saved_step: int | None = None
    fired: bool = False
    seconds: float = 0.0
    ended_within: float | None = None
    violation: Violation | None = None


def run_attempt(
    job: Job, place: Place, timing: Timing, kill: Kill | None = None, target: Target | None = None
) -> Attempt:
    """Start the run, kill it where it is aimed (None: let it end), and wait until nothing of it is left.

    Args:
        job: What to start.
        place: Where; its time limit holds for the attempt.
        timing: What things take here; the attempt's start-up goes into it.
        kill, target: The death and where it falls.
    """
    watch, gpus = Watch(job.folder), visible_gpus(range(job.world_size), place)
    attempt = Attempt(job.path)
    with killed_at_the_end(Launched(job, place, gpus)) as launched:
        due = _Due(kill, target, timing, watch) if kill and target else None
        attempt.fired = _wait(launched, watch, due, kill)
        attempt.seconds = time.monotonic() - launched.started
        if attempt.fired:
            assert kill is not None
            attempt.saved_step = watch.saving()
            _strike(launched, kill)
            attempt.violation = _wait_for_the_end(launched, kill, timing, attempt)
        attempt.exit_code = launched.process.poll()
        if not attempt.fired:
            attempt.violation = _own_end(launched)
    attempt.violation = attempt.violation or _locked(job)
    watch.look()
    attempt.last_step = watch.last_step
    attempt.in_save = attempt.fired and (attempt.saved_step is not None or bool(watch.left()))
    if watch.first_row_after is not None:
        timing.started(job.path, watch.first_row_after)
    return attempt


class _Due:
    """Tells when the moment has come."""

    def __init__(self, kill: Kill, target: Target, timing: Timing, watch: Watch):
        self.target, self.watch = target, watch
        self._share, self._since = kill.delay, watch.started
        self._seen = target.where == "start-up"
        self._wait = {
            "start-up": timing.of_start_up(kill.path),
            "step": timing.step,
            "save": timing.save,
            "evaluation": timing.evaluation,
        }[target.where] * kill.delay
        if target.where == "evaluation":
            self._wait += timing.step  # it begins when its step is done

    @property
    def poll_seconds(self) -> float:
        """How often to look: a save is short."""
        near = (self.watch.last_step or 0) >= self.target.step - 1
        return _POLL_SAVE_SECONDS if self.target.where == "save" and near else _POLL_SECONDS

    def __call__(self) -> bool:
        where, watch = self.target.where, self.watch
        if where == "save":
            return self._in_save()
        if not self._seen:
            row = self.target.step - (where == "evaluation")
            self._seen, self._since = (watch.last_step or 0) >= row, time.monotonic()
            if not self._seen:
                return False
        if where == "start-up" and watch.last_step is not None:
            return True
        return time.monotonic() - self._since >= self._wait

    def _in_save(self) -> bool:
        """While something is written; where it was done before the delay, in the next save, and sooner."""
        step = self.watch.saving()
        if step is None or step < self.target.step:
            if self._seen:
                self._seen, self._wait = False, self._wait / 4
            return False
        if not self._seen:
            self._seen, self._since = True, time.monotonic()
        return time.monotonic() - self._since >= self._wait


def _wait(launched: Launched, watch: Watch, due: Callable[[], bool] | None, kill: Kill | None) -> bool:
    """Until the moment of death, True, or until it ends by itself."""
    poll = due.poll_seconds if isinstance(due, _Due) else _POLL_SECONDS
    while launched.exit_code is None:
        watch.look()
        if due is not None and due() and _can_die(launched, kill):
            return True
        poll = due.poll_seconds if isinstance(due, _Due) else _POLL_SECONDS
        time.sleep(poll)
    return False


def _can_die(launched: Launched, kill: Kill | None) -> bool:
    """Early in a start-up there is no worker yet."""
    return kill is None or kill.kind != "rank" or _worker(launched, kill.rank or 0) is not None


def _worker(launched: Launched, rank: int) -> psutil.Process | None:
    """The launcher's own child that runs the script as this rank."""
    script = SCRIPTS[launched.job.path]
    for process in launched.remember_members():
        with suppress(psutil.Error):
            is_worker = process.ppid() == launched.process.pid and any(
                word.endswith(script) for word in process.cmdline()
            )
            if is_worker and int(process.environ().get("RANK") or 0) == rank:
                return process
    return None


def _strike(launched: Launched, kill: Kill) -> None:
    """The death blow; what was started is remembered first."""
    if kill.kind == "group":
        launched.kill()
    elif kill.kind == "rank":
        worker = _worker(launched, kill.rank or 0)
        with suppress(psutil.Error):
            if worker is not None:
                worker.kill()
    else:
        launched.remember_members()
        number = signal.SIGKILL if kill.kind == "launcher" else signal.SIGTERM
        with suppress(ProcessLookupError):
            launched.process.send_signal(number)


def _wait_for_the_end(launched: Launched, kill: Kill, timing: Timing, attempt: Attempt) -> Violation | None:
    """Until launcher and workers are gone; what is left after its limit is a violation, and is killed."""
    struck = time.monotonic()
    limit = _limit(kill.kind, timing)
    while time.monotonic() - struck < limit:
        if launched.process.poll() is not None and not processes_of(launched.job.folder):
            attempt.ended_within = round(time.monotonic() - struck, 2)
            return None
        time.sleep(0.05)
    left = processes_of(launched.job.folder)
    who = ", ".join(f"{process.pid} (rank {_rank_of(process)})" for process in left) or "the launcher"
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    return Violation(f"process {who} was still there {limit:.0f} s after {_blow(kill)}", key="process")


def _limit(kind: str, timing: Timing) -> float:
    promised = WORKER_SECONDS if kind == "launcher" else LAUNCHER_SECONDS
    return max(promised, _SLOW_STEPS * timing.longest_gap + promised / 2)


def _rank_of(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return process.environ().get("RANK", "none")
    return "none"


def _blow(kill: Kill) -> str:
    whom = {"group": "all were killed", "rank": f"rank {kill.rank} was killed"}
    return whom.get(kill.kind, "the launcher was killed" if kill.kind == "launcher" else "SIGTERM")


def _own_end(launched: Launched) -> Violation | None:
    if launched.timed_out:
        seconds = time.monotonic() - launched.started
        return Violation(f"no end after {seconds:.0f} s, killed; see {launched.job.log}", key="time limit")
    if launched.process.returncode != 0:
        words = "; ".join(last_words(launched.job.log))
        text = f"ended by itself with exit code {launched.process.returncode}: {words}"
        return Violation(text, key="exit code")
    return None


def _locked(job: Job) -> Violation | None:
    """Whether the dead run still locks its folder."""
    if not job.folder.is_dir():
        return None
    try:
        with FileLock(job.folder / ".lock", timeout=1):
            return None
    except Timeout:
        return Violation(f"{job.folder} is still locked though no process of the run is left", key="lock")
