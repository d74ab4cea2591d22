"""Agreement between ranks on what went wrong, so that all of them stop with one message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from llm_pretrain.config import Config
from llm_pretrain.errors import ConfigError, OutputError, PretrainError
from llm_pretrain.training.engine import Engine

T = TypeVar("T")


def on_any_rank(engine: Engine, *flags: bool) -> list[bool]:
    """Of each flag, whether it is up on any rank: the same on all; collective where there are others."""
    return [count > 0 for count in engine.sum_integers(flags)]


def on_every_rank(
    engine: Engine, action: Callable[[], T], gather_objects: Callable[[Any], list[Any]] | None = None
) -> T:
    """Run `action` on every rank; if it fails on any, every rank raises the first failure.

    Args:
        engine: Its ranks.
        action: What each of them does.
        gather_objects: Another channel between them, for a thread beside the training.

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
    first = next(
        (each for each in (gather_objects or engine.gather_objects)(failure) if each is not None), None
    )
    if first is not None:
        first.shared = True
        raise first
    return value  # type: ignore[return-value]  # no failure anywhere, so action() returned a T


def on_first_rank(
    engine: Engine, action: Callable[[], T], gather_objects: Callable[[Any], list[Any]] | None = None
) -> T | None:
    """Run `action` on rank 0 alone; every rank raises its failure. Other ranks get None."""
    return on_every_rank(engine, action if engine.rank == 0 else lambda: None, gather_objects)


def check_precision(engine: Engine, config: Config) -> None:
    """Stop where ranks compute in different precisions, as when `auto` meets machines that are not alike.

    Raises:
        ConfigError: with every rank's precision that is not the first one's; marked `shared`.
    """
    values = engine.gather_objects(config.training.precision)
    others = [f"rank {rank} {value}" for rank, value in enumerate(values) if value != values[0]]
    if others:
        error = ConfigError(
            f"training.precision: expected one on all ranks, found rank 0 {values[0]}, {', '.join(others)}; "
            "on machines that are not alike set bf16 or fp32 instead of auto"
        )
        error.shared = True
        raise error
