"""Tensors to safetensors files and back, through torch.distributed.checkpoint.

Every rank writes its share: of tensors that all ranks hold, each is written once, balanced by size; of
sharded ones, each rank writes its own part. Any number of ranks can read them. Knows nothing of
commits or digests. The only collectives here are torch.distributed.checkpoint's own.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from llm_pretrain.checkpoints.ranks import one_line
from llm_pretrain.errors import CheckpointError

BYTES_PER_FILE = 256 << 20
"""A rank writes files of about this size: while one is written, it is in memory twice over."""


class _RecordingWriter(HuggingFaceStorageWriter):
    """Remembers which files this rank wrote."""

    def __init__(self, folder: Path, file_numbers: dict[str, int]):
        # More than one thread reports success after a failed write; files are synced before they are closed.
        super().__init__(
            path=str(folder), fqn_to_index_mapping=file_numbers, thread_count=1, save_distributed=True
        )
        self.written: set[str] = set()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        future = super().write_data(plan, planner)
        self.written = {result.storage_data.relative_path for result in future.value()}
        return future


class _ListedFiles(FileSystem):
    """Shows a reader the named files only, whatever else lies in the folder."""

    def __init__(self, names: list[str]):
        self.names = names

    def ls(self, path: object) -> list[str]:
        return [str(Path(str(path)) / name) for name in self.names]


def write_tensors(tensors: dict[str, Tensor], folder: Path, *, world_size: int) -> list[str]:
    """Write and fsync tensors into `folder` (collective); returns the names of the files this rank wrote.

    Raises:
        CheckpointError: on every rank, when one of them fails; names the folder and the ranks.
    """
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    writer = _RecordingWriter(folder, _file_numbers(contiguous, BYTES_PER_FILE * world_size))
    with _one_line_errors(folder, "writing tensors"):
        save(contiguous, storage_writer=writer, no_dist=world_size == 1)
    return sorted(writer.written)


def read_tensors(tensors: dict[str, Tensor], folder: Path, files: list[str], *, world_size: int) -> None:
    """Fill `tensors` in place from those of `files` that hold tensors (collective).

    Names, shapes and dtypes must have been compared: a dtype is converted without a word.

    Raises:
        CheckpointError: on every rank, when one of them fails; names the folder and the ranks.
    """
    reader = HuggingFaceStorageReader(path=str(folder), thread_count=1)
    reader.fs = _ListedFiles(files)
    with _one_line_errors(folder, "reading tensors"):
        load(dict(tensors), storage_reader=reader, no_dist=world_size == 1)


def _file_numbers(tensors: dict[str, Tensor], bytes_per_file: int) -> dict[str, int]:
    numbers, number, filled = {}, 1, 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if filled and filled + size > bytes_per_file:
            number, filled = number + 1, 0
        numbers[name] = number
        filled += size
    return numbers


@contextmanager
def _one_line_errors(folder: Path, doing: str) -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # it logs a line per tensor, and the tracebacks of what is raised below
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as exception:  # not an Exception, and prints a traceback per rank
        failures = "; ".join(
            f"rank {rank}: {one_line(error)}" for rank, (error, _) in sorted(exception.failures.items())
        )
        failure = CheckpointError(f"{folder}: {doing} failed on {failures}")
        failure.shared = True
        raise failure from None
    finally:
        logging.disable(before)
