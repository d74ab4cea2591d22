"""Collectives of tensors and of actions; if an action fails on one rank, every rank of the group raises."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from llm_pretrain.config.tree import Config
from llm_pretrain.errors import CheckpointError, ConfigError, OutputError, PretrainError
from llm_pretrain.launch.watchdog import collective_timeout, peer_failure
from llm_pretrain.text import reason_of, type_and_reason

T = TypeVar("T")
distributed: Any = torch.distributed
"""Untyped: pyright does not see all names that torch documents as exported."""


class Ranks(Protocol):
    """The ranks that compute or act together: an `Engine`, a single process, a group in the background."""

    rank: int
    world_size: int
    device: torch.device

    def reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, on the tensor's own device; the tensor itself if there is one rank."""
        ...

    def sum_integers(self, values: Sequence[int]) -> list[int]:
        """Sums over ranks of integers on the host, without the GPU."""
        ...

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank; also a barrier."""
        ...


class OneRank:
    """A single process, without a process group."""

    rank = 0
    world_size = 1

    def __init__(self, device: torch.device = torch.device("cpu")):  # noqa: B008 (it is immutable)
        self.device = device

    def reduce_sum(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor

    def sum_integers(self, values: Sequence[int]) -> list[int]:
        """The values themselves."""
        return list(values)

    def gather_objects(self, value: Any) -> list[Any]:
        """The value alone."""
        return [value]


ONE_RANK = OneRank()


class BackgroundGroup:
    """A second Gloo process group over all ranks, for the collectives of one background thread at a time."""

    def __init__(self, timeout: timedelta):
        self._group = distributed.new_group(backend="gloo", timeout=timeout)
        self.rank: int = distributed.get_rank(self._group)
        self.world_size: int = distributed.get_world_size(self._group)
        self.device = torch.device("cpu")

    def reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks of a tensor on the CPU."""
        total = tensor.clone()
        distributed.all_reduce(total, group=self._group)
        return total

    def sum_integers(self, values: Sequence[int]) -> list[int]:
        """Sums over ranks of integers."""
        return self.reduce_sum(torch.tensor(values, dtype=torch.int64)).tolist()

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank; also a barrier."""
        gathered = [None] * self.world_size
        distributed.all_gather_object(gathered, value, group=self._group)
        return gathered

    def close(self) -> None:
        """Destroy the group: after every rank's thread has ended, before the default group is destroyed."""
        distributed.destroy_process_group(self._group)


def open_background_group(config: Config, world_size: int) -> BackgroundGroup | None:
    """The process group of background saves; None for one process or `checkpoint.async_save: false`."""
    if world_size == 1 or not config.checkpoint.async_save:
        return None
    return BackgroundGroup(collective_timeout(config))


def any_rank(ranks: Ranks, *flags: bool) -> list[bool]:
    """Whether each flag is set on any rank; the same on all ranks (collective)."""
    return [count > 0 for count in ranks.sum_integers(flags)]


def run_on_all_ranks(ranks: Ranks, action: Callable[[], T], doing: str | None = None) -> T:
    """Run `action` on every rank and return this rank's result; one rank's failure is raised on every rank.

    Args:
        ranks: The ranks that run it.
        action: What each rank runs.
        doing: What the action does, for error messages. With it an OSError becomes a CheckpointError that
            names the action and the rank; without it, an OutputError.

    Raises:
        PretrainError: the error of the lowest failing rank, marked `shared`, so that it is printed once. A
            rank where `action` raised any other exception raises that exception itself, with its traceback.
    """
    results: list[T] = []
    gather_results(ranks, lambda: results.append(action()), doing)
    return results[0]


def run_on_rank0(ranks: Ranks, action: Callable[[], T], doing: str | None = None) -> T:
    """Run `action` on rank 0; every rank returns its (pickled) result, or raises its failure."""
    return gather_results(ranks, lambda: action() if ranks.rank == 0 else None, doing)[0]  # type: ignore[return-value]  # rank 0's result is a T


