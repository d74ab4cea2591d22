"""Signals that ask a run to stop: finish the step, save, leave with exit code 75."""

from __future__ import annotations

import signal
import threading
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """Remembers the first stop signal; installed for the duration of a `with` block.

    Outside the main thread (a notebook's, say) Python cannot install handlers, and none are.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or signal.Signals(number)

    @property
    def requested(self) -> bool:
        """Whether this process was asked to stop."""
        return self.signal is not None
