"""Where the processes of one attempt meet, so that `torchrun --max-restarts N` can go on in place.

Not the restart itself: the launcher starts the processes again, and the newest checkpoint says from where.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

SCHEME = "attempt"


@cache
def meeting_point() -> str:
    """The `init_method` of both launch paths: what the launcher's environment says, apart for each attempt.

    torchrun's agent keeps one store for all attempts. Without a prefix of its own a restarted process reads
    the addresses that killed ones left there, and on gloo connecting to them is refused
    (pytorch/pytorch#135712).
    """
    torch.distributed.register_rendezvous_handler(SCHEME, _meet)
    return f"{SCHEME}://"


def _meet(url: str, **options: Any) -> Iterator[tuple[torch.distributed.Store, int, int]]:
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    for store, rank, world_size in torch.distributed.rendezvous("env" + url.removeprefix(SCHEME), **options):
        yield torch.distributed.PrefixStore(f"attempt_{attempt}", store), rank, world_size
