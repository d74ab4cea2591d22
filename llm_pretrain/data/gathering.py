"""Reads the pieces of a micro batch's sequences out of their stores: token ids, the next ones, loss mask.

Numpy asks more for a call than to copy a piece, so pieces are cut as memory views, joined for all rows at
once, and looked at by numpy only then. Knows nothing of tensors, slots or digests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llm_pretrain.data.packing import PackedIndex
from llm_pretrain.data.token_store import TokenStore
from llm_pretrain.errors import DataError


@dataclass(frozen=True, slots=True)
class PackedSource:
    """One split of a store, packed."""

    store: TokenStore
    split: str
    index: PackedIndex


@dataclass(slots=True)
class Gathered:
    """The rows of a micro batch, one behind the other; a row's padding is a piece, its last.

    `tokens` [2, B·S], of the stores' type and read-only, are the ids and the ids that follow each in its
    document. `loss_mask` bool [B·S] says which of these are targets. `lengths` int64 [P] are the pieces',
    `starts` int64 [P] the places at which they begin, `numbers` int64 [P] count them within their row, and
    `is_padding` is bool [P]. `positions` int64 [B·S] count from every piece's start.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    lengths: np.ndarray
    starts: np.ndarray
    numbers: np.ndarray
    is_padding: np.ndarray
    positions: np.ndarray


class Gatherer:
    """Reads rows of `sequence_length` tokens; `pad_id` fills what documents leave of one.

    Raises DataError for sources whose token ids are of different types.
    """

    def __init__(self, sources: Sequence[PackedSource], sequence_length: int, pad_id: int):
        self._length = sequence_length
        self._dtype = np.dtype(sources[0].store.facts["dtype"])
        for source in sources:
            if source.store.facts["dtype"] != self._dtype.str:
                raise DataError(
                    f"{source.store.path}: expected token ids of {self._dtype.itemsize} bytes, as in "
                    f"{sources[0].store.path}, found others; prepare both with one tokenizer"
                )
        self._sources = [_Source(source) for source in sources]
        self._padding = np.full(sequence_length, pad_id, self._dtype).data
        self._has_mask = any(source.mask is not None for source in self._sources)
        self._counting = np.arange(0)

    def gather(self, samples: Sequence[tuple[int, int]]) -> Gathered:
        """The rows of `samples`, (source, sequence) each. Raises DataError for a broken index."""
        ids: list[memoryview] = []
        labels: list[memoryview] = []
        columns: tuple[list[int], list[int], list[int]] = [], [], []
        first_tokens, lengths, numbers = columns
        padding: list[int] = []
        for k, sequence in samples:
            source = self._sources[k]
            begin, sizes = source.pieces(sequence)
            source.add_tokens(begin, sizes, ids, labels)
            rest = self._length - sum(sizes)
            if rest > 0:
                padding.append(len(lengths) + len(sizes))
                ids.append(self._padding[:rest])
                labels.append(self._padding[:rest])
                begin.append(0)
                sizes.append(rest)
            elif rest:
                raise source.broken()
            first_tokens += begin
            lengths += sizes
            numbers += range(len(sizes))
        size = len(samples) * self._length
        tokens = np.frombuffer(b"".join(ids + labels), self._dtype)
        if len(tokens) != 2 * size:
            raise self._sources[samples[0][0]].broken()
        where, length, number = np.array(columns)
        is_padding = np.zeros(len(length), dtype=np.bool_)
        is_padding[padding] = True
        start = length.cumsum() - length
        positions = start.repeat(length)
        np.subtract(self._places(size), positions, out=positions)
        mask = (~is_padding).repeat(length)
        if self._has_mask:
            where += 1
            following = where.repeat(length)
            following += positions
            self._mask_labels(mask, samples, following)
        return Gathered(tokens.reshape(2, size), mask, length, start, number, is_padding, positions)

    def _places(self, size: int) -> np.ndarray:
        """0 … size - 1, kept from call to call."""
        if len(self._counting) < size:
            self._counting = np.arange(size)
        return self._counting[:size]

    def _mask_labels(
        self, loss_mask: np.ndarray, samples: Sequence[tuple[int, int]], where: np.ndarray
    ) -> None:
        """Takes labels that are no targets out of the mask; they are tokens `where` [B·S] of their splits."""
        drawn = {k for k, _ in samples} if len(self._sources) > 1 else {0}
        for k in drawn:
            mask = self._sources[k].mask
            if mask is None:
                continue
            if len(drawn) == 1:
                loss_mask &= _bits_at(mask, where)
                continue
            of_source = np.repeat([each == k for each, _ in samples], self._length)
            loss_mask[of_source] &= _bits_at(mask, where[of_source])


def _bits_at(mask: np.ndarray, where: np.ndarray) -> np.ndarray:
    """bool [n]: the bits `where` int64 [n] of the bytes `mask`, the first of each byte in its lowest bit."""
    bits = mask.take(where >> 3, mode="wrap")  # a row's padding may look for bits behind the last, in vain
    bits >>= where.astype(np.uint8) & 7
    bits &= 1
    return bits.view(np.bool_)


class _Source:
    """One packed split: its index and shards as memory views, the bytes of its loss mask or None."""

    def __init__(self, source: PackedSource):
        split, index = source.store.split(source.split), source.index
        self._path = source.store.path
        self._shards = [shard.data for shard in split.shards]
        self._following = self._shards[0][1:] if self._shards else memoryview(b"")
        self._shard_starts = split.shard_starts
        self._offsets = index.sequence_offsets.data
        self._starts, self._lengths = index.piece_start.data, index.piece_length.data
        self.mask = split.mask_bytes if split.has_mask else None

    def pieces(self, sequence: int) -> tuple[list[int], list[int]]:
        """First tokens and lengths of a sequence's pieces."""
        first, last = self._offsets[sequence], self._offsets[sequence + 1]
        return self._starts[first:last].tolist(), self._lengths[first:last].tolist()

    def add_tokens(
        self, starts: list[int], sizes: list[int], ids: list[memoryview], labels: list[memoryview]
    ) -> None:
        """Appends each piece's ids, and those that follow them."""
        if len(self._shards) == 1:
            shard, following = self._shards[0], self._following
            for start, size in zip(starts, sizes, strict=True):
                ids.append(shard[start : start + size])
                labels.append(following[start : start + size])
            return
        numbers = (self._shard_starts.searchsorted(starts, side="right") - 1).tolist()
        bases = self._shard_starts[numbers].tolist()
        for start, size, number, base in zip(starts, sizes, numbers, bases, strict=True):
            shard, begin = self._shards[number], start - base
            ids.append(shard[begin : begin + size])
            labels.append(shard[begin + 1 : begin + size + 1])

    def broken(self) -> DataError:
        return DataError(
            f"{self._path / 'index'}: expected pieces of the store's documents, found others; remove it"
        )
