"""Turns batches of raw records into token documents, in this process or in parallel worker processes.

The result of a batch depends only on its records, so the number of processes does not change it.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np

from llm_pretrain.data.chat import ChatTemplateError, NoChatTemplateError, encode_chat
from llm_pretrain.data.documents import (
    EMPTY,
    NO_TARGET,
    Document,
    RawRecord,
    RecordError,
    parse_record,
)
from llm_pretrain.data.tokenizers import Tokenizer, open_tokenizer, use_one_thread
from llm_pretrain.errors import DataError, ResourceError


@dataclass(slots=True)
class EncodedBatch:
    """The documents of a batch of records, concatenated.

    Per token: `ids` uint32, `loss_mask` bool. Per document: `lengths` int64, in tokens; `hashes` uint64 of
    the content, which decide the split; `keys` uint64 of content and loss mask, equal only for duplicates;
    `text_bytes` int64; `altered` bool: the tokens do not decode to the text's bytes; `records` int64: index
    of the document's record; `special_tokens` int64: how many are written in the text. `texts` holds the
    UTF-8 text of each validation document. `error` is about the first bad record, if none is allowed.
    """

    ids: np.ndarray
    loss_mask: np.ndarray
    lengths: np.ndarray
    hashes: np.ndarray
    keys: np.ndarray
    text_bytes: np.ndarray
    texts: list[bytes]
    altered: np.ndarray
    records: np.ndarray
    special_tokens: np.ndarray
    skipped: Counter[str] = field(default_factory=Counter)
    error: str | None = None

    def only(self, chosen: np.ndarray, threshold: int) -> EncodedBatch:
        """Returns the documents that `chosen` bool [documents] selects; `threshold` is the encoder's."""
        tokens = np.repeat(chosen, self.lengths)
        kept = chosen[self.hashes < np.uint64(threshold)]
        return replace(
            self,
            ids=self.ids[tokens],
            loss_mask=self.loss_mask[tokens],
            texts=[text for text, keep in zip(self.texts, kept, strict=True) if keep],
            **{name: getattr(self, name)[chosen] for name in _PER_DOCUMENT},
        )


_PER_DOCUMENT = ("lengths", "hashes", "keys", "text_bytes", "altered", "records", "special_tokens")


