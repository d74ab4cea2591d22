"""Assembles packed sequences into the arrays of a micro batch, and digests what it assembled.

Knows nothing of steps, ranks or the order of samples: which sequences, in which slots, is given.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from llm_pretrain.data.packing import PackedIndex
from llm_pretrain.data.token_store import TokenStore
from llm_pretrain.errors import DataError

IGNORE_INDEX = -100

_LEAST_OFFSETS = 64
"""Entries of `Batch.document_offsets`, at least."""


@dataclass(slots=True, eq=False)
class Batch:
    """A micro batch of B sequences of length S.

    `input_ids, position_ids, document_ids, labels` int64 [B, S]; labels are already shifted, and -100 where
    `loss_mask` bool [B, S] is False. `num_loss_tokens` is the mask's sum. `micro_batch` numbers the micro
    batches of a step over all ranks. `digest` int64 [8], on the CPU: the sum over the samples of the eight
    32-bit words of SHA-256(slot, store hash, sequence number, input ids, labels, mask); sums over micro
    batches and ranks combine, and are taken modulo 2^32 at the end. `sources` int64 [B] are the numbers of
    the sources that the sequences come from, None where there is one source only. `document_offsets` int32
    are the places in the flattened [B·S] batch at which a document's piece or padding begins, first 0, and
    B·S repeated up to a power of two of them: a compiled step sees few lengths. `global_expert_counts`
    int64 [MoE layers, E] are put in by training alone, where the balance loss asks for them.
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

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The batch on `device`; the digest stays where it is."""
        if self.input_ids.device == torch.device(device):
            return self
        moved = {name: t.to(device, non_blocking=non_blocking) for name, t in self._movable().items()}
        return replace(self, **moved)

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory, from which copies to a GPU can overlap."""
        return replace(self, **{name: t.pin_memory() for name, t in self._movable().items()})

    def model_inputs(self) -> dict[str, Any]:
        """The keyword arguments of the decoder's forward."""
        names = ["input_ids", "position_ids", "document_ids", "labels", "loss_mask"]
        optional = ("document_offsets", "global_expert_counts")
        names += [name for name in optional if getattr(self, name) is not None]
        return {name: getattr(self, name) for name in names}

    def _movable(self) -> dict[str, torch.Tensor]:
        return self.model_inputs() | ({} if self.sources is None else {"sources": self.sources})


@dataclass(frozen=True, slots=True)
class PackedSource:
    """One split of a store, packed."""

    store: TokenStore
    split: str
    index: PackedIndex


