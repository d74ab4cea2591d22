"""Turns token files of other programs into a token store, and a store into theirs. No text is tokenised.

The files themselves are read and written in `document_files.py` and `megatron_files.py`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from llm_pretrain.data.conversion_sources import find_tokenizer, open_splits
from llm_pretrain.data.conversion_targets import open_target
from llm_pretrain.data.document_files import DocumentFile, check_ids
from llm_pretrain.data.tokenizers import Tokenizer, open_tokenizer
from llm_pretrain.errors import ConfigError, DataError

FORMATS = ("store", "nanogpt", "megatron")
_HASHES = 1 << 64


@dataclass(frozen=True)
class Conversion:
    """What to convert: `inputs` of format `source` into `output` of format `target`.

    `tokenizer` defaults to the one that lies with the input. Files that name no validation set are split by
    document hash. With `keep_ids` every document stays as it is; otherwise a document of a foreign file gets
    the token that ours begin with where it lacks it, and one without text is left out. nanoGPT's files know
    documents by their eos token alone, so that one without it gets one there, or with `keep_ids` none.
    """

    source: str
    target: str
    inputs: Sequence[str]
    output: str | Path
    tokenizer: str | Path | None = None
    validation_fraction: float = 0.01
    keep_ids: bool = False


@dataclass
class ConversionReport:
    """Counts: `documents` and `tokens` written per split, `tokens_read`, `first_tokens_added`,
    `empty_documents` left out, `masked` tokens; `mask_lost` where the target has no place for the mask;
    `unended` names files without a single end of a document, each of which became one document;
    `ends_added` and `ends_missing` count documents written for nanoGPT that got their eos token, or with
    `keep_ids` did not, and run into the next one."""

    documents: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    tokens_read: int = 0
    first_tokens_added: int = 0
    empty_documents: int = 0
    masked: int = 0
    mask_lost: bool = False
    unended: list[str] = field(default_factory=list)
    ends_added: int = 0
    ends_missing: int = 0

    def count(self, split: str, ids: np.ndarray, lengths: np.ndarray, loss_mask: np.ndarray) -> None:
        """Adds documents written."""
        self.documents[split] += len(lengths)
        self.tokens[split] += len(ids)
        self.masked += int(np.count_nonzero(~loss_mask))


def convert(conversion: Conversion) -> ConversionReport:
    """Converts, and leaves nothing behind of a failed attempt. Raises DataError and ConfigError."""
    if conversion.source == conversion.target:
        raise ConfigError(f"--to: expected another format than --from, found {conversion.target} twice")
    if not 0 <= conversion.validation_fraction < 1:
        fraction = conversion.validation_fraction
        raise ConfigError(f"--validation_fraction: expected 0 ≤ fraction < 1, found {fraction}")
    folder = conversion.tokenizer or find_tokenizer(conversion.inputs)
    tokenizer = open_tokenizer(folder)
    output = Path(conversion.output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise DataError(f"{output}: expected a new or empty folder, found one in use; choose another")
    splits = open_splits(conversion.source, conversion.inputs, tokenizer)
    as_it_is = conversion.keep_ids or conversion.source == "store"
    threshold = None
    if "all" in splits:
        hashing = _Reader(tokenizer, ConversionReport(), as_it_is=as_it_is)
        threshold = _threshold(hashing, splits["all"], conversion.validation_fraction)
    report = ConversionReport(unended=_unended(conversion, splits, tokenizer))
    reader = _Reader(tokenizer, report, as_it_is=as_it_is)
    with open_target(conversion.target, output, tokenizer) as target:
        for name, files in splits.items():
            for batch in reader.batches(files):
                parts = {name: batch} if threshold is None else batch.divided(threshold)
                if conversion.target == "nanogpt":
                    parts = {
                        split: _ended(part, tokenizer, report, as_it_is=conversion.keep_ids)
                        for split, part in parts.items()
                    }
                for split, part in parts.items():
                    target.append(split, part.ids, part.lengths, part.loss_mask)
                    report.count(split, part.ids, part.lengths, part.loss_mask)
        if not report.documents.total():
            raise DataError(f"{', '.join(conversion.inputs)}: expected documents, found none")
        report.mask_lost = report.masked > 0 and not target.has_mask
        fraction = None if threshold is None else conversion.validation_fraction
        target.commit(conversion.inputs, fraction, {"empty document": report.empty_documents})
    return report


def _unended(
    conversion: Conversion, splits: dict[str, list[DocumentFile]], tokenizer: Tokenizer
) -> list[str]:
    """Names of nanoGPT's files without one end of a document."""
    if conversion.source != "nanogpt":
        return []
    files = [file for files in splits.values() for file in files]
    return [f.name for f in files if len(f.offsets) == 2 and int(f.tokens[-1]) != tokenizer.eos_token_id]


