"""Ends a process that makes no progress, and recognises errors that the failure of another rank caused.

A hang raises no error: a rank waits for a stopped rank, for a data worker or for a disk. The main thread
calls `heartbeat` whenever it makes progress, and the watchdog's thread checks for heartbeats. When it ends
the process, it writes the stacks of all threads.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch

from llm_pretrain.config.tree import Config
from llm_pretrain.errors import CheckpointError, OutputError, PretrainError, StuckError

CHECKS_PER_TIMEOUT = 20
"""Number of checks for a heartbeat within one time-out."""
MAX_CHECK_SECONDS = 5.0
"""Longest time between two checks."""

GRACE_SECONDS = 30.0
"""faulthandler ends the process this long after the time-out, if the watchdog's thread cannot run because the
main thread never releases the GIL."""

REPORT_SECONDS = 10.0
"""Time limit for writing stacks and status, since the disk itself may hang; then the process ends."""

LINGER_SECONDS = 3.0
"""Wait between the report and the exit, so that other hanging ranks write their stacks before this rank's
exit breaks their connections."""

STDERR = 2


class Phase(NamedTuple):
    """What the main thread is doing. Every heartbeat makes a new object, so a new identity means progress.

    Args:
        name: The argument `phase` of `heartbeat`.
        files: See `heartbeat`.
        timeouts: Number of time-outs without a heartbeat after which the process is ended.
    """

    name: str
    files: bool = False
    timeouts: float = 1.0


class Watchdog:
    """Watches the thread that creates it; a context manager.

    Args:
        timeout_seconds: Time without a heartbeat after which the process is ended.
        rank, world_size: Rank of this process, and number of processes.
        ends_process: If false, the stacks are written once, and the process continues.
    """

    def __init__(self, timeout_seconds: float, *, rank: int, world_size: int, ends_process: bool = True):
        self.timeout_seconds, self.rank, self.world_size = timeout_seconds, rank, world_size
        self.ends_process = ends_process
        self.is_ending = False
        """Whether the watchdog is about to end the process."""
        self.phase = Phase("start")
        self.owner = threading.get_ident()
        self._own_files = Path(f"/proc/self/task/{threading.get_native_id()}")
        self._folder: Any = None
        self._status: Any = None
        self._pause = min(timeout_seconds / CHECKS_PER_TIMEOUT, MAX_CHECK_SECONDS)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._arm_fallback()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        """Check for heartbeats until the block ends.

        Idle time is the sum of the intervals between checks. Each interval counts only up to a limit, because
        a process may be suspended for a while.
        """
        seen, idle_seconds, activity, before = self.phase, 0.0, "", time.monotonic()
        while not self._over.wait(self._pause):
            self._arm_fallback()
            now, phase = time.monotonic(), self.phase
            idle_seconds += min(now - before, 2 * self._pause)
            before = now
            if phase is not seen:
                seen, idle_seconds, activity = phase, 0.0, ""
            if phase.files and (found := self._activity()) != activity:
                activity, idle_seconds = found, 0.0
            if idle_seconds >= phase.timeouts * self.timeout_seconds:
                self._end(phase, idle_seconds)
                return

    def _arm_fallback(self) -> None:
        """Make faulthandler end the process unless this method is called again in time (`GRACE_SECONDS`)."""
        if self.ends_process:
            seconds = self.phase.timeouts * self.timeout_seconds + GRACE_SECONDS
            with suppress(RuntimeError):  # a limit on threads must not end the watchdog's own thread
                faulthandler.dump_traceback_later(seconds, exit=True, file=STDERR)

    def _activity(self) -> str:
        """A text that changes if the main thread reads or writes, or if checkpoints or weights change."""
        found: list[object] = []
        with suppress(OSError):
            found += (self._own_files / "io").read_text().splitlines()[:2]  # rchar, wchar
        with suppress(OSError, IndexError):  # major page faults, by which memory-mapped files are read
            found.append((self._own_files / "stat").read_text().rpartition(")")[2].split()[9])
        roots = [self._folder.checkpoints, self._folder.weights] if self._folder else []
        for root in roots:
            for path in sorted(root.rglob("*")):
                with suppress(OSError):
                    facts = path.stat()
                    found.append((str(path), facts.st_size, facts.st_mtime_ns))
        return repr(found)

    def _end(self, phase: Phase, idle_seconds: float) -> None:
        """Report the hang; then end the process if `ends_process`, which is false in a notebook's kernel."""
        self.is_ending = self.ends_process
        stacks = self._folder.stacks(self.rank) if self._folder else None
        error = StuckError(
            f"rank {self.rank}: no progress for {idle_seconds:.0f} s in {phase.name} "
            f"(distributed.timeout_seconds: {self.timeout_seconds:g}); the threads' stacks are "
            f"{f'in {stacks}' if stacks else 'above'}; "
            + ("start the same command again to continue" if self.ends_process else "interrupt it to save")
        )
        reporter = threading.Thread(target=self._report, args=(error, stacks), daemon=True)
        reporter.start()
        reporter.join(REPORT_SECONDS)
        if not self.ends_process:
            return
        if self.world_size > 1:
            time.sleep(LINGER_SECONDS)
        with suppress(Exception):  # a hanging data worker would outlive this process
            for child in multiprocessing.active_children():
                child.kill()
        os._exit(error.exit_code)

    def _report(self, error: StuckError, stacks: Path | None) -> None:
        """Write the report. The terminal comes first, since the disk of the run's folder may hang. Python's
        streams are not used, since the main thread may hold their locks."""
        os.write(STDERR, f"rank {self.rank}: stacks of all threads:\n".encode())
        faulthandler.dump_traceback(file=STDERR, all_threads=True)
        os.write(STDERR, f"error: {error}\n".encode())
        if self._status is None or stacks is None:
            return
        with suppress(OSError):
            if self.ends_process:
                self._status.failed(error)
        with suppress(OSError, OutputError):
            if self._folder is not None:
                self._folder.check()
            temporary = stacks.with_name(f".{stacks.name}.tmp")
            with temporary.open("w") as file:
                file.write(f"{error}\n\n{time.strftime('%Y-%m-%d %H:%M:%S %z')}, process {os.getpid()}\n\n")
                file.flush()
                faulthandler.dump_traceback(file=file, all_threads=True)
            temporary.replace(stacks)


