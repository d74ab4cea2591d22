"""The one global sequence of micro batches that every rank takes its share of, and evaluation's batches.

A rank's share is chosen by `shard`, or by Accelerate's own wrapper, which picks the same one.
"""

from __future__ import annotations

import atexit
import multiprocessing
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from llm_pretrain.config import Config
from llm_pretrain.data.assembly import IGNORE_INDEX, Assembler, Batch
from llm_pretrain.data.digests import Contents, digest_head
from llm_pretrain.data.gathering import PackedSource
from llm_pretrain.data.packing_index import packed_index
from llm_pretrain.data.sample_order import BLOCK, SampleOrder, block_at, shuffled
from llm_pretrain.data.token_store import TokenStore
from llm_pretrain.data.worker_processes import end_workers, start_fork_server, start_worker
from llm_pretrain.errors import DataError

_AT_ONCE = 1 << 16
"""Tokens of micro batches that are assembled together: of fewer, numpy's calls cost more than its work."""


class MicroBatchSampler:
    """Yields, micro batch by micro batch, the numbers of its samples in the run's one sample order.

    Micro batch m of the run (counted over all ranks and steps) holds samples m·B … m·B + B - 1. Slicing
    gives the sampler of a subsequence: `sampler[rank::world_size]` is one rank's share.
    """

    drop_last = False

    def __init__(self, micro_batches: range, batch_size: int):
        self.micro_batches = micro_batches
        self.batch_size = batch_size

    def __len__(self) -> int:
        return len(self.micro_batches)

    def __iter__(self) -> Iterator[list[int]]:
        for number in self.micro_batches:
            yield list(range(number * self.batch_size, (number + 1) * self.batch_size))

    def __getitem__(self, part: slice) -> MicroBatchSampler:
        return MicroBatchSampler(self.micro_batches[part], self.batch_size)


