"""Agreement between ranks on what went wrong, so that all of them stop with one message."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from llm_pretrain.errors import OutputError, PretrainError
from llm_pretrain.training.engine import Engine

T = TypeVar("T")


def on_every_rank(engine: Engine, action: Callable[[], T]) -> T:
    """Run `action` on every rank; if it fails on any, every rank raises the first failure.

    Raises:
        PretrainError: the failure of the lowest failing rank, marked `shared` so that it is printed once.
    """
    value: T | None = None
    failure: PretrainError | None = None
    try:
        value = action()
    except PretrainError as error:
        failure = error
    except OSError as error:
        failure = OutputError(f"{error.filename or 'file system'}: {error.strerror or error}")
    first = next((each for each in engine.gather_objects(failure) if each is not None), None)
    if first is not None:
        first.shared = True
        raise first
    return value  # type: ignore[return-value]  # no failure anywhere, so action() returned a T


def on_first_rank(engine: Engine, action: Callable[[], T]) -> T | None:
    """Run `action` on rank 0 alone; every rank raises its failure. Other ranks get None."""
    return on_every_rank(engine, action if engine.rank == 0 else lambda: None)