_current: Watchdog | None = None


@contextmanager
def hang_watchdog(config: Config) -> Iterator[Watchdog]:
    """Run a watchdog from the rendezvous to the end of this process's training.

    If a notebook's kernel trains as a single process, it is not ended: only the stacks are written.
    """
    global _current
    rank, world_size = int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1)
    is_kernel = world_size == 1 and "ipykernel" in sys.modules
    watchdog = Watchdog(
        config.distributed.timeout_seconds, rank=rank, world_size=world_size, ends_process=not is_kernel
    )
    # the rendezvous has its own time-out with a better message
    watchdog.phase = Phase("the rendezvous with the other ranks", timeouts=2.0)
    with watchdog:
        _current = watchdog
        try:
            yield watchdog
        finally:
            _current = None


def heartbeat(phase: str | None = None, *, files: bool = False) -> None:
    """Report progress of the main thread; calls from other threads have no effect.

    Once the watchdog ends the process, this function does not return: anything that the main thread then
    wrote would contradict the recorded end.

    Args:
        phase: What the main thread does now; it follows "no progress for N s in". None keeps the phase.
        files: Whether file activity counts as progress until the next heartbeat: bytes that the main thread
            reads or writes, and growing files in the run's checkpoints and weights.
    """
    watchdog = _current
    if watchdog is None or threading.get_ident() != watchdog.owner:
        return
    if watchdog.is_ending:
        threading.Event().wait()  # waits forever: the watchdog ends the process
    last = watchdog.phase
    watchdog.phase = Phase(phase, files) if phase is not None else Phase(*last)


def report_hangs_to(folder: Any, status: Any) -> None:
    """Make the watchdog, if there is one, write to the run's `RunFolder` and `Status`."""
    if _current is not None:
        _current._folder, _current._status = folder, status


def current_phase() -> str:
    """The phase of the last heartbeat."""
    return _current.phase.name if _current else "the run"


COLLECTIVE_TIMEOUTS = 8
"""A collective's time-out as a multiple of the watchdog's. It is longer so that the watchdog reports a hang
first, and so that ranks can wait for a rank that writes a large file."""

_GLOO = re.compile(
    r"gloo.*(closed by peer|reset by peer|timed out|broken pipe|socket closed|pair closure|connection refused"
    r"|no route to host|network is (unreachable|down)|host is down|connectfullmesh failed)",
    re.IGNORECASE | re.DOTALL,
)
_BUG = re.compile(
    r"enforce fail|ncclInvalid|ncclInternalError|ncclUnhandledCudaError|out of memory|Duplicate GPU"
)


def collective_timeout(config: Config) -> timedelta:
    """Time-out of a collective, for both launch paths."""
    return timedelta(seconds=COLLECTIVE_TIMEOUTS * config.distributed.timeout_seconds)


def peer_failure(error: BaseException, rank: int) -> StuckError | None:
    """The error to raise instead of `error` if another rank's failure caused it, else None.

    Other errors of the process group are bugs and keep their traceback, for example a collective with
    different shapes on different ranks, or wrong use of NCCL.
    """
    if isinstance(error, PretrainError) and not isinstance(error, CheckpointError):
        return None  # the error names its cause; but a failed save may be caused by a lost peer
    cause = next((text for each in _causes(error) if (text := _connection_error(each))), None)
    if cause is None:
        return None
    return StuckError(
        f"rank {rank}: lost the connection to another rank in {current_phase()} ({cause}): that "
        "rank's output has the reason, or its machine or the network is down; start the same command again "
        "to continue"
    )


def _connection_error(error: BaseException) -> str | None:
    """The back-end's message, shortened, if the error is about a connection; else None."""
    text = str(error)
    distributed = torch.distributed
    if not isinstance(error, RuntimeError) or _BUG.search(text):
        return None
    if not (isinstance(error, distributed.DistError) or _GLOO.search(text)):
        return None
    line = re.sub(r"\[\S+\.(cc|cpp|h):\d+\]\s*", "", " ".join(text.split()))
    return line if len(line) <= 160 else line[:159] + "…"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, its cause, the cause of that, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
