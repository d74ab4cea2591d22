"""Prepares a token store from a corpus, in parallel, with the same bytes at any number of workers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from llm_pretrain.data.documents import RawRecord, batch_records, read_records
from llm_pretrain.data.encoding import EncodedBatch, Encoder
from llm_pretrain.data.hub import HUB_PREFIX
from llm_pretrain.data.inputs import COMPRESSIONS, TABLE_SUFFIXES, find_sources
from llm_pretrain.data.store_writer import SHARD_BYTES, SplitWriter, StoreWriter
from llm_pretrain.data.token_store import TokenStore
from llm_pretrain.data.tokenizers import Tokenizer, convert_tokenizer, open_tokenizer, use_one_thread
from llm_pretrain.errors import ConfigError, DataError, ResourceError

BATCH_BYTES = 1 << 20
"""Bytes of raw records that a worker encodes at a time."""
ZLIB_LIMIT = 64 << 20
"""zlib's bits per byte are taken over at most this much of the validation text, from its beginning."""
_HASHES = 1 << 64


@dataclass(frozen=True)
class Preparation:
    """What to prepare: `inputs` (files, folders, `stdlib`), with which tokenizer folder, and how.

    `validation_fraction` of the documents, chosen by hash, form the validation split. `on_error` is `fail` or
    `skip`. `text_column` names the field or column that holds the text. `workers` defaults to all cores.
    `progress` is called with the bytes of every batch done.
    """

    inputs: Sequence[str]
    tokenizer: str | Path
    output: str | Path
    validation_fraction: float = 0.01
    on_error: str = "fail"
    text_column: str = "text"
    overwrite: bool = False
    workers: int | None = None
    shard_bytes: int = SHARD_BYTES
    progress: Callable[[int], object] = field(default=lambda done: None)


def prepare_store(preparation: Preparation) -> TokenStore:
    """Writes the store and opens it; of a failed attempt nothing is left behind.

    Raises DataError for bad input, ConfigError for an option out of its range.
    Equal documents fall into the same split. Where the fraction would leave a split empty although there are
    two different documents, the document nearest to the border is moved, and the corpus is encoded again.
    """
    output = Path(preparation.output)
    if not 0 <= preparation.validation_fraction < 1:
        raise ConfigError(
            f"--validation_fraction: expected 0 ≤ fraction < 1, found {preparation.validation_fraction}"
        )
    if preparation.workers is not None and preparation.workers < 1:
        raise ConfigError(f"--workers: expected 1 or more, found {preparation.workers}")
    _check_output(output, preparation.overwrite)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(preparation.tokenizer)
        if folder.is_dir() and not (folder / "tokenizer.json").is_file():
            convert_tokenizer(folder, Path(temporary))
            folder = Path(temporary)
        tokenizer = open_tokenizer(folder)
        threshold: int | None = int(preparation.validation_fraction * _HASHES)
        while threshold is not None:
            threshold = _write(preparation, output, tokenizer, threshold)
    return TokenStore(output)


def input_bytes(inputs: Sequence[str]) -> int | None:
    """Size of all records of `inputs`, or None where it shows only when they are read."""
    total = 0
    for source in find_sources(inputs):
        if source.path is None or source.path.suffix.lower() in (*COMPRESSIONS, *TABLE_SUFFIXES):
            return None
        total += source.path.stat().st_size
    return total


def _check_output(output: Path, overwrite: bool) -> None:
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / "store.json").is_file():
        raise DataError(
            f"{output}: expected a new folder or a token store, found something else; choose another"
        )
    if not overwrite:
        raise DataError(f"{output}: expected no store, found one; use --overwrite to replace it")


def _write(preparation: Preparation, output: Path, tokenizer: Tokenizer, threshold: int) -> int | None:
    """One pass over the corpus. Returns None when done, or the threshold to do it again with."""
    totals = _Totals()
    with StoreWriter(output, tokenizer, shard_bytes=preparation.shard_bytes) as writer:
        for batch, size in _encoded_batches(preparation, tokenizer, threshold):
            if batch.error:
                raise DataError(f"{batch.error}; mend it, or leave such records out with --on_error skip")
            totals.add(batch, threshold)
            chosen = batch.hashes < np.uint64(threshold)
            _append(writer.splits["train"], batch, ~chosen)
            _append(writer.splits["validation"], batch, chosen)
            preparation.progress(size)
        if not totals.documents:
            raise DataError(
                f"{', '.join(preparation.inputs)}: expected documents, found none{totals.causes()}"
            )
        again = totals.other_threshold(threshold)
        if again is None:
            writer.commit(
                {
                    "inputs": [
                        name if name.startswith(HUB_PREFIX) else Path(name).name
                        for name in preparation.inputs
                    ],
                    "validation_fraction": preparation.validation_fraction,
                    "on_error": preparation.on_error,
                    "skipped": dict(totals.skipped),
                    "altered_documents": totals.altered,
                    "zlib_bits_per_byte": totals.zlib_bits_per_byte(),
                }
            )
    return again


