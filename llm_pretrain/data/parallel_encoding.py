"""Encodes records in many processes, and gives the batches back in the corpus's order.

What is in a batch is decided by the records alone, so that the number of processes changes nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np

from llm_pretrain.data.encoding import EncodedBatch, Encoder
from llm_pretrain.data.records import RawRecord
from llm_pretrain.data.tokenizers import Tokenizer, open_tokenizer, use_one_thread
from llm_pretrain.errors import ResourceError


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a batch comes from: bytes read, (source, line) of its last record, int64 source [records]."""

    size: int
    last: tuple[int, int]
    sources: np.ndarray


@dataclass(frozen=True)
class EncoderSettings:
    """What an encoder has to know besides its tokenizer; see `Encoder`."""

    threshold: int
    fail_on_error: bool
    text_column: str

    def encoder(self, tokenizer: Tokenizer) -> Encoder:
        """A new encoder."""
        return Encoder(
            tokenizer,
            threshold=self.threshold,
            fail_on_error=self.fail_on_error,
            text_column=self.text_column,
        )


def encoded_batches(
    batches: Iterable[list[RawRecord]], tokenizer: Tokenizer, settings: EncoderSettings, workers: int
) -> Iterator[tuple[EncodedBatch, Origin]]:
    """Every batch encoded, by `workers` processes, or by this one where that is 1.

    Raises ResourceError where a worker was killed.
    """
    if workers <= 1:
        encoder = settings.encoder(tokenizer)
        for batch in batches:
            yield encoder.encode(batch), _origin(batch)
        return
    context = multiprocessing.get_context("spawn")
    initial = (tokenizer.folder, settings)
    executor = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=initial)
    pending: deque[tuple[Future[EncodedBatch], Origin]] = deque()
    try:
        for batch in batches:
            pending.append((executor.submit(_encode_in_worker, batch), _origin(batch)))
            if len(pending) >= 4 * workers:
                future, origin = pending.popleft()
                yield future.result(), origin
        while pending:
            future, origin = pending.popleft()
            yield future.result(), origin
    except BrokenProcessPool as error:
        message = (
            "prepare: expected every worker to finish, found one killed (out of memory?); use fewer --workers"
        )
        raise ResourceError(message) from error
    finally:
        executor.shutdown(cancel_futures=True)


def _origin(batch: list[RawRecord]) -> Origin:
    sources = np.array([record.source for record in batch], dtype=np.int64)
    return Origin(sum(len(record.data) for record in batch), (batch[-1].source, batch[-1].line), sources)


_worker_encoder: Encoder | None = None


def _start_worker(folder: Path, settings: EncoderSettings) -> None:
    global _worker_encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process stops the workers
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    use_one_thread()
    _worker_encoder = settings.encoder(open_tokenizer(folder))


def _leave_with_parent() -> None:
    """Ends a worker whose main process was killed; it would wait for its next batch for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _encode_in_worker(batch: list[RawRecord]) -> EncodedBatch:
    assert _worker_encoder is not None
    return _worker_encoder.encode(batch)
