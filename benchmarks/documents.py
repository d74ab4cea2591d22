"""Documents of lognormal length as a token store and as lists of ids, the same for every side.

Ids are drawn by Zipf's law, seeded: what a step costs does not depend on what a text says. No language.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llm_pretrain.data.store import TokenStore
from llm_pretrain.data.store_writer import StoreWriter
from llm_pretrain.data.tokenizer_training import train_tokenizer
from llm_pretrain.data.tokenizers import open_tokenizer

MEDIAN, SIGMA = 250, 0.8
_FIRST_CHARACTER = 0x20000
"""From here on there are enough code points for a vocabulary of one character each."""


@dataclass(frozen=True)
class Documents:
    """A corpus: `lengths` [documents] and `ids`, all documents joined, each from its BOS to its EOS."""

    lengths: np.ndarray
    ids: np.ndarray

    @classmethod
    def lognormal(cls, count: int, vocab_size: int, *, seed: int = 0) -> Documents:
        """`count` documents of a median of 250 tokens and sigma 0.8, special tokens included."""
        generator = np.random.default_rng(seed)
        drawn = generator.lognormal(math.log(MEDIAN), SIGMA, count)
        lengths = np.maximum(8, drawn.round()).astype(np.int64)
        ranks = np.arange(1, vocab_size - 3)
        weights = 1.0 / (ranks + 2.7)
        ids = 3 + generator.choice(ranks, size=int(lengths.sum()), p=weights / weights.sum())
        ends = np.cumsum(lengths)
        ids[ends - 1] = 2  # EOS; BOS is 1 and padding 3, as in every tokenizer of ours
        ids[ends - lengths] = 1
        return cls(lengths, ids.astype(np.int64))

    def split(self) -> list[np.ndarray]:
        """Each document's ids."""
        return np.split(self.ids, np.cumsum(self.lengths)[:-1])


def make_tokenizer(folder: Path, vocab_size: int) -> Path:
    """A tokenizer of `vocab_size` tokens, made in a moment: a character each."""
    text = folder.with_suffix(".txt")
    characters = vocab_size - 260  # the special tokens and all bytes
    text.write_text("".join(chr(_FIRST_CHARACTER + number) for number in range(characters)), encoding="utf-8")
    train_tokenizer([str(text)], folder, None, type="char")
    text.unlink()
    return folder


def make_store(folder: Path, documents: Documents, vocab_size: int) -> TokenStore:
    """A token store of the documents at `folder`, its tokenizer beside it; the last of them to validate."""
    tokenizer = open_tokenizer(make_tokenizer(folder.with_name(folder.name + "-tokenizer"), vocab_size))
    held_out = max(1, len(documents.lengths) // 100)
    cut = len(documents.lengths) - held_out
    edge = int(documents.lengths[:cut].sum())
    with StoreWriter(folder, tokenizer) as writer:
        halves = (slice(None, cut), slice(None, edge)), (slice(cut, None), slice(edge, None))
        for name, (rows, tokens) in zip(("train", "validation"), halves, strict=True):
            ids = documents.ids[tokens]
            mask = np.ones(len(ids), dtype=np.bool_)
            lengths, hashes = documents.lengths[rows], np.arange(len(documents.lengths))[rows]
            writer.splits[name].append(ids, lengths, mask, 3 * len(ids), hashes)
        writer.commit({"zlib_bits_per_byte": None})
    return TokenStore(folder)