class Assembler:
    """Turns (source, sequence) pairs into batches. `pad_id` fills what documents leave of a sequence."""

    def __init__(self, sources: Sequence[PackedSource], sequence_length: int, *, isolate_documents: bool):
        self.sources = list(sources)
        self.sequence_length = sequence_length
        self.isolate_documents = isolate_documents
        store = self.sources[0].store
        candidates = (store.pad_token_id, store.eos_token_id, 0)
        self.pad_id = next(token for token in candidates if token is not None)

    def assemble(
        self, samples: Sequence[tuple[int, int]], *, step: int, micro_batch: int, slot: int
    ) -> Batch:
        """The batch of `samples`, (source, sequence) each; the first stands in `slot` of the global batch."""
        length = self.sequence_length
        input_ids = np.empty((len(samples), length), dtype=np.int64)
        labels = np.empty_like(input_ids)
        loss_mask = np.empty(input_ids.shape, dtype=np.bool_)
        numbers: list[int] = []  # of each piece within its row, padding being the last piece
        lengths: list[int] = []
        for row, (source, sequence) in enumerate(samples):
            taken = self._fill_row(source, sequence, input_ids[row], labels[row], loss_mask[row])
            numbers += range(len(taken))
            lengths += taken
        shape = input_ids.shape
        if self.isolate_documents:
            document_ids = np.repeat(np.array(numbers), lengths).reshape(shape)
            starts = np.cumsum(lengths) - lengths
            position_ids = (np.arange(len(samples) * length) - np.repeat(starts, lengths)).reshape(shape)
        else:
            document_ids = self._padding_ids(samples, shape)
            position_ids = np.tile(np.arange(length), (len(samples), 1))
            starts = np.flatnonzero(position_ids.ravel() == 0)
            padded = np.flatnonzero(document_ids.ravel()[1:] > document_ids.ravel()[:-1]) + 1
            starts = np.union1d(starts, padded)
        self._check_ids(samples, input_ids, labels)
        labels[~loss_mask] = IGNORE_INDEX
        return Batch(
            input_ids=torch.from_numpy(input_ids),
            position_ids=torch.from_numpy(position_ids),
            document_ids=torch.from_numpy(document_ids),
            labels=torch.from_numpy(labels),
            loss_mask=torch.from_numpy(loss_mask),
            num_loss_tokens=int(np.count_nonzero(loss_mask)),
            step=step,
            micro_batch=micro_batch,
            digest=self._digest(samples, slot, input_ids, labels, loss_mask),
            sources=torch.tensor([source for source, _ in samples]) if len(self.sources) > 1 else None,
            document_offsets=padded_offsets(starts, len(samples) * length),
        )

    def _fill_row(
        self, source: int, sequence: int, input_ids: np.ndarray, labels: np.ndarray, loss_mask: np.ndarray
    ) -> list[int]:
        """Writes one sequence; returns the lengths of its pieces, padding included."""
        packed = self.sources[source]
        split, index = packed.store.split(packed.split), packed.index
        first, last = index.sequence_offsets[sequence : sequence + 2].tolist()
        lengths: list[int] = index.piece_length[first:last].tolist()
        begin = 0
        loss_mask.fill(True)
        for start, length in zip(index.piece_start[first:last].tolist(), lengths, strict=True):
            end = begin + length
            tokens = split.tokens_at(start, start + length + 1)
            input_ids[begin:end] = tokens[:-1]
            labels[begin:end] = tokens[1:]
            if split.has_mask:
                loss_mask[begin:end] = split.mask_at(start + 1, start + length + 1)
            begin = end
        if begin < self.sequence_length:
            input_ids[begin:] = labels[begin:] = self.pad_id
            loss_mask[begin:] = False
            lengths.append(self.sequence_length - begin)
        return lengths

    def _check_ids(
        self, samples: Sequence[tuple[int, int]], input_ids: np.ndarray, labels: np.ndarray
    ) -> None:
        """Of a store too large to be read when it is opened, ids are seen here first."""
        for row, (source, sequence) in enumerate(samples):
            packed = self.sources[source]
            found = max(int(input_ids[row].max()), int(labels[row].max()))
            if found >= packed.store.vocab_size:
                raise DataError(
                    f"{packed.store.path}: expected token ids below vocab_size {packed.store.vocab_size}, "
                    f"found {found} in sequence {sequence} of {packed.split}; prepare the store again"
                )

    def _padding_ids(self, samples: Sequence[tuple[int, int]], shape: tuple[int, int]) -> np.ndarray:
        """int64 [B, S]: 0 on documents, all of which attend to one another, and 1 on padding."""
        document_ids = np.zeros(shape, dtype=np.int64)
        for row, (source, sequence) in enumerate(samples):
            index = self.sources[source].index
            first, last = index.sequence_offsets[sequence : sequence + 2]
            document_ids[row, int(index.piece_length[first:last].sum()) :] = 1
        return document_ids

    def _digest(
        self,
        samples: Sequence[tuple[int, int]],
        slot: int,
        input_ids: np.ndarray,
        labels: np.ndarray,
        loss_mask: np.ndarray,
    ) -> torch.Tensor:
        """Digests the arrays that the tensors share their memory with."""
        heads = [
            digest_head(slot + row, self.sources[source].store, sequence)
            for row, (source, sequence) in enumerate(samples)
        ]
        return digest_rows(heads, input_ids, labels, loss_mask)


def padded_offsets(starts: np.ndarray, end: int) -> torch.Tensor:
    """`Batch.document_offsets` from the places at which pieces begin."""
    count = max(_LEAST_OFFSETS, 1 << len(starts).bit_length())  # a power of two with room for one `end`
    offsets = np.full(count, end, dtype=np.int32)
    offsets[: len(starts)] = starts
    return torch.from_numpy(offsets)


def digest_head(slot: int, store: TokenStore, sequence: int) -> bytes:
    """What a sample's digest begins with: its slot in the global batch, its store, its sequence there."""
    return f"{slot}/{store.hash}/{sequence}/".encode()


def digest_rows(
    heads: Sequence[bytes], input_ids: np.ndarray, labels: np.ndarray, loss_mask: np.ndarray
) -> torch.Tensor:
    """`Batch.digest`, int64 [8], of B samples.

    Args:
        heads: `digest_head` of each.
        input_ids: Integers [B, S].
        labels: Shifted, and -100 where masked; integers [B, S].
        loss_mask: bool [B, S].
    """
    ids, targets = input_ids.astype("<i4"), labels.astype("<i4")
    mask = np.packbits(loss_mask, axis=1)
    words = bytearray()
    for row, head in enumerate(heads):
        sample = hashlib.sha256(head)
        sample.update(ids[row])
        sample.update(targets[row])
        sample.update(mask[row])
        words += sample.digest()
    total = np.frombuffer(words, dtype=">u4").reshape(len(heads), 8).sum(axis=0, dtype=np.int64)
    return torch.from_numpy(total)
