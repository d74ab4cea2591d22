"""Converts token files of other programs into a token store, without tokenising."""

from __future__ import annotations

import hashlib
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from llm_pretrain.data.store.writer import StoreWriter
from llm_pretrain.data.token_files import (
    DocumentFile,
    check_ids,
    find_tokenizer,
    open_splits,
    read_characters,
)
from llm_pretrain.data.tokenizers.tokenizer import Tokenizer, open_tokenizer
from llm_pretrain.data.tokenizers.types import nanogpt_tokenizer, write_files
from llm_pretrain.errors import ConfigError, DataError

_ZLIB_LIMIT = 64 << 20
"""zlib's bits per byte are taken over at most this much validation text, as `prepare` does."""
_HASHES = 1 << 64


class _StoreTarget:
    """Writes the store; its text bytes and zlib size are computed from the tokens."""

    def __init__(self, output: Path, tokenizer: Tokenizer):
        self._store = StoreWriter(output, tokenizer)
        self._pieces = tokenizer.token_pieces()
        self._piece_bytes = tokenizer.token_bytes()
        self._zlib = zlib.compressobj(9)
        self._zlib_in = self._zlib_out = 0

    def __enter__(self) -> _StoreTarget:
        self._store.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._store.__exit__(*error)

    def append(self, split: str, ids: np.ndarray, lengths: np.ndarray) -> None:
        """Appends concatenated documents to a split."""
        loss_mask = np.ones(len(ids), dtype=np.bool_)
        self._store.splits[split].append(ids, lengths, loss_mask, int(self._piece_bytes[ids].sum()))
        if split == "validation" and self._zlib_in < _ZLIB_LIMIT:
            text = b"".join(self._pieces[token] for token in ids.tolist())[: _ZLIB_LIMIT - self._zlib_in]
            self._zlib_in += len(text)
            self._zlib_out += len(self._zlib.compress(text))

    def commit(self, inputs: Sequence[str], fraction: float | None, skipped: dict[str, int]) -> None:
        """Completes the store and moves it to its path."""
        zlib_bits = None
        if self._zlib_in:
            zlib_bits = 8 * (self._zlib_out + len(self._zlib.flush())) / self._zlib_in
        self._store.commit(
            {
                "inputs": [Path(name).name for name in inputs],
                "validation_fraction": fraction,
                "on_error": "fail",
                "skipped": {cause: count for cause, count in skipped.items() if count},
                "altered_documents": 0,
                "zlib_bits_per_byte": zlib_bits,
            }
        )


@dataclass(frozen=True)
class Conversion:
    """Arguments of `convert`.

    Args:
        inputs: Files, or folders of them.
        output: New folder to write.
        tokenizer: Folder; by default the folder `tokenizer` in or beside the inputs, or for nanoGPT the
            characters of a `meta.pkl` there.
        validation_fraction: Share of the documents, chosen by hash, where no file names a validation set.
        keep_ids: Leave documents unchanged. Otherwise documents that lack the first token of ours (BOS, or
            EOS without one) get it, and documents without text are left out.
    """

    inputs: Sequence[str]
    output: str | Path
    tokenizer: str | Path | None = None
    validation_fraction: float = 0.01
    keep_ids: bool = False


@dataclass
class ConversionReport:
    """Counts of a conversion: `documents` and `tokens` written per split, `tokens_read`,
    `first_tokens_added`, `empty_documents` left out. `unended` names files without any end of a document;
    each became one document."""

    documents: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    tokens_read: int = 0
    first_tokens_added: int = 0
    empty_documents: int = 0
    unended: list[str] = field(default_factory=list)


