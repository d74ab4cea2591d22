"""Micro batches of training and evaluation, and the worker processes that assemble them.

All ranks share one global sequence of micro batches. `shard` selects a rank's share; Accelerate's wrapper
selects the same share.
"""

from __future__ import annotations

import atexit
import errno
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, islice
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from llm_pretrain.config.tree import Config
from llm_pretrain.data.assembly import (
    IGNORE_INDEX,
    Assembler,
    Batch,
    Contents,
    PackedSource,
    digest_head,
)
from llm_pretrain.data.packing import packed_index
from llm_pretrain.data.sample_order import BLOCK, SampleOrder, block_at, shuffled
from llm_pretrain.data.store import TokenStore
from llm_pretrain.errors import DataError, PretrainError, ResourceError
from llm_pretrain.hardware import usable_cores

_TOKENS_PER_GROUP = 1 << 15
"""Tokens to assemble together, of one or more micro batches; with fewer, numpy's call overhead dominates."""


class MicroBatchSampler:
    """Yields the sample numbers of each micro batch.

    Micro batch m of the run (counted over all ranks and steps) holds samples m·B … m·B + B - 1. A slice of a
    sampler is a sampler of some of its micro batches: `sampler[rank::world_size]` is the share of a rank.
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
    """Dataset that assembles a micro batch from its sample numbers; its length is the samples of the run.

    Attributes: `assembler`, and `order`, the sample order.
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
        """Yields each micro batch; those of one step are assembled together, which is faster."""
        at_once = max(1, _TOKENS_PER_GROUP // (self._micro_batch_size * self.assembler.sequence_length))
        for step, group in groupby(micro_batches, lambda numbers: numbers[0] // self._global_batch_size):
            while some := list(islice(group, at_once)):
                slots = [numbers[0] % self._global_batch_size for numbers in some]
                places = [slot // self._micro_batch_size for slot in slots]
                drawn = [self.order.drawn(numbers) for numbers in some]
                yield from self.assembler.assemble_together(
                    drawn, step=step, micro_batches=places, slots=slots
                )

    def digest(self, numbers: Sequence[int], input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Recomputes `Batch.digest` from tensors, such as those that arrived on a device.

        Args:
            numbers: Sample numbers in the run, B of them.
            input_ids: int64 [B, S], on any device.
            labels: int64 [B, S], shifted, -100 where masked.
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
    """Validation batches, assembled on access. Neither B nor W changes the samples or their order."""

    def __init__(self, assembler: Assembler, samples: Sequence[tuple[int, int]], batch_size: int):
        self._assembler = assembler
        self._samples = samples
        self._batch_size = batch_size

    @property
    def sequences(self) -> list[int]:
        """Number of evaluated sequences of each source."""
        drawn = Counter(source for source, _ in self._samples)
        return [drawn[k] for k in range(len(self._assembler.sources))]

    @property
    def available(self) -> list[int]:
        """Number of sequences in each source's split."""
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
    """Opens the stores of `data.sources`. Raises DataError for a broken store, or different tokenizers."""
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


def data_fingerprint(config: Config, stores: Sequence[TokenStore] | None = None) -> dict[str, str]:
    """Settings that determine which sample comes at which step; a run resumes only if all are equal.

    `stores`, here and in the functions below, are the configuration's stores if they are already open: a
    store might have been replaced before it is opened again.
    """
    stores = stores or open_stores(config)
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
    """Weight changes in effect before `step`. To resume there they must be equal; later ones may differ."""
    return {
        f"data.weight_changes from sample {start * BLOCK}": str([float(weight) for weight in weights])
        for start, weights in _weight_segments(config)
        if start * BLOCK < step * config.training.global_batch_size
    }


def _weight_segments(config: Config) -> list[tuple[int, list[float]]]:
    """(first block, weights) of each change."""
    samples = config.training.global_batch_size
    return [(block_at(change.step * samples), change.weights) for change in config.data.weight_changes]


def samples_by_source(config: Config, step: int) -> list[int]:
    """Samples that the first `step` steps draw from each source."""
    weights = [source.weight for source in config.data.sources]
    lengths = [1] * len(weights)  # the source of a sample does not depend on lengths
    order = SampleOrder(lengths, weights, config.data.seed, _weight_segments(config))
    return order.counts(step * config.training.global_batch_size)


def sequences_per_epoch(config: Config) -> int:
    """Packed train sequences of all sources."""
    return sum(len(source.index) for source in _packed(config, "train"))


def global_batches(
    config: Config, *, start_step: int, stores: Sequence[TokenStore] | None = None
) -> DataLoader[Batch]:
    """The micro batches of all ranks from `start_step` to the end of the run, D·A per step.

    D is the data-parallel degree; D = W if every rank reads different data. Micro batch m = a·D + d of a step
    belongs to data-parallel group d and holds slots m·B … m·B + B - 1 of the global batch. The share of a
    group is therefore every D-th micro batch, from the d-th on.
    """
    training = config.training
    per_step = training.global_batch_size // training.micro_batch_size
    numbers = range(start_step * per_step, training.max_steps * per_step)
    sampler = MicroBatchSampler(numbers, training.micro_batch_size)
    workers = config.data.num_workers
    problem = shared_memory_problem(config, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    if workers is None:
        workers = 2 if torch.cuda.is_available() and not problem else 0
    elif problem:
        raise ResourceError(problem)
    workers = min(workers, most_workers(int(os.environ.get("LOCAL_WORLD_SIZE") or 1)))
    return _loader(train_samples(config, stores), sampler, workers)


def most_workers(ranks: int) -> int:
    """How many workers each of `ranks` processes of this machine starts at most: its share of the cores."""
    return max(1, min(usable_cores(), (os.cpu_count() or 1) // ranks))


def train_samples(config: Config, stores: Sequence[TokenStore] | None = None) -> MicroBatches:
    """The dataset behind `global_batches`; it gives any sample of the run by its number."""
    sources = _packed(config, "train", stores)
    order = SampleOrder(
        [len(source.index) for source in sources],
        [source.weight for source in config.data.sources],
        config.data.seed,
        _weight_segments(config),
    )
    return MicroBatches(_assembler(config, sources), order, config)


def shard(loader: DataLoader[Batch], group: int, groups: int) -> DataLoader[Batch]:
    """A loader of those micro batches of `loader` that belong to data-parallel group `group`."""
    sampler = loader.batch_sampler
    assert isinstance(sampler, MicroBatchSampler)
    return _loader(loader.dataset, sampler[group::groups], loader.num_workers)


def evaluation_batches(
    config: Config, *, split: str = "validation", stores: Sequence[TokenStore] | None = None
) -> EvaluationBatches:
    """Batches of `split` of all sources, packed as in training, in a fixed pseudo-random order."""
    training = config.training
    sources = _packed(config, split, stores)
    bounds = np.cumsum([len(source.index) for source in sources])
    total = used = int(bounds[-1])
    if config.evaluation.max_batches is not None:
        used = min(total, config.evaluation.max_batches * training.global_batch_size)
    drawn = shuffled("evaluation", 0, total, np.arange(used)) if used else np.zeros(0, dtype=np.int64)
    which = np.searchsorted(bounds, drawn, side="right")
    sequences = drawn - np.concatenate([[0], bounds])[which]
    samples = list(zip(which.tolist(), sequences.tolist(), strict=True))
    return EvaluationBatches(_assembler(config, sources), samples, training.micro_batch_size)


def _packed(config: Config, split: str, stores: Sequence[TokenStore] | None = None) -> list[PackedSource]:
    length, packing = config.training.sequence_length, config.data.packing
    stores = stores or open_stores(config)
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
    """A DataLoader that iterates the dataset directly where it needs no workers and no pinned memory."""

    def __iter__(self) -> Any:
        if self.num_workers or self.pin_memory:
            with worker_errors():
                return super().__iter__()
        samples: Any = self.dataset
        assert self.batch_sampler is not None
        return samples.batches(self.batch_sampler)


def _loader(dataset: Dataset[Batch], sampler: MicroBatchSampler, num_workers: int) -> DataLoader[Batch]:
    """Makes a loader. Its workers are not forked from this process, as they could inherit a held lock."""
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    if num_workers:
        atexit.register(_end_workers)
    if num_workers and method == "forkserver":
        with worker_errors():
            _start_fork_server()
    return _Loader(
        dataset,
        batch_sampler=sampler,  # type: ignore[arg-type]  # torch types it Sampler, and takes any iterable
        collate_fn=_shared if num_workers else _identity,
        num_workers=num_workers,
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=_start_worker if num_workers else None,
        multiprocessing_context=method if num_workers else None,
    )


def _identity(batch: Any) -> Any:
    return batch


def _shared(batch: Any) -> Any:
    """Moves a batch to shared memory in the worker's main thread, whose errors reach the training process."""
    return batch.share_memory()


_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_PRELOADED = (
    "torch",
    "accelerate",
    "torch.distributed.fsdp",
    "llm_pretrain.training",
    "llm_pretrain.data.loader",
)
"""Modules that the fork server imports once, while the training process wraps or restores its model. Every
worker imports the training script; without the fork server's imports this would take each worker seconds."""


def _start_fork_server() -> None:
    """Starts the fork server with stop signals blocked; the workers inherit the blocked signals.

    torchrun signals the whole process group. Without the block, the server and its workers would end before
    the training process has finished its step and saved a checkpoint.
    """
    multiprocessing.set_forkserver_preload([name for name in _PRELOADED if name in sys.modules])
    for ensure_running in (resource_tracker.ensure_running, forkserver.ensure_running):
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        try:
            ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(_: int) -> None:
    """Ignores stop signals: the training process handles them, and needs batches to finish its step."""
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _end_workers() -> None:
    """Kills the workers at exit. Python would send SIGTERM, which workers ignore, and then wait for them."""
    for worker in multiprocessing.active_children():
        if worker.daemon:
            worker.kill()


def _exit_with_parent() -> None:
    """Ends this worker when the training process ends; torch only watches its parent, the fork server."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


_BATCHES_PER_WORKER = 3
"""Batches of a worker in shared memory at a time: two that wait, and one that is being received."""
_BYTES_PER_TOKEN = 40
"""Size of a token in the tensors of a `Batch`."""


def shared_memory_problem(config: Config, ranks: int) -> str | None:
    """Why /dev/shm cannot hold the batches of the workers of `ranks` processes, or None if it can."""
    training, workers, folder = config.training, config.data.num_workers, Path("/dev/shm")
    workers = 2 if workers is None else workers
    if not workers or not folder.is_dir():
        return None
    needed = ranks * workers * _BATCHES_PER_WORKER * _BYTES_PER_TOKEN
    needed *= training.micro_batch_size * training.sequence_length
    free = shutil.disk_usage(folder).free
    if needed <= free:
        return None
    return (
        f"data.num_workers: expected {needed >> 20} MiB free in /dev/shm for batches of {workers} workers, "
        f"found {free >> 20}; set it to 0, or give the container more (docker run --shm-size)"
    )


@contextmanager
def worker_errors() -> Iterator[None]:
    """Turns the end of a worker or of the fork server, or a worker's traceback, into an error of one line."""
    try:
        yield
    except (RuntimeError, OSError, EOFError, PretrainError) as error:
        text = str(error).strip() or type(error).__name__
        # a worker that ends after a batch but before it sends the batch's file closes or deletes its socket
        is_socket = isinstance(error, FileNotFoundError) and error.filename is None
        is_cut_off = is_socket or isinstance(error, ConnectionError | EOFError)
        is_limit = getattr(error, "errno", None) in (errno.EMFILE, errno.EAGAIN)
        is_told = isinstance(error, PretrainError) and "\n" not in text
        if is_told or not ("DataLoader worker" in text or is_cut_off or is_limit):
            raise
        *_, last = text.splitlines()
        if isinstance(error, PretrainError):
            raise type(error)(last.partition(": ")[2]) from error
        raise ResourceError(
            f"data.num_workers: expected workers that go on, found: {last}; set it to 0, or give them more "
            "memory, /dev/shm, open files or processes (ulimit -u)"
        ) from error
