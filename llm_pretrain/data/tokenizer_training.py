"""Trains a tokenizer of any type on a corpus, writes its folder and measures its compression."""

from __future__ import annotations

import shutil
import unicodedata
import uuid
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from llm_pretrain.data.documents import EMPTY, RecordError, parse_record
from llm_pretrain.data.readers import read_records
from llm_pretrain.data.tokenizer_types import (
    build_bytelevel_bpe,
    build_character,
    build_sentencepiece_bpe,
    build_sentencepiece_unigram,
    write_files,
)
from llm_pretrain.data.tokenizers import MAX_VOCAB_SIZE, Tokenizer, open_tokenizer
from llm_pretrain.errors import ConfigError, DataError

TokenizerType = Literal["sentencepiece-bpe", "sentencepiece-unigram", "char", "bytelevel-bpe"]
SAMPLE_BYTES = 32 << 20
"""Larger corpora are sampled, by the hash of their blocks."""

_BLOCK_CHARACTERS = 1000
_SCRIPTS = {
    *("Latin", "Greek", "Cyrillic", "Armenian", "Hebrew", "Arabic", "CJK", "Hiragana", "Katakana", "Hangul"),
    *("Devanagari", "Bengali", "Tamil", "Telugu", "Thai", "Lao", "Khmer", "Georgian", "Ethiopic"),
}


@dataclass(frozen=True)
class ScriptShare:
    """One script's `share` of all tokens and its `bytes_per_token`."""

    script: str
    share: float
    bytes_per_token: float


@dataclass(frozen=True)
class TokenizerReport:
    """The training corpus, and how well the tokenizer compresses it.

    `vocab_size` is the final size. `bytes_per_token` and `scripts` (most frequent first) are of the sampled
    text. `altered_documents` counts checked documents that decoding does not restore; `skipped` counts bad
    records by cause.
    """

    vocab_size: int
    documents: int
    text_bytes: int
    sampled_bytes: int
    bytes_per_token: float
    scripts: tuple[ScriptShare, ...]
    altered_documents: int
    skipped: dict[str, int]


def train_tokenizer(
    input: Sequence[str],
    output: str | Path,
    vocab_size: int | None = None,
    *,
    type: TokenizerType = "sentencepiece-bpe",
    on_error: Literal["skip", "fail"] = "fail",
    text_column: str = "text",
) -> TokenizerReport:
    """Trains on the text of `input` and writes the folder `output`; a failed training leaves nothing behind.

    The same input gives the same files. Raises DataError for bad records, an empty corpus and a size that is
    impossible for this text, ConfigError for one that is impossible for any text.

    Args:
        input: Files (.jsonl, .parquet, .csv, text, …, also .gz and .zst), folders, patterns, hf://…, or
            `stdlib`: the Python standard library's source; `llm-pretrain prepare --help` lists them.
        output: New folder to write.
        vocab_size: Exact size of the vocabulary, special tokens included; for char it may be left out, and is
            a maximum: the rarest characters become bytes.
        type: Kind of tokenizer.
        on_error: A bad record is counted and left out, or stops with file and line.
        text_column: Field or column that holds a document's text.
    """
    if vocab_size is None and type != "char":
        raise ConfigError(f"--vocab_size: expected a size for --type {type}, found none; add --vocab_size N")
    if vocab_size is not None and vocab_size < 1:
        raise ConfigError(f"--vocab_size: expected more than 0, found {vocab_size}")
    if vocab_size is not None and vocab_size > MAX_VOCAB_SIZE:  # libraries allocate it at once
        raise ConfigError(f"--vocab_size: expected at most {MAX_VOCAB_SIZE}, found {vocab_size}")
    folder = Path(output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder}: expected a new or empty folder, found one in use; choose another")
    texts, skipped = _read_texts(input, on_error, text_column)
    total = sum(len(text.encode()) for text in texts)
    if not total:
        raise DataError(f"{', '.join(input)}: expected text, found none")
    sample = min(1.0, SAMPLE_BYTES / total)
    content, model = _build(type, texts, sample, vocab_size)
    _write(folder, content, model, chat=type != "char")
    tokenizer = open_tokenizer(folder)
    checked = texts if sample == 1.0 else ["".join(_blocks(text, sample)) for text in texts]
    counts, altered = _measure(tokenizer, checked)
    sampled = sum(len(text.encode()) for text in checked)
    return TokenizerReport(
        vocab_size=tokenizer.vocab_size,
        documents=len(texts),
        text_bytes=total,
        sampled_bytes=sampled,
        bytes_per_token=sampled / max(1, int(counts.sum())),
        scripts=_scripts(tokenizer, counts),
        altered_documents=altered,
        skipped=dict(skipped),
    )