def convert(conversion: Conversion) -> ConversionReport:
    """Converts; a failed conversion leaves nothing behind. Raises DataError and ConfigError."""
    if not 0 <= conversion.validation_fraction < 1:
        fraction = conversion.validation_fraction
        raise ConfigError(f"--validation_fraction: expected 0 ≤ fraction < 1, found {fraction}")
    output = Path(conversion.output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise DataError(f"{output}: expected a new or empty folder, found one in use; choose another")
    characters = read_characters(conversion.inputs)
    with tempfile.TemporaryDirectory(prefix="llm_pretrain-") as temporary:
        folder = conversion.tokenizer or find_tokenizer(conversion.inputs)
        if folder is None and characters:
            folder = Path(temporary)
            write_files(folder, nanogpt_tokenizer(next(iter(characters.values()))), chat=False, model=None)
        if folder is None:
            raise ConfigError(
                "--tokenizer: expected the folder of the tokenizer that wrote "
                f"{conversion.inputs[0]}, found none"
            )
        tokenizer = open_tokenizer(folder)
        _check_characters(characters, tokenizer)
        return _convert(conversion, output, tokenizer, known=bool(characters))


def _check_characters(characters: dict[Path, list[str]], tokenizer: Tokenizer) -> None:
    """Raises DataError where the text of an id is not that of a `meta.pkl`."""
    pieces = tokenizer.token_pieces()
    for path, texts in characters.items():
        for index, text in enumerate(texts):
            piece = pieces[index] if index < len(pieces) else b""
            if piece != text.encode():
                raise DataError(
                    f"{path}: expected the text of the tokenizer, found id {index} as {text!r} instead of "
                    f"{piece.decode(errors='replace')!r}; without --tokenizer this file gives the tokenizer"
                )


def _convert(conversion: Conversion, output: Path, tokenizer: Tokenizer, *, known: bool) -> ConversionReport:
    """Converts; `known` says that the tokenizer is certainly the one that wrote the ids."""
    assert tokenizer.eos_token_id is not None  # open_tokenizer refuses a tokenizer without EOS
    splits = open_splits(conversion.inputs, tokenizer.eos_token_id)
    threshold = None
    if "all" in splits:
        hashing = _Reader(tokenizer, ConversionReport(), keep_ids=conversion.keep_ids)
        threshold = _threshold(hashing, splits["all"], conversion.validation_fraction)
    report = ConversionReport(unended=[] if known else _unended(splits, tokenizer))
    reader = _Reader(tokenizer, report, keep_ids=conversion.keep_ids)
    with _StoreTarget(output, tokenizer) as target:
        for name, files in splits.items():
            for batch in reader.batches(files):
                parts = {name: batch} if threshold is None else batch.divided(threshold)
                for split, part in parts.items():
                    target.append(split, part.ids, part.lengths)
                    report.documents[split] += len(part.lengths)
                    report.tokens[split] += len(part.ids)
        if not report.documents.total():
            raise DataError(f"{', '.join(conversion.inputs)}: expected documents, found none")
        if not reader.has_text:
            raise DataError(
                f"{', '.join(conversion.inputs)}: expected ids of text, found special and byte tokens alone; "
                "--tokenizer must name the tokenizer that wrote them"
            )
        fraction = None if threshold is None else conversion.validation_fraction
        target.commit(conversion.inputs, fraction, {"empty document": report.empty_documents})
    return report


def _unended(splits: dict[str, list[DocumentFile]], tokenizer: Tokenizer) -> list[str]:
    """Names of files without any end of a document."""
    files = [file for files in splits.values() for file in files]
    return [f.name for f in files if len(f.offsets) == 2 and int(f.tokens[-1]) != tokenizer.eos_token_id]


@dataclass(frozen=True)
class _Batch:
    ids: np.ndarray
    lengths: np.ndarray

    def hashes(self) -> np.ndarray:
        """uint64 [documents]: hash of the ids, so that equal documents are in one split."""
        content = memoryview(self.ids.astype("<u4").tobytes())
        ends = np.cumsum(self.lengths) * 4
        digests = [
            hashlib.sha256(content[end - 4 * n : end]).digest()[:8]
            for end, n in zip(ends.tolist(), self.lengths.tolist(), strict=True)
        ]
        return np.frombuffer(b"".join(digests), dtype=">u8").astype(np.uint64)

    def chosen(self, which: np.ndarray) -> _Batch:
        """The documents selected by `which` bool [documents]."""
        return _Batch(self.ids[np.repeat(which, self.lengths)], self.lengths[which])

    def divided(self, threshold: int) -> dict[str, _Batch]:
        validation = self.hashes() < np.uint64(threshold)
        return {"train": self.chosen(~validation), "validation": self.chosen(validation)}


class _Reader:
    """Reads documents in batches, checks their ids, and adds the first token to those that lack it.

    `has_text`: whether an id was read that is neither a special token nor a byte of an unknown character, or
    the tokenizer has no such ids.
    """

    def __init__(self, tokenizer: Tokenizer, report: ConversionReport, *, keep_ids: bool):
        self._tokenizer, self._report, self._keep_ids = tokenizer, report, keep_ids
        self._is_special = np.zeros(tokenizer.vocab_size, dtype=np.bool_)
        self._is_special[sorted(tokenizer.special_ids)] = True
        self._is_text = ~self._is_special
        self._is_text[tokenizer.byte_ids()] = False
        self.has_text = not self._is_text.any()

    def batches(self, files: Sequence[DocumentFile]) -> Iterator[_Batch]:
        for file in files:
            position = 0
            for ids, lengths in file.batches():
                check_ids(ids, self._tokenizer.vocab_size, file.name, position)
                if not position and len(ids) > 512 and ids[1::2].max() <= self._tokenizer.vocab_size >> 16:
                    # upper halves of numbers such as Megatron's int32
                    raise DataError(f"{file.name}: expected uint16 token ids, found wider numbers")
                position += len(ids)
                self._report.tokens_read += len(ids)
                self.has_text = self.has_text or bool(self._is_text[ids].any())
                batch = _Batch(ids.astype(np.uint32), lengths)
                yield batch if self._keep_ids else self._framed(batch)

    def _framed(self, batch: _Batch) -> _Batch:
        """Leaves out documents without text; the others begin as `prepare` writes them."""
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
        return _Batch(np.insert(batch.ids, starts[lacking], first), batch.lengths + lacking)


def _threshold(reader: _Reader, files: Sequence[DocumentFile], fraction: float) -> int:
    """Documents with hashes below it are validation: `fraction` of all, at least one of two or more."""
    parts = [batch.hashes() for batch in reader.batches(files)]
    hashes = np.concatenate([np.zeros(0, dtype=np.uint64), *parts])
    threshold = int(fraction * _HASHES)
    if not threshold or not len(hashes) or hashes.min() == hashes.max():
        return 0
    return min(max(threshold, int(hashes.min()) + 1), int(hashes.max()))
