"""The watchdog: ends a process that shows no sign of life, and leaves behind where it stood.

A hang has no error of its own: a rank waits for another that was stopped, a data worker or a disk that does
not answer. The main thread says by `beat` that it gets on; a thread of this module listens. It judges
nothing but silence: a peer that is gone is `peers.py`'s, a save that fails the checkpoints' own.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from llm_pretrain.config import Config
from llm_pretrain.errors import StuckError
from llm_pretrain.training.run_folder import RunFolder
from llm_pretrain.training.status import Status

LOOKS_PER_TIMEOUT = 20
LONGEST_PAUSE_SECONDS = 5.0
"""Between two looks at the main thread."""

GRACE_SECONDS = 30.0
"""How much longer than the time-out the watchdog's own thread may be silent, as when the main one never
gives Python's lock back; faulthandler, which needs no lock, ends the process then."""

REPORT_SECONDS = 10.0
"""For stacks, status and files, whose disk may be what hangs; the process ends in any case."""

LINGER_SECONDS = 3.0
"""Between the report and the end: other ranks that wait for the same one leave their stacks too, before
they see that this one is gone."""

STDERR = 2


class Phase(NamedTuple):
    """What the main thread is at; a new one, equal or not, is a sign of life."""

    doing: str
    files: bool = False
    timeouts: float = 1.0


class Watchdog:
    """Watches the thread that makes it; use as a context manager.

    Args:
        timeout_seconds: Of silence, after which the process is ended.
        rank, world_size: This process among the run's.
        ends_process: Otherwise it leaves the stacks once, and the process goes on.
    """

    def __init__(self, timeout_seconds: float, *, rank: int, world_size: int, ends_process: bool = True):
        self.timeout_seconds, self.rank, self.world_size = timeout_seconds, rank, world_size
        self.ends_process = ends_process
        self.phase = Phase("start")
        self.owner = threading.get_ident()
        self._own_files = Path(f"/proc/self/task/{threading.get_native_id()}")
        self._folder: RunFolder | None = None
        self._status: Status | None = None
        self._pause = min(timeout_seconds / LOOKS_PER_TIMEOUT, LONGEST_PAUSE_SECONDS)
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

    def report_to(self, folder: RunFolder, status: Status) -> None:
        """From now on the run's folder is this run's: stacks and status are written there."""
        self._folder, self._status = folder, status

    def _watch(self) -> None:
        """Count silence in looks, not by the clock: while a whole process is stopped, nobody is silent."""
        seen, silent_seconds, activity, before = self.phase, 0.0, "", time.monotonic()
        while not self._over.wait(self._pause):
            self._arm_fallback()
            now, phase = time.monotonic(), self.phase
            silent_seconds += min(now - before, 2 * self._pause)
            before = now
            if phase is not seen:
                seen, silent_seconds, activity = phase, 0.0, ""
            if phase.files and (found := self._activity()) != activity:
                activity, silent_seconds = found, 0.0
            if silent_seconds >= phase.timeouts * self.timeout_seconds:
                self._end(phase, silent_seconds)
                return

    def _arm_fallback(self) -> None:
        if self.ends_process:
            seconds = self._longest() + GRACE_SECONDS
            faulthandler.dump_traceback_later(seconds, exit=True, file=STDERR)

    def _longest(self) -> float:
        return self.phase.timeouts * self.timeout_seconds

    def _activity(self) -> str:
        """What changes while files are read or written, by the main thread here or by any rank's save."""
        found: list[object] = []
        with suppress(OSError):
            found += (self._own_files / "io").read_text().splitlines()[:2]  # rchar, wchar
        with suppress(OSError, IndexError):  # major faults: a mapped file is read without a call
            found.append((self._own_files / "stat").read_text().rpartition(")")[2].split()[9])
        roots = [self._folder.checkpoints, self._folder.weights] if self._folder else []
        for root in roots:
            for path in sorted(root.rglob("*")):
                with suppress(OSError):
                    facts = path.stat()
                    found.append((str(path), facts.st_size, facts.st_mtime_ns))
        return repr(found)

    def _end(self, phase: Phase, silent_seconds: float) -> None:
        stacks = self._folder.stacks(self.rank) if self._folder else None
        error = StuckError(
            f"rank {self.rank}: no sign of life for {silent_seconds:.0f} s in {phase.doing} "
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
        with suppress(Exception):  # a data worker that hangs would outlive its parent
            for child in multiprocessing.active_children():
                child.kill()
        os._exit(error.exit_code)

    def _report(self, error: StuckError, stacks: Path | None) -> None:
        """To the terminal first: the run's folder may be what hangs. No stream of Python's is touched,
        whose lock the main thread may hold."""
        os.write(STDERR, f"rank {self.rank}: stacks of all threads:\n".encode())
        faulthandler.dump_traceback(file=STDERR, all_threads=True)
        os.write(STDERR, f"error: {error}\n".encode())
        if self._status is None or stacks is None:
            return
        with suppress(OSError):
            if self.ends_process:
                self._status.failed(error)
        with suppress(OSError):
            temporary = stacks.with_name(f".{stacks.name}.tmp")
            with temporary.open("w") as file:
                file.write(f"{error}\n\n{time.strftime('%Y-%m-%d %H:%M:%S %z')}, process {os.getpid()}\n\n")
                file.flush()
                faulthandler.dump_traceback(file=file, all_threads=True)
            temporary.replace(stacks)


_current: Watchdog | None = None


@contextmanager
def watching(config: Config) -> Iterator[Watchdog]:
    """Watch this process's training, from its meeting with the other ranks to its end.

    A notebook's kernel that trains alone is never ended: it leaves its stacks, and its user interrupts it.
    """
    global _current
    rank, world_size = (int(os.environ.get(name) or default) for name, default in _PLACE)
    is_kernel = world_size == 1 and "ipykernel" in sys.modules
    watchdog = Watchdog(
        config.distributed.timeout_seconds, rank=rank, world_size=world_size, ends_process=not is_kernel
    )
    # the meeting has a time-out of its own, which says more
    watchdog.phase = Phase("meeting the other ranks", timeouts=2.0)
    with watchdog:
        _current = watchdog
        try:
            yield watchdog
        finally:
            _current = None


_PLACE = (("RANK", "0"), ("WORLD_SIZE", "1"))


def beat(doing: str | None = None, *, files: bool = False) -> None:
    """A sign of life: the main thread gets on, and is now `doing` this (None: the same as before).

    From any other thread, a background save's say, it means nothing: that one lives while the main one hangs.

    Args:
        doing: Completes "no sign of life in …", with the step.
        files: Until the next beat, bytes that the main thread reads or writes and files that grow in the
            run's checkpoints and weights, whichever rank writes them, are signs of life too.
    """
    watchdog = _current
    if watchdog is None or threading.get_ident() != watchdog.owner:
        return
    last = watchdog.phase
    watchdog.phase = Phase(doing, files) if doing is not None else Phase(*last)


def report_hangs_to(folder: RunFolder, status: Status) -> None:
    """Where the watchdog, if there is one, writes stacks and status."""
    if _current is not None:
        _current.report_to(folder, status)


def doing_now() -> str:
    """What the main thread was last known to do."""
    return _current.phase.doing if _current else "the run"
