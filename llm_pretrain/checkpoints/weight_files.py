"""Lays out the safetensors files of a weights folder; each rank writes the values that it holds.

Names, shapes and types decide the position of every byte. So each rank writes its parts in place, and the
files are the same however the model is divided over ranks.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llm_pretrain.checkpoints.state import Piece
from llm_pretrain.checkpoints.tensor_files import CHUNK_BYTES, safetensors_header
from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.distributed.initial_values import runs
from llm_pretrain.errors import CheckpointError
from llm_pretrain.export.huggingface import INDEX_FILE, DiskTensor, disk_dtype, disk_layout, rounded
from llm_pretrain.files import naming, write_text

MAX_SHARD_BYTES = 5_000_000_000
"""Largest size of a file, as in transformers."""
_SUMS = 1 << 64


@dataclass(frozen=True)
class _Place:
    """A tensor on disk, its file, the type of its elements on disk, and where its first byte is."""

    tensor: DiskTensor
    file: str
    dtype: torch.dtype
    begin: int

    def edge(self, element: int) -> int:
        """A 64-bit hash of the file and the byte where this element begins."""
        text = f"{self.file}/{self.begin + element * self.dtype.itemsize}"
        return int.from_bytes(sha256(text.encode()).digest()[:8], "little")

    def cover(self, begin: int, end: int) -> int:
        """The edge of `end` minus the edge of `begin`, so that consecutive parts add up to the whole."""
        return self.edge(end) - self.edge(begin)


class WeightFiles:
    """`model.safetensors`, or shards of at most `MAX_SHARD_BYTES` and their index.

    Args:
        tensors: The model's tensors by name; only names, shapes and types are used.
        config: The model's shape, with a resolved `vocab_size`.
        dtype: Type of the floating tensors on disk, such as `torch.bfloat16`.
    """

    def __init__(self, tensors: Mapping[str, Tensor], config: ModelConfig, dtype: torch.dtype):
        from huggingface_hub import split_state_dict_into_shards_factory

        self._dtype = dtype
        self._shapes = {name: tensor.shape for name, tensor in tensors.items()}
        layout = {each.name: each for each in disk_layout(self._shapes, config)}
        described: dict[str, Tensor] = {}
        for name, each in layout.items():
            own = disk_dtype(name, tensors[each.source], dtype)
            described[name] = torch.empty(each.shape, dtype=own, device="meta")
        self._headers: dict[str, tuple[bytes, int]] = {}
        self._places: dict[str, list[_Place]] = {}
        self._index: dict[str, Any] | None = None
        split = split_state_dict_into_shards_factory(
            described,
            get_storage_size=lambda tensor: tensor.nbytes,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=MAX_SHARD_BYTES,
        )
        for file, names in split.filename_to_tensors.items():
            shard = {name: described[name] for name in names}
            header, begins = safetensors_header(shard, {"format": "pt"})
            self._headers[file] = header, len(header) + sum(each.nbytes for each in shard.values())
            for name, begin in begins.items():
                place = _Place(layout[name], file, described[name].dtype, begin)
                self._places.setdefault(place.tensor.source, []).append(place)
        if split.is_sharded:
            self._index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}

    def create(self, folder: Path) -> None:
        """Make the files in full size, headers followed by zeros. One rank calls this before `write`."""
        for file, (header, size) in self._headers.items():
            with open(folder / file, "wb", buffering=0) as stream, naming(stream.name):
                stream.write(header)
                stream.truncate(size)
                os.fsync(stream.fileno())
        if self._index is not None:
            write_text(folder / INDEX_FILE, json.dumps(self._index, indent=2) + "\n")

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(size for _, size in self._headers.values())

    def write(self, folder: Path, pieces: Iterable[Piece]) -> int:
        """Write pieces of the model's tensors in chunks, and fsync; returns this rank's sum for `check`.

        Raises:
            CheckpointError: a value does not fit in `dtype`, or the files are not there.
            DivergedError: a value is not finite.
            OSError: naming the file.
        """
        covered = 0
        with ExitStack() as stack:
            opened: dict[str, FileIO] = {}
            for piece in pieces:
                places = self._places.get(piece.name, []) if piece.tensor.numel() else []
                for values, start in runs(piece.tensor, self._shapes[piece.name], piece.offsets):
                    for place in places:
                        for part, at in place.tensor.parts(values, start):
                            if place.file not in opened:
                                opened[place.file] = stack.enter_context(_opened(folder / place.file))
                            self._write(opened[place.file], place, part, at)
                            covered += place.cover(at, at + len(part))
            for stream in opened.values():
                with naming(stream.name):
                    os.fsync(stream.fileno())
        return covered % _SUMS

    def _write(self, stream: FileIO, place: _Place, values: Tensor, at: int) -> None:
        """Write values to a tensor on disk, beginning at element `at`."""
        position = place.begin + at * place.dtype.itemsize
        for chunk in values.detach().split(max(1, CHUNK_BYTES // values.element_size())):
            scaled = chunk if place.tensor.factor == 1 else chunk * place.tensor.factor
            data = rounded(place.tensor.name, scaled, self._dtype).view(torch.uint8).numpy().data
            with naming(stream.name), _locked(stream, position, len(data)):
                while data:
                    written = os.pwrite(stream.fileno(), data, position)
                    data, position = data[written:], position + written

    def check(self, folder: Path, covered: Iterable[int]) -> None:
        """Check that the ranks together have written every byte once.

        Args:
            folder: The folder with the files.
            covered: The results of `write` on all ranks.

        Raises:
            CheckpointError: a byte was not written, or written more than once.
        """
        places = [place for each in self._places.values() for place in each if place.tensor.factor]
        expected = sum(place.cover(0, place.tensor.elements) for place in places)
        if (sum(covered) - expected) % _SUMS:
            raise CheckpointError(
                f"{folder}: expected each part of the weights from one rank, found parts from none or from "
                "several"
            )


def _opened(file: Path) -> FileIO:
    try:
        # write-only: if a file is open for reading too, NFS reads a page before it writes into the page
        return open(file, "wb", buffering=0, opener=lambda path, _: os.open(path, os.O_WRONLY))
    except FileNotFoundError:
        raise CheckpointError(
            f"{file}: expected the file that rank 0 has made, found none; weights need a folder that all "
            "machines share"
        ) from None


@contextmanager
def _locked(stream: FileIO, begin: int, size: int) -> Iterator[None]:
    """Lock these bytes if the file system has locks: NFS then writes no bytes of other ranks in a page."""
    try:
        fcntl.lockf(stream, fcntl.LOCK_EX, size, begin)
    except OSError:
        yield
        return
    try:
        yield
    finally:
        fcntl.lockf(stream, fcntl.LOCK_UN, size, begin)
