"""The order of samples: a pure function of (seed, sample number) in constant memory."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from llm_pretrain.errors import DataError

BLOCK = 1024
"""Samples per block of a mixture; every block has exactly the configured proportions."""

_ROUNDS = 8
_MIN_BITS = 6
_U64 = np.uint64


def permutation(n: int, indices: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Maps `indices` int64 [k], each in 0..n-1, by a pseudo-random bijection of 0..n-1.

    The bijection is a Feistel network over the smallest power of two that is at least n and 64, with cycle
    walking: values outside 0..n-1 are mapped again (Black and Rogaway 2002, "Ciphers with arbitrary finite
    domains", section 3). `keys` uint64 [rounds, k]: round keys of each index; they choose its bijection.
    """
    bits = max(_MIN_BITS, (n - 1).bit_length())
    values = indices.astype(np.uint64)
    pending = np.arange(len(values))
    while len(pending):
        values[pending] = _feistel(values[pending], keys[:, pending], bits)
        pending = pending[values[pending] >= n]
    return values.astype(np.int64)


def _feistel(values: np.ndarray, keys: np.ndarray, bits: int) -> np.ndarray:
    """One pass of an alternating Feistel network over `bits` bits, in two halves."""
    low_bits, high_bits = bits // 2, bits - bits // 2
    high, low = values >> _U64(low_bits), values & _U64((1 << low_bits) - 1)
    for round_index, key in enumerate(keys):
        if round_index % 2 == 0:
            high = high ^ (_mix(low ^ key) >> _U64(64 - high_bits))
        else:
            low = low ^ (_mix(high ^ key) >> _U64(64 - low_bits))
    return (high << _U64(low_bits)) | low


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014), modulo 2^64."""
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return x ^ (x >> _U64(31))


@lru_cache(maxsize=4096)
def _round_keys(purpose: str, seed: int, number: int) -> np.ndarray:
    digest = hashlib.blake2b(f"{purpose}/{seed}/{number}".encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def shuffled(purpose: str, seed: int, n: int, numbers: np.ndarray) -> np.ndarray:
    """permutation(seed, number // n)[number % n] for each of `numbers` int64 [k]: an order per epoch."""
    epochs, inverse = np.unique(numbers // n, return_inverse=True)
    keys = np.stack([_round_keys(purpose, seed, epoch) for epoch in epochs.tolist()], axis=1)
    return permutation(n, numbers % n, keys[:, inverse])


@dataclass(frozen=True)
class MixtureSegment:
    """Consecutive blocks that are drawn with the same weights.

    Args:
        start: Number of the first block; the segment ends where the next one starts.
        quotas: Samples of each source per block; their sum is BLOCK.
        drawn: Samples of each source in all earlier blocks.
    """

    start: int
    quotas: list[int]
    drawn: list[int]


class SampleOrder:
    """Maps sample numbers (0, 1, 2, … without end) to sequences of sources.

    With one source of n sequences, sample g is sequence permutation(seed, g // n)[g % n]. In a mixture, each
    block of 1024 samples has exactly the quota of each source, at pseudo-random positions. The samples of a
    source are its sequences in a permuted order of this source. Changed weights start a new segment at the
    start of a block; every source then continues its order.

    Args:
        lengths: Sequences of each source.
        weights: Relative weights of the sources; 0 leaves one out.
        seed: Seed of the order.
        changes: (first block, weights) of each further segment, ascending; if several start at one block,
            the last one is used.

    Raises:
        DataError: an empty source, or a positive weight below one sample per block.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        weights: Sequence[float],
        seed: int,
        changes: Sequence[tuple[int, Sequence[float]]] = (),
    ):
        for k, length in enumerate(lengths):
            if length < 1:
                raise DataError(f"data.sources[{k}]: expected a train split with sequences, found none")
        self._arguments = (list(lengths), list(weights), seed, list(changes))
        self._lengths = list(lengths)
        self._seed = seed
        self.segments = [MixtureSegment(0, _quotas(weights, "data.sources[{}].weight"), [0] * len(lengths))]
        for j, (start, changed) in enumerate(changes):
            before = self.segments[-1]
            pairs = zip(before.drawn, before.quotas, strict=True)
            drawn = [count + (start - before.start) * quota for count, quota in pairs]
            quotas = _quotas(changed, f"data.weight_changes[{j}].weights[{{}}]")
            self.segments.append(MixtureSegment(start, quotas, drawn))
        self._block = lru_cache(maxsize=8)(self._compute_block)

    def __getitem__(self, number: int) -> tuple[int, int]:
        """(source, sequence) of a sample number."""
        sources, sequences = self._block(number // BLOCK)
        place = number % BLOCK
        return int(sources[place]), int(sequences[place])

    def drawn(self, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """(source, sequence) of each of `numbers`; this is fastest if `numbers` are consecutive."""
        block, place = divmod(numbers[0], BLOCK)
        stop = place + len(numbers)
        if stop > BLOCK or list(numbers) != list(range(numbers[0], numbers[0] + len(numbers))):
            return [self[number] for number in numbers]
        sources, sequences = self._block(block)
        return list(zip(sources[place:stop].tolist(), sequences[place:stop].tolist(), strict=True))

    def samples(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """(sources, sequences), int64 [stop - start] each, of the sample numbers start … stop - 1."""
        blocks = range(start // BLOCK, max(start // BLOCK + 1, block_at(stop)))
        parts = [self._compute_block(block) for block in blocks]
        kept = slice(start - blocks.start * BLOCK, stop - blocks.start * BLOCK)
        sources, sequences = (np.concatenate(arrays)[kept] for arrays in zip(*parts, strict=True))
        return sources, sequences

    def counts(self, stop: int) -> list[int]:
        """Samples of each source among the sample numbers 0 … stop - 1."""
        block, place = divmod(stop, BLOCK)
        segment = self._segment(block)
        started = np.bincount(self._block(block)[0][:place], minlength=len(self._lengths)).tolist()
        columns = zip(segment.drawn, segment.quotas, started, strict=True)
        return [drawn + (block - segment.start) * quota + more for drawn, quota, more in columns]

    def _segment(self, block: int) -> MixtureSegment:
        return self.segments[bisect_right(self.segments, block, key=lambda each: each.start) - 1]

    def _compute_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """(sources, sequences) of a block, int64 [BLOCK] each."""
        segment = self._segment(block)
        if BLOCK in segment.quotas:
            k = segment.quotas.index(BLOCK)
            numbers = segment.drawn[k] + (block - segment.start) * BLOCK + np.arange(BLOCK, dtype=np.int64)
            sequences = shuffled(f"source {k}", self._seed, self._lengths[k], numbers)
            return np.full(BLOCK, k, dtype=np.int64), sequences
        places = np.arange(block * BLOCK, (block + 1) * BLOCK, dtype=np.int64)
        drawn = shuffled("block", self._seed, BLOCK, places)
        sources = np.searchsorted(np.cumsum(segment.quotas), drawn, side="right")
        sequences = np.empty(BLOCK, dtype=np.int64)
        for k, (length, quota) in enumerate(zip(self._lengths, segment.quotas, strict=True)):
            if quota:
                first = segment.drawn[k] + (block - segment.start) * quota
                numbers = first + np.arange(quota, dtype=np.int64)
                sequences[sources == k] = shuffled(f"source {k}", self._seed, length, numbers)
        return sources, sequences

    def __reduce__(self):
        return SampleOrder, self._arguments


def block_at(sample: int) -> int:
    """Number of the first block that starts at or after sample number `sample`."""
    return -(-sample // BLOCK)


def _quotas(weights: Sequence[float], name: str) -> list[int]:
    """Samples of each source per block, rounded by largest remainder to a sum of BLOCK."""
    exact = [BLOCK * (weight / sum(weights)) for weight in weights]  # BLOCK times a weight may be infinite
    quotas = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda k: (quotas[k] - exact[k], k))
    for k in by_remainder[: BLOCK - sum(quotas)]:
        quotas[k] += 1
    for k, quota in enumerate(quotas):
        if quota == 0 and weights[k] > 0:
            raise DataError(
                f"{name.format(k)}: expected at least 1/{BLOCK} of all weights, "
                f"found {weights[k] / sum(weights):.2g} of them; raise it or leave the source out"
            )
    return quotas
