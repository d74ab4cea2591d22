"""Signals that ask a run to stop: finish the step, save, leave with exit code 75.

Not what the loop does about it, and not the time before a run has begun, when a signal just ends the process.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1)
"""SIGHUP is a lost terminal's, which torchrun hands on."""
ONE_STOP_SECONDS = 1.0
"""Signals within this time are one request: launchers hand on what the terminal has sent already."""


class StopRequest:
    """Remembers the first stop signal; installed for the duration of a `with` block.

    The first is answered by a clean save. Later ones change nothing about that, since launchers and
    schedulers repeat themselves; only after a Ctrl-C that came `ONE_STOP_SECONDS` later does one more end the
    process at once, as `kill -9` does. Outside the main thread (a notebook's, say) Python cannot install
    handlers, and none are. A SIGHUP that is ignored (nohup's) stays ignored.

    Args:
        says: Whether to tell on standard error what a signal leads to; one process of a run does.
    """

    def __init__(self, *, says: bool = True) -> None:
        self.signal: signal.Signals | None = None
        self._says = says
        self._latest = 0.0
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned

    def _handle(self, number: int, frame: FrameType | None) -> None:
        received, now = signal.Signals(number), time.monotonic()
        if self.signal is None:
            self.signal = received
            self._say(f"{received.name}: the run stops after this step, with all of it saved")
        elif received is signal.SIGINT and now - self._latest >= ONE_STOP_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            self._say(
                "SIGINT again: the run still stops after this step, with all of it saved; one more ends it "
                "at once and loses the steps since the last checkpoint"
            )
        self._latest = now

    def _say(self, text: str) -> None:
        """Past Python's buffers, which the interrupted code may be writing to."""
        if self._says:
            try:
                os.write(2, f"{text}\n".encode())
            except OSError:  # a closed terminal; the run stops all the same
                self._says = False

    @property
    def requested(self) -> bool:
        """Whether this process was asked to stop."""
        return self.signal is not None


def ignore_stop_signals() -> None:
    """For a process that has nothing left to do but to end with its exit code."""
    if threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