def gather_results(ranks: Ranks, action: Callable[[], T], doing: str | None = None) -> list[T]:
    """`run_on_all_ranks`, but the results of all ranks are returned, in rank order, on every rank."""
    value: T | None = None
    failure: PretrainError | None = None
    bug: Exception | None = None
    failed = f"{doing} failed on rank {ranks.rank}" if doing else f"rank {ranks.rank} failed"
    try:
        value = action()
    except PretrainError as error:
        failure = error
    except OSError as error:
        if doing:
            failure = CheckpointError(f"{failed}: {one_line(error)}")
        else:
            failure = OutputError(f"{error.filename or 'file system'}: {reason_of(error)}")
    except Exception as error:
        if peer_failure(error, ranks.rank):
            raise  # the group is broken: another collective would wait until its timeout
        bug = error
        # Not a CheckpointError: training continues after some failed saves, but not after a bug.
        failure = PretrainError(f"{failed}: {one_line(error)}")
    gathered = ranks.gather_objects((value, failure))
    if bug is not None:
        raise bug
    for _, error in gathered:
        if error is not None:
            error.shared = True
            raise error
    return [value for value, _ in gathered]


def one_line(error: BaseException) -> str:
    """The error's type and text on one line; of an OSError the text."""
    if isinstance(error, OSError):
        return " ".join(str(error).split())
    return type_and_reason(error)


def check_same(
    ranks: Ranks, facts: Mapping[str, str], error: type[PretrainError] = ConfigError, *, limit: int = 8
) -> None:
    """Stop if `facts` differ between ranks; collective.

    Digests are gathered, and if they differ the facts too. The engine's `gather_objects` is not used: ranks
    may have been started with different scripts, whose engines gather in different formats.

    Args:
        ranks: The ranks that compare.
        facts: Name, as the message shows it -> value as text.
        error: Type of the error, raised on every rank with the same lines. It is not marked `shared`, so that
            every rank prints it: the machines may have different terminals.
        limit: Most differences that the message names.

    Raises:
        PretrainError: of type `error`, naming the differences with their values and ranks.
    """
    if ranks.world_size == 1:
        return
    if len(set(_gather(_digest(facts), ranks.world_size))) == 1:
        return
    everywhere = _gather(dict(facts), ranks.world_size)
    names = dict.fromkeys(name for each in everywhere for name in each)
    lines = [_difference(name, [each.get(name, "none") for each in everywhere]) for name in names]
    lines = [line for line in lines if line]
    if len(lines) > limit:
        lines[limit - 1] += f" (and {len(lines) - limit} more differences)"
    mismatch = error(*lines[:limit])
    mismatch.shared = False
    raise mismatch


def _digest(facts: Mapping[str, str]) -> str:
    return hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()


def _gather(value: T, world_size: int) -> list[T]:
    """Every rank's value, by the default process group."""
    gathered = [value] * world_size
    distributed.all_gather_object(gathered, value)
    return gathered


def _difference(name: str, values: Sequence[str]) -> str | None:
    """One line about a fact with each value and its ranks; None if all ranks have the same value."""
    if len(set(values)) == 1:
        return None
    found = []
    for value in dict.fromkeys(values):
        ranks = [str(rank) for rank, each in enumerate(values) if each == value]
        shown = ", ".join(ranks[:4]) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
        found.append(f"{value:.200} on rank{'s' * (len(ranks) > 1)} {shown}")
    advice = "start all ranks with the same script, settings, data and installation"
    if name == "training.precision":
        advice = "on machines with different hardware set bf16 or fp32 instead of auto"
    return f"{name}: expected the same on all ranks, found {'; '.join(found)}; {advice}"


def all_gather(own: Tensor, group: Any) -> Tensor:
    """Gather [n, ...] of each of P ranks to [P·n, ...], in rank order; without gradient."""
    gathered = own.new_empty(distributed.get_world_size(group) * len(own), *own.shape[1:])
    # torch 2.13 has the first name, and there the second name warns
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    gather(gathered, own.contiguous(), group=group)
    return gathered


def reduce_scatter(parts: Tensor, group: Any) -> Tensor:
    """Sum [P·n, ...] over P ranks, and return this rank's [n, ...] of the sum; without gradient."""
    own = parts.new_empty(len(parts) // distributed.get_world_size(group), *parts.shape[1:])
    reduce = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
    reduce(own, parts.contiguous(), group=group)
    return own