@dataclass(frozen=True)
class _Batch:
    ids: np.ndarray
    lengths: np.ndarray
    loss_mask: np.ndarray

    def hashes(self) -> np.ndarray:
        """uint64 [documents]: of the ids, so that equal documents fall into one split."""
        content = memoryview(self.ids.astype("<u4").tobytes())
        ends = np.cumsum(self.lengths) * 4
        digests = [
            hashlib.sha256(content[end - 4 * n : end]).digest()[:8]
            for end, n in zip(ends.tolist(), self.lengths.tolist(), strict=True)
        ]
        return np.frombuffer(b"".join(digests), dtype=">u8").astype(np.uint64)

    def chosen(self, which: np.ndarray) -> _Batch:
        """The documents for which bool [documents] `which` holds."""
        tokens = np.repeat(which, self.lengths)
        return _Batch(self.ids[tokens], self.lengths[which], self.loss_mask[tokens])

    def divided(self, threshold: int) -> dict[str, _Batch]:
        validation = self.hashes() < np.uint64(threshold)
        return {"train": self.chosen(~validation), "validation": self.chosen(validation)}


def _ended(batch: _Batch, tokenizer: Tokenizer, report: ConversionReport, *, as_it_is: bool) -> _Batch:
    """The documents, with the eos token behind those that lack it (a conversation ends in a newline)."""
    eos = tokenizer.eos_token_id
    assert eos is not None  # open_tokenizer refuses a tokenizer without EOS
    stops = np.cumsum(batch.lengths)
    lacking = batch.ids[stops - 1] != eos
    count = int(np.count_nonzero(lacking))
    if as_it_is:
        report.ends_missing += count
        return batch
    report.ends_added += count
    return _Batch(
        np.insert(batch.ids, stops[lacking], eos),
        batch.lengths + lacking,
        np.insert(batch.loss_mask, stops[lacking], True),
    )


class _Reader:
    """Reads documents in batches, checks their ids, and frames those that are not ours."""

    def __init__(self, tokenizer: Tokenizer, report: ConversionReport, *, as_it_is: bool):
        self._tokenizer, self._report, self._as_it_is = tokenizer, report, as_it_is
        self._is_special = np.zeros(tokenizer.vocab_size, dtype=np.bool_)
        self._is_special[sorted(tokenizer.special_ids)] = True

    def batches(self, files: Sequence[DocumentFile]) -> Iterator[_Batch]:
        for file in files:
            position = 0
            for ids, lengths, mask in file.batches():
                check_ids(ids, self._tokenizer.vocab_size, file.name, position)
                position += len(ids)
                self._report.tokens_read += len(ids)
                batch = _Batch(ids.astype(np.uint32), lengths, mask)
                yield batch if self._as_it_is else self._framed(batch)

    def _framed(self, batch: _Batch) -> _Batch:
        """Documents without text left out; the others begin as `prepare` writes them."""
        if not len(batch.lengths):
            return batch
        starts = np.cumsum(batch.lengths) - batch.lengths
        text = np.add.reduceat((~self._is_special[batch.ids]).astype(np.int64), starts) > 0
        self._report.empty_documents += int(np.count_nonzero(~text))
        batch = batch.chosen(text)
        starts = np.cumsum(batch.lengths) - batch.lengths
        bos = self._tokenizer.bos_token_id
        first = self._tokenizer.eos_token_id if bos is None else bos
        assert first is not None  # open_tokenizer refuses a tokenizer without EOS
        lacking = batch.ids[starts] != first
        self._report.first_tokens_added += int(np.count_nonzero(lacking))
        return _Batch(
            np.insert(batch.ids, starts[lacking], first),
            batch.lengths + lacking,
            np.insert(batch.loss_mask, starts[lacking], True),
        )


def _threshold(reader: _Reader, files: Sequence[DocumentFile], fraction: float) -> int:
    """Hashes below it are validation documents: `fraction` of all, and at least one where there are two."""
    parts = [batch.hashes() for batch in reader.batches(files)]
    hashes = np.concatenate([np.zeros(0, dtype=np.uint64), *parts])
    threshold = int(fraction * _HASHES)
    if not threshold or not len(hashes) or hashes.min() == hashes.max():
        return 0
    return min(max(threshold, int(hashes.min()) + 1), int(hashes.max()))
