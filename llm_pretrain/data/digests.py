"""Digests of samples: what says, when a run is looked at later, that it trained on what it should have."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from llm_pretrain.data.token_store import TokenStore


def digest_head(slot: int, store: TokenStore, sequence: int) -> bytes:
    """What a sample's digest begins with: its slot in the global batch, its store, its sequence there."""
    return f"{slot}/{store.hash}/{sequence}/".encode()


class Contents:
    """What is digested of B samples, laid out so that each is hashed at one go.

    `input_ids` and `labels` int32 [B, S], the latter shifted and -100 where masked, are to be filled in.
    """

    def __init__(self, samples: int, sequence_length: int):
        self._mask_start = 8 * sequence_length
        self._size = self._mask_start + (sequence_length + 7) // 8
        self._words = np.empty((samples, (self._size + 3) // 4), dtype="<i4")
        self.input_ids = self._words[:, :sequence_length]
        self.labels = self._words[:, sequence_length : 2 * sequence_length]

    def digests(self, heads: Sequence[bytes], loss_mask: np.ndarray) -> np.ndarray:
        """SHA-256 of each sample, int64 [B, 8], by its `digest_head` and its mask, one of bool [B, S]."""
        data = self._words.view(np.uint8)
        data[:, self._mask_start : self._size] = np.packbits(loss_mask, axis=1)
        rows, stride = data.reshape(-1).data, data.shape[1]
        words = bytearray()
        for start, head in zip(range(0, len(rows), stride), heads, strict=True):
            sample = hashlib.sha256(head)
            sample.update(rows[start : start + self._size])
            words += sample.digest()
        return np.frombuffer(words, dtype=">u4").astype(np.int64).reshape(-1, 8)
