"""`Check`, one check with its result in words, and `Checks`, the list of all checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llm_pretrain.errors import ConfigError, PretrainError
from llm_pretrain.text import reason_of

_SHOWN, _WIDTH = 4, 26
"""How many problems of one check are printed (the rest are counted); width of a check's name."""


@dataclass
class Check:
    """One check.

    Args:
        name: What is checked.
        looked_at: What has been checked so far, in words.
        problems: One line each; a check with problems has failed.
        reason: Why the check, or a part of it, was skipped.
        skipped: Whether the whole check was skipped.
        folder: The checked folder, if the run may delete it meanwhile; if it does, the check is skipped.
    """

    name: str
    looked_at: str = ""
    problems: list[str] = field(default_factory=list)
    reason: str = ""
    skipped: bool = False
    folder: Path | None = None

    @property
    def result(self) -> str:
        """`ok`, `failed` or `skipped`."""
        return "failed" if self.problems else "skipped" if self.skipped else "ok"

    def fail(self, problem: str) -> None:
        """Add a problem, on one line."""
        self.problems.append(" ".join(problem.split()))

    def skip(self, reason: str) -> None:
        """Skip the whole check."""
        self.skipped, self.reason = True, reason

    def lines(self) -> list[str]:
        """The printed lines: one for the check, and one for each problem."""
        parts = [self.looked_at, f"skipped: {self.reason}" if self.reason else ""]
        head = (
            f"{self.result:<7}  {self.name:<{_WIDTH}}  {'; '.join(part for part in parts if part)}".rstrip()
        )
        more = len(self.problems) - _SHOWN
        shown = self.problems[:_SHOWN] + ([f"and {more} more"] if more > 0 else [])
        return [head, *(f"         {'':<{_WIDTH}}  {line}" for line in shown)]

    def as_json(self) -> dict[str, Any]:
        """The result for --json, with all problems."""
        return {
            "name": self.name,
            "result": self.result,
            "looked_at": self.looked_at,
            "reason": self.reason or None,
            "problems": self.problems,
        }


class Checks:
    """All checks in order; each check is passed to `show` when it is done."""

    def __init__(self, show: Callable[[Check], None] = lambda _: None):
        self.done: list[Check] = []
        self._show = show

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return not any(check.problems for check in self.done)

    @contextmanager
    def check(self, name: str) -> Iterator[Check]:
        """A block that is one check; the check fails if the block raises a PretrainError or an OSError."""
        check = Check(name)
        try:
            yield check
        except ConfigError as error:
            for problem in error.problems:
                check.fail(problem)
        except PretrainError as error:
            check.fail(str(error))
        except OSError as error:
            check.fail(f"{error.filename or name}: cannot be read: {reason_of(error)}")
        if check.folder is not None and not check.folder.exists():
            check.problems.clear()
            check.skip("the run has deleted or replaced it meanwhile")
        self.done.append(check)
        self._show(check)

    def run(self, name: str, function: Callable[..., None], *arguments: Any) -> Check:
        """Run `function(check, *arguments)` as one check, and return the check."""
        with self.check(name) as check:
            function(check, *arguments)
        return check

    def skip(self, name: str, reason: str) -> None:
        """Add a check that is skipped."""
        self.run(name, Check.skip, reason)