def _append(writer: SplitWriter, batch: EncodedBatch, chosen: np.ndarray) -> None:
    """Appends the batch's documents for which `chosen` bool [documents] holds."""
    if chosen.all():
        ids, mask = batch.ids, batch.loss_mask
    else:
        tokens = np.repeat(chosen, batch.lengths)
        ids, mask = batch.ids[tokens], batch.loss_mask[tokens]
    writer.append(ids, batch.lengths[chosen], mask, int(batch.text_bytes[chosen].sum()))


class _Totals:
    """Counts over all batches of a pass."""

    def __init__(self) -> None:
        self.documents = self.altered = 0
        self.skipped: Counter[str] = Counter()
        self._lowest, self._highest = _HASHES, -1
        self._validation_documents = 0
        self._zlib = zlib.compressobj(9)
        self._zlib_in = self._zlib_out = 0

    def add(self, batch: EncodedBatch, threshold: int) -> None:
        self.skipped += batch.skipped
        self.documents += len(batch.lengths)
        self.altered += batch.altered
        if len(batch.hashes):
            self._lowest = min(self._lowest, int(batch.hashes.min()))
            self._highest = max(self._highest, int(batch.hashes.max()))
        self._validation_documents += len(batch.texts)
        for text in batch.texts:
            part = text[: ZLIB_LIMIT - self._zlib_in]
            self._zlib_in += len(part)
            self._zlib_out += len(self._zlib.compress(part))

    def other_threshold(self, threshold: int) -> int | None:
        """A threshold that leaves neither split empty, where this one did and another can."""
        if threshold == 0 or self._lowest == self._highest:
            return 0 if threshold and self._validation_documents else None
        if self._validation_documents == 0:
            return self._lowest + 1
        return self._highest if self._validation_documents == self.documents else None

    def zlib_bits_per_byte(self) -> float | None:
        if not self._zlib_in:
            return None
        return 8 * (self._zlib_out + len(self._zlib.flush())) / self._zlib_in

    def causes(self) -> str:
        if not self.skipped:
            return ""
        return (
            " (left out: "
            + ", ".join(f"{count} {cause}" for cause, count in sorted(self.skipped.items()))
            + ")"
        )


def _encoded_batches(
    preparation: Preparation, tokenizer: Tokenizer, threshold: int
) -> Iterator[tuple[EncodedBatch, int]]:
    """(encoded batch, bytes read) in the corpus's order, however many processes encode."""
    records = read_records(preparation.inputs, text_column=preparation.text_column)
    batches = batch_records(records, BATCH_BYTES)
    fail = preparation.on_error == "fail"
    workers = preparation.workers or os.cpu_count() or 1
    size = input_bytes(preparation.inputs)
    if size is not None:
        workers = min(workers, -(-size // (2 * BATCH_BYTES)))
    if workers <= 1:
        encoder = Encoder(
            tokenizer, threshold=threshold, fail_on_error=fail, text_column=preparation.text_column
        )
        for batch in batches:
            yield encoder.encode(batch), _size(batch)
        return
    context = multiprocessing.get_context("spawn")
    settings = (tokenizer.folder, threshold, fail, preparation.text_column)
    executor = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=settings)
    pending: deque[tuple[Future[EncodedBatch], int]] = deque()
    try:
        for batch in batches:
            pending.append((executor.submit(_encode_in_worker, batch), _size(batch)))
            if len(pending) >= 4 * workers:
                future, size = pending.popleft()
                yield future.result(), size
        while pending:
            future, size = pending.popleft()
            yield future.result(), size
    except BrokenProcessPool as error:
        message = (
            "prepare: expected every worker to finish, found one killed (out of memory?); use fewer --workers"
        )
        raise ResourceError(message) from error
    finally:
        executor.shutdown(cancel_futures=True)


def _size(batch: Sequence[RawRecord]) -> int:
    return sum(len(record.data) for record in batch)


_worker_encoder: Encoder | None = None


def _start_worker(folder: Path, threshold: int, fail_on_error: bool, text_column: str) -> None:
    global _worker_encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process stops the workers
    use_one_thread()
    _worker_encoder = Encoder(
        open_tokenizer(folder), threshold=threshold, fail_on_error=fail_on_error, text_column=text_column
    )


def _encode_in_worker(batch: list[RawRecord]) -> EncodedBatch:
    assert _worker_encoder is not None
    return _worker_encoder.encode(batch)
