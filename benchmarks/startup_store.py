"""A large token store of no meaning, for the benchmark `startup`. No benchmark by itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from llm_pretrain.data.store_writer import StoreWriter
from llm_pretrain.data.tokenizers import open_tokenizer

_AT_ONCE = 10_000_000


def write_large_store(folder: Path, tokenizer_folder: Path, tokens: int) -> int:
    """Writes `tokens` random ids in documents of lognormal length (median 250, sigma 0.8); counts these."""
    generator = np.random.default_rng(0)
    tokenizer = open_tokenizer(tokenizer_folder)
    ids = generator.integers(0, tokenizer.vocab_size, _AT_ONCE)
    with StoreWriter(folder, tokenizer) as writer:
        train = writer.splits["train"]
        while train.tokens < tokens:
            lengths = np.maximum(2, generator.lognormal(np.log(250), 0.8, 40_000)).astype(np.int64)
            lengths = lengths[lengths.cumsum() <= min(_AT_ONCE, tokens - train.tokens + 500)]
            if not len(lengths):
                break
            size = int(lengths.sum())
            mask = np.ones(size, dtype=np.bool_)
            train.append(ids[:size], lengths, mask, size, train.documents + np.arange(len(lengths)))
        mask, apart = np.ones(500, dtype=np.bool_), np.array([train.documents])
        writer.splits["validation"].append(ids[:500], np.array([500]), mask, 500, apart)
        documents = train.documents
        writer.commit({"zlib_bits_per_byte": None})
    return documents
