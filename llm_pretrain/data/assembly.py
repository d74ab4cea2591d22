"""Assembles packed sequences into the arrays of a micro batch, and digests what it assembled.

Knows nothing of steps, ranks or the order of samples: which sequences, in which slots, is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from llm_pretrain.data.digests import Contents, digest_head
from llm_pretrain.data.gathering import Gathered, Gatherer, PackedSource
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


class Assembler:
    """Turns (source, sequence) pairs into batches. `pad_id` fills what documents leave of a sequence."""

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
        """The batch of `samples`, (source, sequence) each; the first stands in `slot` of the global batch."""
        return self.assemble_together([samples], step=step, micro_batches=[micro_batch], slots=[slot])[0]

    def assemble_together(
        self,
        parts: Sequence[Sequence[tuple[int, int]]],
        *,
        step: int,
        micro_batches: Sequence[int],
        slots: Sequence[int],
    ) -> list[Batch]:
        """What `assemble` gives for each of `parts`, equally many samples each: slices of common arrays."""
        shape = (len(parts), len(parts[0]), self.sequence_length)
        samples = [sample for part in parts for sample in part]
        gathered = self._gatherer.gather(samples)
        contents = Contents(len(samples), self.sequence_length)
        labels, rows = contents.labels, contents.labels.shape
        tokens, loss_mask = gathered.tokens.reshape(2, *rows), gathered.loss_mask.reshape(rows)
        self._check_ids(samples, tokens)
        contents.input_ids[:], labels[:] = tokens
        counts = [int(np.count_nonzero(part)) for part in loss_mask.reshape(shape)]
        if sum(counts) < loss_mask.size:  # IGNORE_INDEX where masked; `where` would take twice as long
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
        """Positions and document ids, int64 [B·S], and the places at which documents begin.

        Documents that are not isolated attend to one another: all of a row's are one, apart from padding.
        """
        if self.isolate_documents:
            return gathered.positions, gathered.numbers.repeat(gathered.lengths), gathered.starts
        first = gathered.is_padding | (gathered.numbers == 0)
        document_ids = gathered.is_padding.astype(np.int64).repeat(gathered.lengths)
        return np.tile(np.arange(shape[1]), shape[0]), document_ids, gathered.starts[first]

    def _check_ids(self, samples: Sequence[tuple[int, int]], tokens: np.ndarray) -> None:
        """Of a store too large to be read when it is opened, ids are seen here first."""
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
    """`Batch.document_offsets` from the places at which pieces begin."""
    count = max(_LEAST_OFFSETS, 1 << len(starts).bit_length())  # a power of two with room for one `end`
    offsets = np.empty(count, dtype=np.int32)
    offsets[: len(starts)] = starts
    offsets[len(starts) :] = end
    return torch.from_numpy(offsets)
