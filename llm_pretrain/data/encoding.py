"""Turns raw records into token documents: parse, encode, frame with BOS and EOS, hash, count.

This is the part of `prepare` that runs in every worker process. It writes nothing.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from llm_pretrain.data.chat import ChatTemplateError, NoChatTemplateError, encode_chat
from llm_pretrain.data.documents import EMPTY, Document, RawRecord, RecordError, parse_record
from llm_pretrain.data.records import NO_TARGET
from llm_pretrain.data.tokenizers import Tokenizer


@dataclass(slots=True)
class EncodedBatch:
    """The documents of some records, joined.

    `ids` uint32 [tokens] and `loss_mask` bool [tokens] of all documents one after the other, `lengths`
    int64, `hashes` uint64 (of the content: decides the split), `keys` uint64 (of the content and of what is a
    target in it: equal for duplicates alone) and `text_bytes` int64 [documents].
    `texts` holds the UTF-8 text of validation documents. `altered` bool [documents] marks those whose tokens
    do not stand for exactly their text's bytes; `records` int64 [documents] is each one's place among the
    records. `error` is the first bad record's message where none is allowed, or one that concerns them all
    (`unmendable`).
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
    skipped: Counter[str] = field(default_factory=Counter)
    error: str | None = None
    unmendable: bool = False

    def only(self, chosen: np.ndarray, threshold: int) -> EncodedBatch:
        """The documents for which `chosen` bool [documents] holds; `threshold` is the encoder's."""
        tokens = np.repeat(chosen, self.lengths)
        kept = chosen[self.hashes < np.uint64(threshold)]
        return replace(
            self,
            ids=self.ids[tokens],
            loss_mask=self.loss_mask[tokens],
            texts=[text for text, keep in zip(self.texts, kept, strict=True) if keep],
            **{name: getattr(self, name)[chosen] for name in _PER_DOCUMENT},
        )


_PER_DOCUMENT = ("lengths", "hashes", "keys", "text_bytes", "altered", "records")


class Encoder:
    """Encodes batches of records with one tokenizer.

    A document's hash below `threshold` makes it a validation document. With `fail_on_error` the first bad
    record ends a batch; otherwise it is counted by cause. Empty documents are always counted and left out.
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
        """Encodes `records` in order."""
        skipped: Counter[str] = Counter()
        documents: list[Document] = []
        places: list[int] = []
        error, unmendable = None, False
        for place, record in enumerate(records):
            try:
                document = parse_record(record, self._text_column)
                if document.messages is not None:
                    document = self._rendered(document)
                else:
                    self._check_ids(document)
                _check_targets(document)
                documents.append(document)
                places.append(place)
            except NoChatTemplateError as missing:
                error, unmendable = f"{record.location}: {missing}", True
                break
            except RecordError as bad:
                if self._fail_on_error and bad.cause != EMPTY:
                    error = str(bad)
                    break
                skipped[bad.cause] += 1
        batch = self._encode_documents(documents)
        batch.records = np.array(places, dtype=np.int64)
        batch.skipped, batch.error, batch.unmendable = skipped, error, unmendable
        return batch

    def _rendered(self, document: Document) -> Document:
        """A conversation as the token ids that the tokenizer's template makes of it."""
        assert document.messages is not None
        try:
            ids, mask = encode_chat(self._tokenizer, document.messages, document.tools)
        except ChatTemplateError as error:
            raise RecordError("chat template", document.location, str(error)) from error
        return replace(document, input_ids=ids, loss_mask=mask)

    def _check_ids(self, document: Document) -> None:
        if document.input_ids is None:
            return
        for position, token in enumerate(document.input_ids):
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
        lengths, hashes, keys, text_bytes, texts = [], [], [], [], []
        for document in documents:
            start = len(ids)
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
                text = content = "".join(part for part, _ in document.segments).encode("utf-8")
                form = _form(document)
            lengths.append(len(ids) - start)
            digest = hashlib.sha256(content).digest()
            hashes.append(int.from_bytes(digest[:8], "big"))
            if form:
                digest = hashlib.sha256(digest + form).digest()
            keys.append(int.from_bytes(digest[8:16], "big"))
            text_bytes.append(len(text))
            if hashes[-1] < self._threshold:
                texts.append(text)
        tokens = np.array(ids, dtype=np.uint32)
        expected = np.array(text_bytes, dtype=np.int64)
        return EncodedBatch(
            ids=tokens,
            loss_mask=np.concatenate(mask) if mask else np.zeros(0, dtype=np.bool_),
            lengths=np.array(lengths, dtype=np.int64),
            hashes=np.array(hashes, dtype=np.uint64),
            keys=np.array(keys, dtype=np.uint64),
            text_bytes=expected,
            texts=texts,
            altered=self._bytes_of(tokens, lengths) != expected,
            records=np.arange(len(documents)),
        )

    def _bytes_of(self, tokens: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
        """int64 [documents]: the bytes that each document's tokens stand for."""
        if not lengths:
            return np.zeros(0, dtype=np.int64)
        counts = np.array(lengths, dtype=np.int64)
        starts = np.cumsum(counts) - counts
        return np.add.reduceat(self._piece_bytes[tokens], starts)


def _check_targets(document: Document) -> None:
    """Nothing is learned from a document of which no token is predicted; the first of one never is."""
    if document.input_ids is None:
        if not any(loss for _, loss in document.segments):
            raise RecordError(NO_TARGET, document.location, "expected a segment with loss, found none")
    elif not any((document.loss_mask or ())[1:]):
        detail = "expected a target behind the first token, found none"
        raise RecordError(NO_TARGET, document.location, detail)


def _form(document: Document) -> bytes:
    """What tells documents of the same text apart: where their segments end and which of them are targets."""
    if len(document.segments) == 1 and document.segments[0][1]:
        return b""
    return repr([(len(text), loss) for text, loss in document.segments]).encode()
