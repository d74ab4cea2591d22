"""Lets loops that are written as loops take their steps in turns with others, in one process.

A loop runs in a thread of its own and stands still between its turns, so that the CPU time of the process
during a turn is the loop's. It knows nothing of what a step is, nor of time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Over(BaseException):
    """Ends a loop from within; no `except Exception` on the way may take it for an error."""


class Turns:
    """A loop that takes a step when it is its turn.

    Args:
        name: For error messages.
        loop: Called in a thread of its own with a function that it has to call after every step, and that
            returns when it is its turn again. Everything in between is the step's, the next batch included.
    """

    def __init__(self, name: str, loop: Callable[[Callable[[], None]], object]):
        self._loop, self._name = loop, name
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._over = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __call__(self) -> None:
        """One turn; the first includes whatever the loop does before its first step.

        Raises:
            RuntimeError: the loop has failed or has come to its end.
        """
        if self._thread.ident is None:
            self._thread.start()
        self._go.release()
        self._done.acquire()
        if not self._thread.is_alive() or self._error is not None:
            raise RuntimeError(f"{self._name}: the loop ended before its time") from self._error

    def close(self) -> None:
        """End the loop where it stands."""
        if self._thread.is_alive():
            self._over = True
            self._go.release()
            self._thread.join()

    def _run(self) -> None:
        self._go.acquire()
        try:
            self._loop(self._step_done)
        except Over:
            return
        except BaseException as error:
            self._error = error
        self._done.release()

    def _step_done(self) -> None:
        self._done.release()
        self._go.acquire()
        if self._over:
            raise Over
