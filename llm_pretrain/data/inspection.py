"""Statistics and decoded samples of a token store."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from llm_pretrain.data.packing import pack
from llm_pretrain.data.store import TokenStore, check_ids
from llm_pretrain.data.tokenizers import Tokenizer
from llm_pretrain.errors import ConfigError

PACKINGS = ("best_fit", "concat", "pad")
SAMPLE_TOKENS = 300
"""Maximum number of tokens that a sample shows of its document."""


@dataclass(frozen=True)
class SamplePart:
    """Consecutive tokens of a document that are all targets of the loss, or all masked."""

    text: str
    masked: bool


@dataclass(frozen=True)
class Sample:
    """The first `shown` tokens of a document: its index in `split` is `document`, its length `tokens`."""

    split: str
    document: int
    tokens: int
    shown: int
    parts: tuple[SamplePart, ...]


def inspect_store(store: TokenStore, sequence_length: int) -> dict[str, Any]:
    """Statistics of a store, serialisable as JSON.

    Lengths are in tokens and include BOS and EOS. A split's `packing` maps each packing to its number of
    sequences of `sequence_length` and its `efficiency`: the share of their positions that hold a token.
    Raises DataError for a damaged store, ConfigError for a `sequence_length` below 1.
    """
    if sequence_length < 1:
        raise ConfigError(f"--sequence_length: expected 1 or more, found {sequence_length}")
    facts = store.facts
    return {
        "store": str(store.path),
        "hash": store.hash,
        "package_version": facts.get("package_version"),
        "dtype": {"<u2": "uint16", "<u4": "uint32"}[facts["dtype"]],
        "bytes_on_disk": sum(file["bytes"] for file in facts["files"].values()),
        "inputs": facts.get("inputs", []),
        "input_documents": facts.get("input_documents"),
        "validation_fraction": facts.get("validation_fraction"),
        "skipped": facts.get("skipped", {}),
        "duplicates": facts.get("duplicates", 0),
        "altered_documents": facts.get("altered_documents", 0),
        "zlib_bits_per_byte": store.zlib_bits_per_byte,
        "tokenizer": _tokenizer_facts(store.tokenizer()),
        "sequence_length": sequence_length,
        "splits": {name: _split_facts(store, name, sequence_length) for name in ("train", "validation")},
    }


def _tokenizer_facts(tokenizer: Tokenizer) -> dict[str, Any]:
    named = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
    return {
        "kind": tokenizer.kind,
        "hash": tokenizer.hash,
        "vocab_size": tokenizer.vocab_size,
        "special_tokens": {tokenizer.token(index): index for index in sorted(tokenizer.special_ids)},
        **{name: None if index is None else tokenizer.token(index) for name, index in named.items()},
        "chat_template": tokenizer.chat_template is not None,
    }


def _split_facts(store: TokenStore, name: str, sequence_length: int) -> dict[str, Any]:
    split, facts = store.split(name), store.facts["splits"][name]
    counts = {name: facts[name] for name in ("documents", "tokens", "targets", "text_bytes")}
    if not split.documents:
        return counts
    lengths = np.diff(split.offsets)
    low, p95, high = np.percentile(lengths, [0, 95, 100], method="nearest").tolist()
    median = float(np.median(lengths))
    learnable = split.tokens - split.documents  # a document's first token is never a target
    return counts | {
        "masked_share": 1 - facts["targets"] / learnable if learnable else 0.0,
        "bytes_per_token": split.text_bytes / split.tokens,
        "lengths": {"min": low, "median": median, "mean": float(lengths.mean()), "p95": p95, "max": high},
        "histogram": _histogram(lengths),
        "packing": {name: _packing(split.offsets, sequence_length, name) for name in PACKINGS},
    }


def _histogram(lengths: np.ndarray) -> list[dict[str, int]]:
    """Counts documents by length in classes 1, 2-3, 4-7, …, from the shortest to the longest document."""
    classes = np.floor(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    counts = np.bincount(classes)
    first = int(classes.min())
    return [
        {"from": 1 << k, "to": (2 << k) - 1, "documents": int(counts[k])} for k in range(first, len(counts))
    ]


def _packing(offsets: np.ndarray, sequence_length: int, packing: str) -> dict[str, Any]:
    index = pack(offsets, sequence_length, packing)
    places = len(index) * sequence_length
    used = int(index.piece_length.sum(dtype=np.int64))
    return {"sequences": len(index), "efficiency": used / places if places else 0.0}


def sample_documents(store: TokenStore, count: int, seed: int, split: str = "train") -> Iterator[Sample]:
    """Draws `count` distinct documents of a split with `seed`; decodes them in masked and unmasked parts."""
    if count < 0:
        raise ConfigError(f"--samples: expected 0 or more, found {count}")
    documents = store.split(split)
    tokenizer = store.tokenizer()
    chosen = np.random.default_rng(seed).choice(
        documents.documents, size=min(count, documents.documents), replace=False
    )
    for index in chosen.tolist():
        ids, mask = documents.document(index)
        check_ids(ids, tokenizer.vocab_size, str(store.path / split), int(documents.offsets[index]))
        parts = decoded_parts(tokenizer, ids[:SAMPLE_TOKENS], mask[:SAMPLE_TOKENS])
        yield Sample(split, index, len(ids), min(len(ids), SAMPLE_TOKENS), tuple(parts))


def decoded_parts(tokenizer: Tokenizer, ids: np.ndarray, mask: np.ndarray) -> Iterator[SamplePart]:
    """The text of tokens, special ones by their names, cut where the loss `mask` (bool [tokens]) changes."""
    pieces = _pieces_of(tokenizer)
    for target, group in groupby(zip(ids.tolist(), mask.tolist(), strict=True), key=lambda pair: pair[1]):
        text = b"".join(
            tokenizer.token(token).encode() if token in tokenizer.special_ids else pieces[token]
            for token, _ in group
        )
        yield SamplePart(text.decode("utf-8", errors="replace"), not target)


@functools.lru_cache(maxsize=4)
def _pieces_of(tokenizer: Tokenizer) -> list[bytes]:
    return tokenizer.token_pieces()
