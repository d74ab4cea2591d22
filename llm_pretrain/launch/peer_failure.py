"""Recognises errors that the failure of another rank caused, and turns them into one line.

Other errors of the process group are bugs and keep their traceback, for example a collective with different
shapes on different ranks, or wrong use of NCCL.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta

import torch

from llm_pretrain.config.tree import Config
from llm_pretrain.errors import CheckpointError, PretrainError, StuckError
from llm_pretrain.launch.watchdog import current_phase

COLLECTIVE_TIMEOUTS = 8
"""A collective's time-out as a multiple of the watchdog's. It is longer so that the watchdog reports a hang
first, and so that ranks can wait for a rank that writes a large file."""

_GLOO = re.compile(
    r"gloo.*(closed by peer|reset by peer|timed out|broken pipe|socket closed|pair closure|connection refused"
    r"|no route to host|network is (unreachable|down)|host is down|connectfullmesh failed)",
    re.IGNORECASE | re.DOTALL,
)
_BUG = re.compile(
    r"enforce fail|ncclInvalid|ncclInternalError|ncclUnhandledCudaError|out of memory|Duplicate GPU"
)


def collective_timeout(config: Config) -> timedelta:
    """Time-out of a collective, for both launch paths."""
    return timedelta(seconds=COLLECTIVE_TIMEOUTS * config.distributed.timeout_seconds)


def peer_failure(error: BaseException, rank: int) -> StuckError | None:
    """The error to raise instead of `error` if another rank's failure caused it, else None."""
    if isinstance(error, PretrainError) and not isinstance(error, CheckpointError):
        return None  # the error names its cause; but a failed save may be caused by a lost peer
    cause = next((text for each in _causes(error) if (text := _connection_error(each))), None)
    if cause is None:
        return None
    return StuckError(
        f"rank {rank}: lost the connection to another rank in {current_phase()} ({cause}): that "
        "rank's output has the reason, or its machine or the network is down; start the same command again "
        "to continue"
    )


def _connection_error(error: BaseException) -> str | None:
    """The back-end's message, shortened, if the error is about a connection; else None."""
    text = str(error)
    distributed = torch.distributed
    if not isinstance(error, RuntimeError) or _BUG.search(text):
        return None
    if not (isinstance(error, distributed.DistError) or _GLOO.search(text)):
        return None
    line = re.sub(r"\[\S+\.(cc|cpp|h):\d+\]\s*", "", " ".join(text.split()))
    return line if len(line) <= 160 else line[:159] + "…"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, its cause, the cause of that, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
