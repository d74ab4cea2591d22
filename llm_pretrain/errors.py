"""Errors that users cause and can mend, each with the exit code of its kind.

A message is one line: the field or file, what was expected, what was found, what to do. Everything
else that is raised is a bug of ours and shows its traceback.
"""

from __future__ import annotations


class PretrainError(Exception):
    """Base of all errors that are shown as one line."""

    exit_code = 1
    shared = False
    """Whether every rank raised this same error, so that one of them is enough to print it."""


class ConfigError(PretrainError):
    """Usage or configuration; `problems` lists every one that was found."""

    exit_code = 2
    shared = True

    def __init__(self, *problems: str):
        self.problems = problems
        super().__init__("\n".join(problems))


class DataError(PretrainError):
    """A corpus, tokenizer or token store is missing, broken or does not fit."""

    exit_code = 65


class DivergedError(PretrainError):
    """Training no longer makes progress: too many skipped steps in a row."""

    exit_code = 70


class ResourceError(PretrainError):
    """Out of memory, or a process that hangs."""

    exit_code = 71


class StuckError(ResourceError):
    """A rank hangs, or has lost another one. The message names the rank; any other error says more."""


class OutputError(PretrainError):
    """The run's folder is locked by another run, or not writable."""

    exit_code = 73


class CheckpointError(PretrainError):
    """Reading or writing a checkpoint or weights failed."""

    exit_code = 74


class MismatchError(PretrainError):
    """A checkpoint does not match the configuration."""

    exit_code = 78


EXIT_PREEMPTED = 75
"""Stopped by a signal after a clean save; start again to continue."""
