"""Which errors say that another rank is gone, and the one line that they become.

Everything else that the process group raises is a bug of ours and keeps its traceback: a collective that
ranks call with different shapes, a mistake in NCCL's use.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta

import torch

from llm_pretrain.config import Config
from llm_pretrain.errors import CheckpointError, PretrainError, StuckError
from llm_pretrain.training.watchdog import doing_now

PATIENCE = 8
"""Time-outs of the watchdog that a collective waits: whatever hangs, the watchdog says so first, and a rank
that writes a large file keeps the others waiting for as long as it gets on."""

_GLOO = re.compile(
    r"gloo.*(closed by peer|reset by peer|timed out|broken pipe|socket closed|pair closure|connection refused"
    r"|no route to host|network is (unreachable|down)|host is down|connectfullmesh failed)",
    re.IGNORECASE | re.DOTALL,
)
_OUR_BUG = re.compile(
    r"enforce fail|ncclInvalid|ncclInternalError|ncclUnhandledCudaError|out of memory|Duplicate GPU"
)


def collective_timeout(config: Config) -> timedelta:
    """How long a collective of either launch path waits."""
    return timedelta(seconds=PATIENCE * config.distributed.timeout_seconds)


def lost_contact(error: BaseException, rank: int) -> StuckError | None:
    """What to say instead of `error` where another rank's end is behind it; None where it is not."""
    if isinstance(error, PretrainError) and not isinstance(error, CheckpointError):
        return None
    cause = next((text for each in _behind(error) if (text := _contact_lost(each))), None)
    if cause is None:
        return None
    return StuckError(
        f"rank {rank}: lost contact with another rank in {doing_now()} ({cause}): that one's own output says "
        "why, or its machine or the network is gone; start the same command again to continue"
    )


def _contact_lost(error: BaseException) -> str | None:
    """The back-end's words, shortened, where they are about a connection; by class where there is one."""
    text = str(error)
    distributed = torch.distributed
    if not isinstance(error, RuntimeError) or _OUR_BUG.search(text):
        return None
    if not (isinstance(error, distributed.DistError) or _GLOO.search(text)):
        return None
    line = re.sub(r"\[\S+\.(cc|cpp|h):\d+\]\s*", "", " ".join(text.split()))
    return line if len(line) <= 160 else line[:159] + "…"


def _behind(error: BaseException) -> Iterator[BaseException]:
    """The error and what it came from; torch.distributed.checkpoint keeps that by rank in `failures`."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        each = waiting.pop(0)
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        inside = [failure for failure, _ in getattr(each, "failures", {}).values()]
        waiting += [cause for cause in (*inside, each.__cause__, each.__context__) if cause is not None]
