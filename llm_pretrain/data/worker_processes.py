"""Processes that assemble batches beside the training: their start, their signals, their end.

Knows nothing of batches.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing import connection, forkserver, resource_tracker

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

_PRELOADED = (
    "torch",
    "accelerate",
    "torch.distributed.fsdp",
    "llm_pretrain.training",
    "llm_pretrain.data.batches",
)
"""What the scripts import. A worker imports its script, and would take seconds for it; the server does that
once, beside the training process, which has built its model by then and goes on to wrap or restore it."""


def start_fork_server() -> None:
    """Start what workers are forked from, once, with stop signals blocked; what it forks inherits that.

    torchrun signals a training process's whole group. Python's server would die of it, and its workers
    with it, before the training process has finished its step and saved.
    """
    multiprocessing.set_forkserver_preload([name for name in _PRELOADED if name in sys.modules])
    for ensure_running in (resource_tracker.ensure_running, forkserver.ensure_running):
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        try:
            ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_worker(_: int) -> None:
    """Signals are the training process's to handle: it finishes the step, and needs its batches for that."""
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()


def end_workers() -> None:
    """At exit Python sends SIGTERM to its daemons and waits for them; ours would never hear it."""
    for worker in multiprocessing.active_children():
        if worker.daemon:
            worker.kill()


def _die_with_parent() -> None:
    """Ends this worker when the training process is gone; torch would watch the fork server instead."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