class Encoder:
    """Parses and encodes batches of records with one tokenizer; each text gets BOS before it, EOS behind it.

    Documents with a hash below `threshold` are validation documents. With `fail_on_error`, the first bad
    record ends a batch; else bad records are counted by cause. Empty documents are counted in both cases.
    Raises NoChatTemplateError for a conversation where the tokenizer has no template.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, threshold: int, fail_on_error: bool, text_column: str = "text"
    ):
        self._text_column = text_column
        self._tokenizer = tokenizer
        self._threshold = threshold
        self._fail_on_error = fail_on_error
        self._pieces = tokenizer.token_pieces()
        self._piece_bytes = tokenizer.token_bytes()

    def encode(self, records: Sequence[RawRecord]) -> EncodedBatch:
        try:
            return self._encode(records, alone=False)
        except DataError:  # the tokenizer failed: encode each text alone to find the record
            return self._encode(records, alone=True)

    def _encode(self, records: Sequence[RawRecord], alone: bool) -> EncodedBatch:
        skipped: Counter[str] = Counter()
        documents: list[Document] = []
        places: list[int] = []
        error = None
        for place, record in enumerate(records):
            try:
                documents.append(self._document(record, alone))
                places.append(place)
            except RecordError as bad:
                if self._fail_on_error and bad.cause != EMPTY:
                    error = str(bad)
                    break
                skipped[bad.cause] += 1
        batch = self._encode_documents(documents)
        batch.records = np.array(places, dtype=np.int64)
        batch.skipped, batch.error = skipped, error
        return batch

    def _document(self, record: RawRecord, alone: bool) -> Document:
        """Parses a record; a conversation becomes token ids. `alone` also tries to encode its text."""
        document = parse_record(record, self._text_column)
        try:
            if document.messages is not None:
                ids, mask = encode_chat(self._tokenizer, document.messages, document.tools)
                document = replace(document, input_ids=ids, loss_mask=mask)
            elif document.input_ids is not None:
                self._check_ids(document)
            elif alone:
                self._tokenizer.encode([text for text, _ in document.segments])
        except NoChatTemplateError:
            raise
        except DataError as error:
            cause = "chat template" if isinstance(error, ChatTemplateError) else "tokenizer error"
            raise RecordError(cause, document.location, str(error)) from error
        _check_targets(document)
        return document

    def _check_ids(self, document: Document) -> None:
        for position, token in enumerate(document.input_ids or ()):
            if not 0 <= token < self._tokenizer.vocab_size:
                detail = (
                    f"expected 0 to {self._tokenizer.vocab_size - 1}, found {token} at position {position}"
                )
                raise RecordError("token id outside the vocabulary", document.location, detail)

    def _encode_documents(self, documents: Sequence[Document]) -> EncodedBatch:
        encoded = iter(self._tokenizer.encode([text for d in documents for text, _ in d.segments]))
        first, last = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
        assert last is not None  # open_tokenizer refuses a tokenizer without one
        if first is None:
            first = last
        ids: list[int] = []
        mask: list[np.ndarray] = []
        lengths, hashes, keys, text_bytes, texts, special = [], [], [], [], [], []
        for document in documents:
            start = len(ids)
            written = "".join(part for part, _ in document.segments)
            if document.input_ids is not None:
                ids += document.input_ids
                mask.append(np.array(document.loss_mask, dtype=np.bool_))
                text = b"".join(self._pieces[token] for token in document.input_ids)
                content = repr((document.input_ids, document.loss_mask)).encode()
                form = b"ids"
            else:
                ids.append(first)
                mask.append(np.ones(1, dtype=np.bool_))
                for _, loss in document.segments:
                    segment = next(encoded)
                    ids += segment
                    mask.append(np.full(len(segment), loss))
                ids.append(last)
                mask.append(np.ones(1, dtype=np.bool_))
                content = written.encode("utf-8")
                text = self._tokenizer.plain_text(written).encode("utf-8")
                form = _form(document)
            lengths.append(len(ids) - start)
            digest = hashlib.sha256(content).digest()
            hashes.append(int.from_bytes(digest[:8], "big"))
            if form:
                digest = hashlib.sha256(digest + form).digest()
            keys.append(int.from_bytes(digest[8:16], "big"))
            text_bytes.append(len(text))
            special.append(len(self._tokenizer.special_pattern.findall(written)))
            if hashes[-1] < self._threshold:
                texts.append(text)
        tokens = np.array(ids, dtype=np.uint32)
        expected = np.array(text_bytes, dtype=np.int64)
        altered = self._bytes_of(tokens, lengths) != expected
        if not self._tokenizer.length_shows_loss:
            self._mark_altered(documents, ids, lengths, altered)
        return EncodedBatch(
            ids=tokens,
            loss_mask=np.concatenate(mask) if mask else np.zeros(0, dtype=np.bool_),
            lengths=np.array(lengths, dtype=np.int64),
            hashes=np.array(hashes, dtype=np.uint64),
            keys=np.array(keys, dtype=np.uint64),
            text_bytes=expected,
            texts=texts,
            altered=altered,
            records=np.arange(len(documents)),
            special_tokens=np.array(special, dtype=np.int64),
        )

    def _bytes_of(self, tokens: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
        """Counts the UTF-8 bytes that each document's tokens decode to, int64 [documents]."""
        if not lengths:
            return np.zeros(0, dtype=np.int64)
        counts = np.array(lengths, dtype=np.int64)
        starts = np.cumsum(counts) - counts
        return np.add.reduceat(self._piece_bytes[tokens], starts)

    def _mark_altered(
        self, documents: Sequence[Document], ids: list[int], lengths: list[int], altered: np.ndarray
    ) -> None:
        """Sets `altered` for documents whose tokens decode to another text of the same length."""
        stop = 0
        for index, (document, length) in enumerate(zip(documents, lengths, strict=True)):
            start, stop = stop, stop + length
            if altered[index] or document.input_ids is not None:
                continue
            text, tokens = self._tokenizer.plain_text(document.text()), ids[start:stop]
            if b"".join([self._pieces[token] for token in tokens]) != text.encode():
                altered[index] = self._tokenizer.decode(tokens) != text


def _check_targets(document: Document) -> None:
    """Raises RecordError for a document without a target; the first token, never predicted, cannot be one."""
    if document.input_ids is None:
        if not any(loss for _, loss in document.segments):
            raise RecordError(NO_TARGET, document.location, "expected a segment with loss, found none")
    elif not any((document.loss_mask or ())[1:]):
        detail = "expected a target behind the first token, found none"
        raise RecordError(NO_TARGET, document.location, detail)


def _form(document: Document) -> bytes:
    """Bytes that tell documents of equal text apart: lengths of segments, and which segments are targets."""
    if len(document.segments) == 1 and document.segments[0][1]:
        return b""
    return repr([(len(text), loss) for text, loss in document.segments]).encode()


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a batch was read: `size` in bytes, `last` record as (source, line), `sources` int64 [records]."""

    size: int
    last: tuple[int, int]
    sources: np.ndarray


def encoded_batches(
    batches: Iterable[list[RawRecord]], tokenizer: Tokenizer, workers: int, **settings: Any
) -> Iterator[tuple[EncodedBatch, Origin]]:
    """Encodes the batches, in order, in `workers` processes; 1 means in this process.

    `settings` are the keyword arguments of `Encoder`. Raises ResourceError if a worker was killed.
    """
    if workers <= 1:
        encoder = Encoder(tokenizer, **settings)
        for batch in batches:
            yield encoder.encode(batch), _origin(batch)
        return
    context = multiprocessing.get_context("spawn")
    initial = (tokenizer.folder, tokenizer.parses_special, settings)
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


def _start_worker(folder: Path, parse_special: bool, settings: dict[str, Any]) -> None:
    global _worker_encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process stops the workers
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    use_one_thread()
    _worker_encoder = Encoder(open_tokenizer(folder, parse_special=parse_special), **settings)


def _exit_with_parent() -> None:
    """Ends a worker whose main process was killed; the worker would wait for its next batch forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _encode_in_worker(batch: list[RawRecord]) -> EncodedBatch:
    assert _worker_encoder is not None
    return _worker_encoder.encode(batch)