def _build(
    type: str, texts: Sequence[str], sample: float, vocab_size: int | None
) -> tuple[dict[str, Any], bytes | None]:
    if type == "char":
        return build_character(texts, vocab_size)
    assert vocab_size is not None
    blocks = (block for text in texts for block in _blocks(text, sample))
    if type == "sentencepiece-bpe":
        return build_sentencepiece_bpe(blocks, vocab_size)
    if type == "sentencepiece-unigram":
        return build_sentencepiece_unigram(blocks, vocab_size)
    if type == "bytelevel-bpe":
        return build_bytelevel_bpe(blocks, vocab_size)
    raise ConfigError(f"--type: expected one of {', '.join(get_args(TokenizerType))}, found {type}")


def _write(folder: Path, content: dict[str, Any], model: bytes | None, *, chat: bool) -> None:
    """Writes the folder under a temporary name and renames it when complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.tmp-{uuid.uuid4().hex[:8]}")
    try:
        write_files(temporary, content, chat=chat, model=model)
        if folder.exists():
            folder.rmdir()
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _read_texts(inputs: Sequence[str], on_error: str, text_column: str) -> tuple[list[str], Counter[str]]:
    texts: list[str] = []
    skipped: Counter[str] = Counter()
    for record in read_records(inputs, text_column=text_column):
        try:
            text = parse_record(record, text_column).text()
        except RecordError as bad:
            if on_error == "fail" and bad.cause != EMPTY:
                raise DataError(f"{bad}; correct it, or leave such records out with --on_error skip") from bad
            skipped[bad.cause] += 1
            continue
        if text:
            texts.append(text)
        else:
            skipped["record without text"] += 1  # token ids alone
    return texts, skipped


def _blocks(text: str, sample: float) -> Iterator[str]:
    """Blocks of whole lines of about `_BLOCK_CHARACTERS`; the share `sample` of them, chosen by hash."""
    block: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        for start in range(0, len(line), 2 * _BLOCK_CHARACTERS):
            part = line[start : start + 2 * _BLOCK_CHARACTERS]
            block.append(part)
            size += len(part)
            if size >= _BLOCK_CHARACTERS:
                yield from _sampled("".join(block), sample)
                block, size = [], 0
    if block:
        yield from _sampled("".join(block), sample)


def _sampled(block: str, sample: float) -> Iterator[str]:
    if sample == 1.0 or zlib.crc32(block.encode()) < sample * (1 << 32):
        yield block


def _measure(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[np.ndarray, int]:
    """(occurrences of each id in all texts, number of texts that decoding does not restore)."""
    counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    altered = 0
    for start in range(0, len(texts), 256):
        part = texts[start : start + 256]
        for text, ids in zip(part, tokenizer.encode(part), strict=True):
            counts += np.bincount(np.array(ids, dtype=np.int64), minlength=len(counts))
            altered += tokenizer.decode(ids) != text
    return counts, altered


def _scripts(tokenizer: Tokenizer, counts: np.ndarray) -> tuple[ScriptShare, ...]:
    tokens: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for piece, count in zip(tokenizer.token_pieces(), counts.tolist(), strict=True):
        if count:
            script = _script(piece)
            tokens[script] += count
            sizes[script] += count * len(piece)
    total = max(1, sum(tokens.values()))
    return tuple(
        ScriptShare(script, count / total, sizes[script] / count) for script, count in tokens.most_common()
    )


def _script(piece: bytes) -> str:
    """The script of a piece's first letter, which is the first word of the letter's Unicode name."""
    try:
        text = piece.decode("utf-8")
    except UnicodeDecodeError:
        return "parts of characters"
    letter = next((character for character in text if character.isalpha()), None)
    if letter is None:
        return "spaces, digits, signs"
    script = unicodedata.name(letter, "").split(" ")[0].split("-")[0]
    script = script if script == "CJK" else script.capitalize()
    return script if script in _SCRIPTS else "other letters"
