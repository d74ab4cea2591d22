"""Errors that a user can correct; each kind has an exit code.

A message is one line: the field or file, what was expected, what was found, what to do. Any other exception
is a bug and prints its traceback.
"""

from __future__ import annotations

from typing import Self

MAX_LINE = 1000
"""Largest number of characters in a printed line, since a damaged file may have names of any length."""


def printable(text: object) -> str:
    """A text in a form that is safe to print: one line, without control over the terminal.

    Control characters and bytes that are no text are escaped: names, paths and the content of files may have
    any. If the text is longer than `MAX_LINE`, its middle is left out.
    """
    line = str(text)
    if len(line) > MAX_LINE:
        line = f"{line[: MAX_LINE // 2]} ... {line[-MAX_LINE // 3 :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


class PretrainError(Exception):
    """Base class of all errors that are shown as one line."""

    exit_code = 1
    shared = False
    """Whether every rank raised this error, so that only rank 0 prints it."""

    def of_all_ranks(self) -> Self:
        """Mark this error as one that every rank raises; returns it."""
        self.shared = True
        return self

    def lines(self) -> list[str]:
        """The printed lines: one, or for a ConfigError one per problem."""
        return [printable(self)]


class ConfigError(PretrainError):
    """Wrong usage or configuration; `problems` lists all problems that were found."""

    exit_code = 2
    shared = True

    def __init__(self, *problems: str):
        self.problems = problems
        super().__init__("\n".join(problems))

    def lines(self) -> list[str]:
        """A line for each problem."""
        return [printable(problem) for problem in self.problems]


class DataError(PretrainError):
    """A corpus, tokenizer or token store is missing, broken or does not fit."""

    exit_code = 65


class DivergedError(PretrainError):
    """Training cannot go on: skipped steps in a row, state that is not finite, or ranks that differ."""

    exit_code = 70


class ResourceError(PretrainError):
    """Out of memory, or a process that hangs."""

    exit_code = 71


class StuckError(ResourceError):
    """A rank hangs, or lost the connection to another rank; any other error of the run takes precedence."""


class OutputError(PretrainError):
    """The run's folder is locked by another run, or not writable."""

    exit_code = 73


class CheckpointError(PretrainError):
    """Reading or writing a checkpoint or weights failed."""

    exit_code = 74


class CorruptionError(PretrainError):
    """The hardware computed another result than before, or ranks differ in values that should be equal."""

    exit_code = 76


class MismatchError(PretrainError):
    """A checkpoint does not match the configuration."""

    exit_code = 78


EXIT_PREEMPTED = 75
"""Exit code of a run that a signal stopped, after a complete save; start the command again to continue."""
