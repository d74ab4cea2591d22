"""The processes that assemble batches: their server, signals, end and errors."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path

from llm_pretrain.config.tree import Config
from llm_pretrain.errors import PretrainError, ResourceError

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_PRELOADED = (
    "torch",
    "accelerate",
    "torch.distributed.fsdp",
    "llm_pretrain.training",
    "llm_pretrain.data.loader.batches",
)
"""Modules the fork server imports once, while the training process wraps or restores its model. A worker
imports the training script, which would take seconds in every worker."""


def start_fork_server() -> None:
    """Starts the fork server with stop signals blocked; the workers inherit the blocked signals.

    torchrun signals the whole process group. Without the block, the server and its workers would end before
    the training process has finished its step and saved a checkpoint.
    """
    multiprocessing.set_forkserver_preload([name for name in _PRELOADED if name in sys.modules])
    for ensure_running in (resource_tracker.ensure_running, forkserver.ensure_running):
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        try:
            ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_worker(_: int) -> None:
    """Ignores stop signals: the training process handles them, and needs batches to finish its step."""
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def end_workers() -> None:
    """Kills the workers at exit; Python would send SIGTERM, which they ignore, and then wait for them."""
    for worker in multiprocessing.active_children():
        if worker.daemon:
            worker.kill()


def _exit_with_parent() -> None:
    """Ends this worker when the training process ends; torch checks for its parent, the fork server."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


_BATCHES_PER_WORKER = 3
"""In shared memory at a time: two that wait, and the one that is received."""
_BYTES_PER_TOKEN = 40
"""Of the tensors of a `Batch`."""


def shared_memory_problem(config: Config, ranks: int) -> str | None:
    """Why /dev/shm cannot hold the batches of the workers of `ranks` processes, or None if it can."""
    training, workers, folder = config.training, config.data.num_workers, Path("/dev/shm")
    workers = 2 if workers is None else workers
    if not workers or not folder.is_dir():
        return None
    needed = ranks * workers * _BATCHES_PER_WORKER * _BYTES_PER_TOKEN
    needed *= training.micro_batch_size * training.sequence_length
    free = shutil.disk_usage(folder).free
    if needed <= free:
        return None
    return (
        f"data.num_workers: expected {needed >> 20} MiB free in /dev/shm for batches of {workers} workers, "
        f"found {free >> 20}; do set it to 0, or give the container more (docker run --shm-size)"
    )


@contextmanager
def worker_errors() -> Iterator[None]:
    """Turns the end of a worker or of their server, and the traceback of an error in it, into one line."""
    try:
        yield
    except (RuntimeError, OSError, EOFError, PretrainError) as error:
        text = str(error).strip() or type(error).__name__
        # a worker that ends between a batch and the file that holds it closes its socket, or has deleted it
        is_socket = isinstance(error, FileNotFoundError) and error.filename is None
        is_cut_off = is_socket or isinstance(error, ConnectionError | EOFError)
        is_limit = getattr(error, "errno", None) in (errno.EMFILE, errno.EAGAIN)
        is_told = isinstance(error, PretrainError) and "\n" not in text
        if is_told or not ("DataLoader worker" in text or is_cut_off or is_limit):
            raise
        *_, last = text.splitlines()
        if isinstance(error, PretrainError):
            raise type(error)(last.partition(": ")[2]) from error
        raise ResourceError(
            f"data.num_workers: expected workers that go on, found: {last}; set it to 0, or give them more "
            "memory, /dev/shm, open files or processes (ulimit -u)"
        ) from error
