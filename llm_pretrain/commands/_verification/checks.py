"""One check and its outcome: what was looked at, and ok, failed or skipped with the reason.

Knows nothing of what is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from llm_pretrain.errors import ConfigError, PretrainError

_SHOWN = 4
"""Problems of one check that are written out; of the rest, the number."""


@dataclass
class Check:
    """One check.

    Args:
        name: What is checked.
        looked_at: What the verdict rests on; on its way, what has been looked at so far.
        problems: One line each; any makes it failed.
        reason: Why it was skipped, as a whole or in part.
        skipped: Whether nothing at all could be looked at.
    """

    name: str
    looked_at: str = ""
    problems: list[str] = field(default_factory=list)
    reason: str = ""
    skipped: bool = False

    @property
    def result(self) -> str:
        """`ok`, `failed` or `skipped`."""
        return "failed" if self.problems else "skipped" if self.skipped else "ok"

    def fail(self, problem: str) -> None:
        """Note one problem, in one line."""
        self.problems.append(" ".join(problem.split()))

    def skip(self, reason: str) -> None:
        """Say why nothing was looked at."""
        self.skipped, self.reason = True, reason

    def lines(self, width: int) -> list[str]:
        """For people: a line, and one more for each problem."""
        parts = [self.looked_at, f"skipped: {self.reason}" if self.reason else ""]
        head = f"{self.result:<7}  {self.name:<{width}}  {'; '.join(part for part in parts if part)}".rstrip()
        more = len(self.problems) - _SHOWN
        shown = self.problems[:_SHOWN] + ([f"and {more} more"] if more > 0 else [])
        return [head, *(f"         {'':<{width}}  {line}" for line in shown)]

    def as_json(self) -> dict[str, Any]:
        """For programs; every problem stands in it."""
        return {
            "name": self.name,
            "result": self.result,
            "looked_at": self.looked_at,
            "reason": self.reason or None,
            "problems": self.problems,
        }


class Checks:
    """All checks in their order; each is handed to `show` when it is done, and so is each note."""

    def __init__(self, show: Callable[[Check | str], None] = lambda _: None):
        self.done: list[Check] = []
        self.notes: list[str] = []
        self._show = show

    @property
    def ok(self) -> bool:
        """Whether none failed."""
        return not any(check.problems for check in self.done)

    def note(self, text: str) -> None:
        """Say what a reader of the outcomes should know; no verdict."""
        self.notes.append(text)
        self._show(text)

    @contextmanager
    def check(self, name: str) -> Iterator[Check]:
        """A check; a file that cannot be used, met on the way, fails it."""
        check = Check(name)
        try:
            yield check
        except ConfigError as error:
            for problem in error.problems:
                check.fail(problem)
        except PretrainError as error:
            check.fail(str(error))
        except OSError as error:
            check.fail(f"{error.filename or name}: cannot be read: {error.strerror or error}")
        self.done.append(check)
        self._show(check)


def spans(numbers: list[int], most: int = 5) -> str:
    """Ascending numbers in words: `3, 7-9`; the first few spans of many."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in found[:most]]
    return ", ".join(shown) + (", …" if len(found) > most else "")