class MicroBatches(Dataset[Batch]):
    """Assembles the micro batch of given sample numbers; `len` is the number of samples of the run.

    Attributes: `assembler`, and the `order` of samples.
    """

    def __init__(self, assembler: Assembler, order: SampleOrder, config: Config):
        self.assembler = assembler
        self.order = order
        self._micro_batch_size = config.training.micro_batch_size
        self._global_batch_size = config.training.global_batch_size
        self._samples = config.training.max_steps * self._global_batch_size

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, number: int) -> Batch:
        return self.__getitems__([number])

    def __getitems__(self, numbers: Sequence[int]) -> Batch:
        return next(self.batches([numbers]))

    def batches(self, micro_batches: Iterable[Sequence[int]]) -> Iterator[Batch]:
        """What `__getitems__` gives for each; those of one step are assembled together, which is faster."""
        at_once = max(1, _AT_ONCE // (self._micro_batch_size * self.assembler.sequence_length))
        for step, group in groupby(micro_batches, lambda numbers: numbers[0] // self._global_batch_size):
            while some := list(islice(group, at_once)):
                slots = [numbers[0] % self._global_batch_size for numbers in some]
                places = [slot // self._micro_batch_size for slot in slots]
                drawn = [self.order.drawn(numbers) for numbers in some]
                yield from self.assembler.assemble_together(
                    drawn, step=step, micro_batches=places, slots=slots
                )

    def digest(self, numbers: Sequence[int], input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """`Batch.digest` of the samples `numbers` as they arrived: hashed anew from what is given.

        Args:
            numbers: Of the run's samples, B of them.
            input_ids: int64 [B, S], on any device.
            labels: int64 [B, S], shifted, and -100 where no loss is taken.
        """
        stores = [source.store for source in self.assembler.sources]
        heads = [
            digest_head(number % self._global_batch_size, stores[source], sequence)
            for number, (source, sequence) in zip(numbers, self.order.drawn(numbers), strict=True)
        ]
        contents, targets = Contents(*labels.shape), labels.cpu().numpy()
        contents.input_ids[:], contents.labels[:] = input_ids.cpu().numpy(), targets
        return torch.from_numpy(contents.digests(heads, targets != IGNORE_INDEX).sum(axis=0))


class EvaluationBatches(Sequence[Batch]):
    """Validation batches, assembled when asked for: the same samples in the same order at any B and W."""

    def __init__(self, assembler: Assembler, samples: Sequence[tuple[int, int]], batch_size: int):
        self._assembler = assembler
        self._samples = samples
        self._batch_size = batch_size

    @property
    def sequences(self) -> list[int]:
        """How many sequences of each source are evaluated."""
        drawn = Counter(source for source, _ in self._samples)
        return [drawn[k] for k in range(len(self._assembler.sources))]

    @property
    def available(self) -> list[int]:
        """How many sequences the validation split of each source has."""
        return [len(source.index) for source in self._assembler.sources]

    def __len__(self) -> int:
        return (len(self._samples) + self._batch_size - 1) // self._batch_size

    def __getitem__(self, index: int) -> Batch:  # type: ignore[override]  # no slices: assembled one by one
        if not 0 <= index < len(self):
            raise IndexError(index)
        first = index * self._batch_size
        samples = self._samples[first : first + self._batch_size]
        return self._assembler.assemble(samples, step=0, micro_batch=index, slot=first)


def open_stores(config: Config) -> list[TokenStore]:
    """Opens the stores of `data.sources`. Raises DataError for a broken one, or for different tokenizers."""
    if not config.data.sources:
        raise DataError(
            "data.sources: expected at least one token store, found none; see `llm-pretrain prepare`"
        )
    stores = [TokenStore(Path(source.store)) for source in config.data.sources]
    for k, store in enumerate(stores):
        if store.tokenizer_hash != stores[0].tokenizer_hash:
            raise DataError(
                f"data.sources[{k}].store: expected the tokenizer of {stores[0].path} "
                f"({stores[0].tokenizer_hash[:12]}), found another in {store.path} "
                f"({store.tokenizer_hash[:12]}); prepare both with one tokenizer"
            )
    return stores


def data_fingerprint(config: Config) -> dict[str, str]:
    """What decides at any step which sample stands where; a run is resumed only where all of it is equal."""
    stores = open_stores(config)
    facts = {
        "tokenizer": stores[0].tokenizer_hash,
        "data.packing": config.data.packing,
        "data.isolate_documents": str(config.data.isolate_documents),
        "data.seed": str(config.data.seed),
        "training.sequence_length": str(config.training.sequence_length),
    }
    for k, (store, source) in enumerate(zip(stores, config.data.sources, strict=True)):
        facts[f"data.store.{k}"] = store.hash
        facts[f"data.weight.{k}"] = str(source.weight)
    return facts


def weight_changes_fingerprint(config: Config, step: int) -> dict[str, str]:
    """The changes of weights that some step before `step` drew with; must be equal too to resume at `step`.

    Later ones are left out: they may still be changed, added and taken away.
    """
    return {
        f"data.weight_changes from sample {start * BLOCK}": str([float(weight) for weight in weights])
        for start, weights in _weight_segments(config)
        if start * BLOCK < step * config.training.global_batch_size
    }


def _weight_segments(config: Config) -> list[tuple[int, list[float]]]:
    """First block and weights of each change."""
    samples = config.training.global_batch_size
    return [(block_at(change.step * samples), change.weights) for change in config.data.weight_changes]


def sequences_per_epoch(config: Config) -> int:
    """Packed train sequences of all sources together."""
    return sum(len(source.index) for source in _packed(config, "train"))


def tokens_per_epoch(config: Config) -> int:
    """Loss tokens in the train splits of all sources together; masked tokens do not count."""
    return sum(store.facts["splits"]["train"]["targets"] for store in open_stores(config))


def global_batches(config: Config, *, start_step: int, world_size: int) -> DataLoader[Batch]:
    """The micro batches of all ranks, from `start_step` to the end of the run, in whole windows of W·A.

    Micro batch a·W + r of a step belongs to rank r and holds slots (a·W + r)·B … + B - 1 of the global
    batch, so every W-th micro batch from the r-th on is rank r's share, whoever picks it.
    """
    training = config.training
    per_step = config.gradient_accumulation_steps(world_size) * world_size
    numbers = range(start_step * per_step, training.max_steps * per_step)
    sampler = MicroBatchSampler(numbers, training.micro_batch_size)
    workers = config.data.num_workers
    if workers is None:
        workers = 2 if torch.cuda.is_available() else 0
    return _loader(train_samples(config), sampler, workers)


def train_samples(config: Config) -> MicroBatches:
    """All samples of the run by their numbers, of any step and in any order: what `global_batches` loads."""
    sources = _packed(config, "train")
    order = SampleOrder(
        [len(source.index) for source in sources],
        [source.weight for source in config.data.sources],
        config.data.seed,
        _weight_segments(config),
    )
    return MicroBatches(_assembler(config, sources), order, config)


def shard(loader: DataLoader[Batch], rank: int, world_size: int) -> DataLoader[Batch]:
    """A loader of rank `rank`'s micro batches of `loader`."""
    sampler = loader.batch_sampler
    assert isinstance(sampler, MicroBatchSampler)
    return _loader(loader.dataset, sampler[rank::world_size], loader.num_workers)


def evaluation_batches(config: Config, *, split: str = "validation") -> EvaluationBatches:
    """The validation splits (or another), packed as for training, in one fixed pseudo-random order."""
    training = config.training
    sources = _packed(config, split)
    bounds = np.cumsum([len(source.index) for source in sources])
    total = used = int(bounds[-1])
    if config.evaluation.max_batches is not None:
        used = min(total, config.evaluation.max_batches * training.global_batch_size)
    drawn = shuffled("evaluation", 0, total, np.arange(used)) if used else np.zeros(0, dtype=np.int64)
    which = np.searchsorted(bounds, drawn, side="right")
    sequences = drawn - np.concatenate([[0], bounds])[which]
    samples = list(zip(which.tolist(), sequences.tolist(), strict=True))
    return EvaluationBatches(_assembler(config, sources), samples, training.micro_batch_size)


def _packed(config: Config, split: str) -> list[PackedSource]:
    length, packing = config.training.sequence_length, config.data.packing
    stores = open_stores(config)
    for store in stores:
        facts = store.facts["splits"][split]
        if split == "train" and facts["tokens"] and not facts["targets"]:
            raise DataError(
                f"{store.path}: expected tokens to train on, found all {facts['tokens']} masked in its train "
                "split; prepare it from records with a loss"
            )
    return [PackedSource(store, split, packed_index(store, split, length, packing)) for store in stores]


def _assembler(config: Config, sources: Sequence[PackedSource]) -> Assembler:
    length, isolate = config.training.sequence_length, config.data.isolate_documents
    return Assembler(sources, length, isolate_documents=isolate)


class _Loader(DataLoader[Batch]):
    """torch's, which has nothing to add where this process assembles batches itself, for no GPU."""

    def __iter__(self) -> Any:
        if self.num_workers or self.pin_memory:
            return super().__iter__()
        samples: Any = self.dataset
        assert self.batch_sampler is not None
        return samples.batches(self.batch_sampler)


def _loader(dataset: Dataset[Batch], sampler: MicroBatchSampler, num_workers: int) -> DataLoader[Batch]:
    """Workers are started apart from this process's threads, so that none inherits a lock that is held."""
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    if num_workers:
        atexit.register(end_workers)
    if num_workers and method == "forkserver":
        start_fork_server()
    return _Loader(
        dataset,
        batch_sampler=sampler,  # type: ignore[arg-type]  # torch types it Sampler, and takes any iterable
        collate_fn=_as_it_is,
        num_workers=num_workers,
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=start_worker if num_workers else None,
        multiprocessing_context=method if num_workers else None,
    )


def _as_it_is(batch: Any) -> Any:
    return batch
