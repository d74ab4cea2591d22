"""Where the processes of one attempt meet, so that `torchrun --max-restarts N` can go on in place.

Not the restart itself: the launcher starts the processes again, and the newest checkpoint says from where.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from llm_pretrain.training.peers import PATIENCE

SCHEME = "attempt"
distributed: Any = torch.distributed
"""Untyped, because what is documented of it is not all exported in pyright's eyes."""


@cache
def meeting_point() -> str:
    """The `init_method` of both launch paths: what the launcher's environment says, apart for each attempt.

    torchrun's agent keeps one store for all attempts. Without a prefix of its own a restarted process reads
    the addresses that killed ones left there, and on gloo connecting to them is refused
    (pytorch/pytorch#135712).
    """
    distributed.register_rendezvous_handler(SCHEME, _meet)
    return f"{SCHEME}://"


def _meet(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
    """Store, rank and world size of `env://`, with the attempt's prefix before every key."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if "timeout" in options:  # the collectives'; nobody is written for here, and a rank may never come
        options["timeout"] /= PATIENCE
    for store, rank, world_size in distributed.rendezvous("env" + url.removeprefix(SCHEME), **options):
        yield distributed.PrefixStore(f"attempt_{attempt}", store), rank, world_size
