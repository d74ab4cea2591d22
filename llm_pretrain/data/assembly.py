"""Assembles packed sequences into micro batches and computes the digest of every sample.

Shapes: B sequences per micro batch, S tokens per sequence, P pieces (and paddings) in a group of rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from llm_pretrain.data.packing import PackedIndex
from llm_pretrain.data.store import TokenStore
from llm_pretrain.errors import DataError


def digest_head(slot: int, store: TokenStore, sequence: int) -> bytes:
    """The bytes hashed first for a sample: its slot in the global batch, store hash, sequence number."""
    return f"{slot}/{store.hash}/{sequence}/".encode()


class Contents:
    """Buffer of B samples in one array, laid out so that one call hashes a sample.

    The caller fills in `input_ids` and `labels`, int32 [B, S]. Labels are shifted, and are -100 where masked.
    """

    def __init__(self, samples: int, sequence_length: int):
        self._mask_start = 8 * sequence_length
        self._size = self._mask_start + (sequence_length + 7) // 8
        self._words = np.empty((samples, (self._size + 3) // 4), dtype="<i4")
        self.input_ids = self._words[:, :sequence_length]
        self.labels = self._words[:, sequence_length : 2 * sequence_length]

    def digests(self, heads: Sequence[bytes], loss_mask: np.ndarray) -> np.ndarray:
        """Returns the SHA-256 of each sample as eight words, int64 [B, 8]; `digest_head` makes `heads`."""
        data = self._words.view(np.uint8)
        data[:, self._mask_start : self._size] = np.packbits(loss_mask, axis=1)
        rows, stride = data.reshape(-1).data, data.shape[1]
        words = bytearray()
        for start, head in zip(range(0, len(rows), stride), heads, strict=True):
            sample = hashlib.sha256(head)
            sample.update(rows[start : start + self._size])
            words += sample.digest()
        return np.frombuffer(words, dtype=">u4").astype(np.int64).reshape(-1, 8)


@dataclass(frozen=True, slots=True)
class PackedSource:
    """A packed split of a store."""

    store: TokenStore
    split: str
    index: PackedIndex


@dataclass(slots=True)
class Gathered:
    """The rows of a micro batch, concatenated; the padding of a row counts as its last piece.

    Per token: `tokens` [2, B·S] (input ids, then labels; read-only, of the store's type), `loss_mask` bool
    [B·S], and `positions` int64 [B·S], counted from the start of the piece. Per piece, [P]: `lengths` and
    `starts` int64, `numbers` int64 (index of the piece in its row), `is_padding` bool.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    lengths: np.ndarray
    starts: np.ndarray
    numbers: np.ndarray
    is_padding: np.ndarray
    positions: np.ndarray


class Gatherer:
    """Reads rows of `sequence_length` tokens from packed sources; `pad_id` fills the rest of a row.

    It slices pieces as memory views and joins them once for all rows: a numpy call per piece is slower.
    Raises DataError for sources whose token ids have different types.
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
        self._arange = np.arange(0)

    def gather(self, samples: Sequence[tuple[int, int]]) -> Gathered:
        """Reads one row for each (source, sequence) in `samples`. Raises DataError for a broken index."""
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
        if len(self._arange) < size:
            self._arange = np.arange(size)
        np.subtract(self._arange[:size], positions, out=positions)
        mask = (~is_padding).repeat(length)
        if self._has_mask:
            where += 1
            following = where.repeat(length)
            following += positions
            self._mask_labels(mask, samples, following)
        return Gathered(tokens.reshape(2, size), mask, length, start, number, is_padding, positions)

    def _mask_labels(
        self, loss_mask: np.ndarray, samples: Sequence[tuple[int, int]], where: np.ndarray
    ) -> None:
        """Clears `loss_mask` for labels that are no targets; `where` [B·S]: their positions in the split."""
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
    """Returns the bits at `where`, int64 [n], of the bit-packed `mask` (lowest bit first) as bool [n]."""
    bits = mask.take(where >> 3, mode="wrap")  # padding may index past the end; its value is unused
    bits >>= where.astype(np.uint8) & 7
    bits &= 1
    return bits.view(np.bool_)


class _Source:
    """A packed split: index and shards as memory views, and the bit-packed loss mask or None."""

    def __init__(self, source: PackedSource):
        split, index = source.store.split(source.split), source.index
        self._path = source.store.path
        self._shards = [shard.data for shard in split.shards]
        self._following = self._shards[0][1:] if self._shards else memoryview(b"")
        self._shard_starts = split.shard_starts
        self._offsets = index.sequence_offsets.data
        self._starts, self._lengths = index.piece_start.data, index.piece_length.data
        self.mask = split.mask

    def pieces(self, sequence: int) -> tuple[list[int], list[int]]:
        """Returns the first tokens and the lengths of the pieces of a sequence."""
        first, last = self._offsets[sequence], self._offsets[sequence + 1]
        return self._starts[first:last].tolist(), self._lengths[first:last].tolist()

    def add_tokens(
        self, starts: list[int], sizes: list[int], ids: list[memoryview], labels: list[memoryview]
    ) -> None:
        """Appends the input ids and the labels of each piece."""
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


IGNORE_INDEX = -100

_MIN_OFFSETS = 64
"""Minimum length of `Batch.document_offsets`."""


@dataclass(slots=True, eq=False)
class Batch:
    """A micro batch of B sequences of length S.

    Attributes:
        input_ids: int64 [B, S].
        position_ids: int64 [B, S].
        document_ids: int64 [B, S].
        labels: int64 [B, S], already shifted, -100 where `loss_mask` is False.
        loss_mask: bool [B, S].
        num_loss_tokens: Sum of the loss mask.
        step: Optimizer step.
        micro_batch: Index among the micro batches of the step, over all ranks.
        digest: int64 [8] on the CPU: sum over the samples of the eight 32-bit words of SHA-256(slot, store
            hash, sequence number, input ids, labels, mask). The digests of micro batches and ranks are
            added; the total is taken modulo 2^32.
        sources: int64 [B], index of each sequence's source; None with a single source.
        document_offsets: int32 (`cu_seqlens`): positions in the flattened [B·S] batch where a piece (a row
            without `isolate_documents`) or padding begins. Further entries of B·S fill the array up to a
            power of two, so that a compiled step sees few lengths.
        global_expert_counts: int64 [MoE layers, E]; training sets it if the balance loss needs it.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    document_ids: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    num_loss_tokens: int
    step: int
    micro_batch: int
    digest: torch.Tensor
    sources: torch.Tensor | None = None
    document_offsets: torch.Tensor | None = None
    global_expert_counts: torch.Tensor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, tuple(getattr(self, each.name) for each in fields(self))

    def share_memory(self) -> Batch:
        """Moves the tensors to shared memory. Raises RuntimeError if that memory is full."""
        for each in fields(self):
            if isinstance(value := getattr(self, each.name), torch.Tensor):
                value.share_memory_()
        return self

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The batch on `device`; the digest stays on the CPU."""
        if self.input_ids.device == torch.device(device):
            return self
        moved = {name: t.to(device, non_blocking=non_blocking) for name, t in self._movable().items()}
        return replace(self, **moved)

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory, for copies to a GPU that overlap with computation."""
        return replace(self, **{name: t.pin_memory() for name, t in self._movable().items()})

    def model_inputs(self) -> dict[str, Any]:
        """The keyword arguments of the decoder's forward."""
        names = ["input_ids", "position_ids", "document_ids", "labels", "loss_mask"]
        optional = ("document_offsets", "global_expert_counts")
        names += [name for name in optional if getattr(self, name) is not None]
        return {name: getattr(self, name) for name in names}

    def _movable(self) -> dict[str, torch.Tensor]:
        return self.model_inputs() | ({} if self.sources is None else {"sources": self.sources})


def _received(*values: Any) -> Batch:
    """Copies a batch from a worker: a tensor left in shared memory keeps a file open for the whole step."""
    copies: list[Any] = [value.clone() if isinstance(value, torch.Tensor) else value for value in values]
    return Batch(*copies)


class Assembler:
    """Turns (source, sequence) pairs into batches; `pad_id` fills the rest of a sequence."""

    def __init__(self, sources: Sequence[PackedSource], sequence_length: int, *, isolate_documents: bool):
        self.sources = list(sources)
        self.sequence_length = sequence_length
        self.isolate_documents = isolate_documents
        stores = [source.store for source in self.sources]
        candidates = (stores[0].pad_token_id, stores[0].eos_token_id, 0)
        self.pad_id = next(token for token in candidates if token is not None)
        self._vocab_size = min(store.vocab_size for store in stores)
        self._gatherer = Gatherer(self.sources, sequence_length, self.pad_id)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_gatherer"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._gatherer = Gatherer(self.sources, self.sequence_length, self.pad_id)

    def assemble(
        self, samples: Sequence[tuple[int, int]], *, step: int, micro_batch: int, slot: int
    ) -> Batch:
        """Makes a batch of (source, sequence) pairs; `slot`: the first sample's slot in the global batch."""
        return self.assemble_together([samples], step=step, micro_batches=[micro_batch], slots=[slot])[0]

    def assemble_together(
        self,
        parts: Sequence[Sequence[tuple[int, int]]],
        *,
        step: int,
        micro_batches: Sequence[int],
        slots: Sequence[int],
    ) -> list[Batch]:
        """Assembles a batch per part, each of equally many samples; batches are slices of common arrays."""
        shape = (len(parts), len(parts[0]), self.sequence_length)
        samples = [sample for part in parts for sample in part]
        gathered = self._gatherer.gather(samples)
        contents = Contents(len(samples), self.sequence_length)
        labels, rows = contents.labels, contents.labels.shape
        tokens, loss_mask = gathered.tokens.reshape(2, *rows), gathered.loss_mask.reshape(rows)
        self._check_ids(samples, tokens)
        contents.input_ids[:], labels[:] = tokens
        counts = [int(np.count_nonzero(part)) for part in loss_mask.reshape(shape)]
        if sum(counts) < loss_mask.size:  # sets IGNORE_INDEX where masked, in half the time of np.where
            labels -= IGNORE_INDEX
            labels *= loss_mask
            labels += IGNORE_INDEX
        heads = [
            digest_head(slot + row, self.sources[source].store, sequence)
            for part, slot in zip(parts, slots, strict=True)
            for row, (source, sequence) in enumerate(part)
        ]
        digests = contents.digests(heads, loss_mask).reshape(*shape[:2], 8).sum(axis=1)
        position_ids, document_ids, starts = self._documents(gathered, rows)
        numbers = tokens[0].astype(np.int64), position_ids, document_ids, labels.astype(np.int64)
        arrays = [array.reshape(shape) for array in (*numbers, loss_mask)]
        size = shape[1] * shape[2]
        bounds = starts.searchsorted(range(0, loss_mask.size + 1, size)).tolist()
        several = len(self.sources) > 1
        return [
            Batch(
                *[torch.from_numpy(array[k]) for array in arrays],
                num_loss_tokens=counts[k],
                step=step,
                micro_batch=micro_batches[k],
                digest=torch.from_numpy(digests[k]),
                sources=torch.tensor([source for source, _ in part]) if several else None,
                document_offsets=padded_offsets(starts[bounds[k] : bounds[k + 1]] - k * size, size),
            )
            for k, part in enumerate(parts)
        ]

    def _documents(
        self, gathered: Gathered, shape: tuple[int, int]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Position ids and document ids, int64 [B·S], and the offsets where documents and padding begin.

        Without `isolate_documents`, the tokens of a row before its padding are one document.
        """
        if self.isolate_documents:
            return gathered.positions, gathered.numbers.repeat(gathered.lengths), gathered.starts
        first = gathered.is_padding | (gathered.numbers == 0)
        document_ids = gathered.is_padding.astype(np.int64).repeat(gathered.lengths)
        return np.tile(np.arange(shape[1]), shape[0]), document_ids, gathered.starts[first]

    def _check_ids(self, samples: Sequence[tuple[int, int]], tokens: np.ndarray) -> None:
        """Raises DataError for an id outside the vocabulary: opening a large store does not check all ids."""
        if int(tokens.max()) < self._vocab_size:
            return
        for found, (source, sequence) in zip(tokens.max(axis=(0, 2)).tolist(), samples, strict=True):
            packed = self.sources[source]
            if found >= packed.store.vocab_size:
                raise DataError(
                    f"{packed.store.path}: expected token ids below vocab_size {packed.store.vocab_size}, "
                    f"found {found} in sequence {sequence} of {packed.split}; prepare the store again"
                )


def padded_offsets(starts: np.ndarray, end: int) -> torch.Tensor:
    """Makes `Batch.document_offsets` from the start of every piece; `end` is B·S."""
    count = max(_MIN_OFFSETS, 1 << len(starts).bit_length())  # at least one entry is `end`
    offsets = np.empty(count, dtype=np.int32)
    offsets[: len(starts)] = starts
    offsets[len(starts) :] = end
    return torch.from_numpy(offsets)
