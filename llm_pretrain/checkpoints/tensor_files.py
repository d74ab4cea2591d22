"""Writes and reads safetensors files in the layout of torch.distributed.checkpoint (DCP).

DCP reads the files, onto any number of ranks. They are written here and not by DCP, so that no tensor is in
memory twice, a background thread holds the interpreter lock only briefly, and non-finite values are detected
while the data is in the cache.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from llm_pretrain.checkpoints.state import Piece
from llm_pretrain.distributed.collectives import one_line
from llm_pretrain.errors import CheckpointError, DivergedError

BYTES_PER_FILE = 256 << 20
"""Approximate size of the files that a rank writes; ranks share the work of verifying them."""
CHUNK_BYTES = 4 << 20
"""Bytes that are checked, hashed and written at a time, to stay in the CPU cache."""
_FORMAT = {"DCP_VERSION": "1.0", "format": "pt"}
"""Metadata that torch.distributed.checkpoint writes into every file."""
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_pieces(pieces: list[Piece], folder: Path, *, rank: int) -> dict[str, dict[str, Any]]:
    """Write and fsync this rank's pieces into `folder`; returns its files' sizes and digests.

    Raises:
        DivergedError: a value is not finite; names its tensor.
        OSError: naming the file.
    """
    files = list(_files_of(pieces))
    written = {}
    for number, content in enumerate(files, start=1):
        name = f"shard-{rank + 1:05d}-model-{number:05d}-of-{len(files):05d}.safetensors"
        written[name] = _write_file(folder / name, content)
    return written


def _files_of(pieces: list[Piece]) -> Iterator[list[Piece]]:
    content: list[Piece] = []
    filled = 0
    for piece in pieces:
        if content and filled + piece.tensor.nbytes > BYTES_PER_FILE:
            yield content
            content, filled = [], 0
        content.append(piece)
        filled += piece.tensor.nbytes
    if content:
        yield content


def _write_file(file: Path, pieces: list[Piece]) -> dict[str, Any]:
    offsets = {piece.name: {"saved_offsets": list(piece.offsets)} for piece in pieces}
    metadata = {"DCP_SHARDING_INFO": json.dumps(offsets), **_FORMAT}
    return write_safetensors(file, {piece.name: piece.tensor for piece in pieces}, metadata)


def write_safetensors(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> dict[str, Any]:
    """Write and fsync one file; returns its size and digest.

    Raises:
        DivergedError: a value is not finite; names its tensor.
        OSError: naming the file.
    """
    digest, size = hashlib.sha256(), 0
    try:
        with file.open("wb") as stream:
            for chunk in _chunks(tensors, metadata):
                digest.update(chunk)
                stream.write(chunk)
                size += len(chunk)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        error.filename = error.filename or str(file)
        raise
    return {"bytes": size, "sha256": digest.hexdigest()}


def _chunks(tensors: dict[str, Tensor], metadata: dict[str, str]) -> Iterator[bytes | memoryview]:
    """The file's content: header, data."""
    header, begins = safetensors_header(tensors, metadata)
    yield header
    for name in begins:
        flat = tensors[name].detach().cpu().contiguous().view(-1)
        elements = max(1, CHUNK_BYTES // flat.element_size())
        for chunk in flat.split(elements):
            check_finite(name, chunk)
            yield chunk.view(torch.uint8).numpy().data


def safetensors_header(
    tensors: Mapping[str, Tensor], metadata: dict[str, str]
) -> tuple[bytes, dict[str, int]]:
    """A file's content before the data, and where in the file each tensor begins, in the file's order.

    Args:
        tensors: By name; on the meta device, they are described as well.
        metadata: Of the file.
    """
    # Largest elements first, so that every tensor's offset is a multiple of its element size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {"__metadata__": metadata}
    begins, end = {}, 0
    for name, tensor in ordered:
        begins[name], end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begins[name], end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    content = len(text).to_bytes(8, "little") + text
    return content, {name: len(content) + begin for name, begin in begins.items()}


def check_finite(name: str, values: Tensor) -> None:
    """Check that all values are finite.

    Raises:
        DivergedError: names the tensor.
    """
    if not values.is_floating_point():
        return
    if values.dtype in (torch.float32, torch.float64):  # numpy starts no threads
        with np.errstate(over="ignore", invalid="ignore"):
            finite = np.isfinite(values.numpy().sum())
    else:
        finite = torch.isfinite(values.sum(dtype=torch.float32))
    if not finite and not bool(torch.isfinite(values).all()):  # the sum alone may overflow
        found = values[~torch.isfinite(values)][0].item()
        raise DivergedError(
            f"{name}: expected finite values to save, found {found}; what was saved before is sound: "
            "continue from there with a lower optimizer.learning_rate or another data.seed"
        )


def read_tensors(tensors: dict[str, Tensor], folder: Path, files: list[str], *, world_size: int) -> None:
    """Fill `tensors` in place from the safetensors files among `files` (collective).

    Names, shapes and dtypes must have been compared before: DCP converts another dtype silently.

    Raises:
        CheckpointError: on every rank, if one fails; names the folder and the ranks.
    """
    if world_size == 1:
        try:
            return _read_alone(tensors, folder, files)
        except (OSError, SafetensorError, RuntimeError, ValueError, LookupError, TypeError) as error:
            raise CheckpointError(f"{folder}: reading tensors failed: {one_line(error)}") from error
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader: Any = HuggingFaceStorageReader(path=str(folder), thread_count=1)
    reader.fs.ls = lambda path: [str(Path(path) / name) for name in files]
    with _one_line_errors(folder, "reading tensors"):
        load(dict(tensors), storage_reader=reader)


def _read_alone(tensors: dict[str, Tensor], folder: Path, files: list[str]) -> None:
    """Read without DCP, whose import takes two CPU seconds."""
    missing = {name: tensor.numel() for name, tensor in tensors.items()}
    for file in files:
        with safe_open(folder / file, "pt") as content:
            info = json.loads((content.metadata() or {})["DCP_SHARDING_INFO"])
            for name in missing.keys() & content.keys():
                part, place = content.get_tensor(name), tensors[name]
                for dim, start in enumerate(info[name]["saved_offsets"]):
                    place = place.narrow(dim, start, part.shape[dim])
                place.copy_(part)
                missing[name] -= part.numel()
    if absent := [name for name, count in missing.items() if count]:
        raise ValueError(f"{', '.join(absent[:3])}: not all values are in the files")


@contextmanager
def _one_line_errors(folder: Path, doing: str) -> Iterator[None]:
    """Convert DCP's errors; logging is disabled for the whole process, so no other thread may log."""
    from torch.distributed.checkpoint.api import CheckpointException

    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # DCP logs the tracebacks of the errors that it raises
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as exception:  # a BaseException, which prints a traceback per rank
        failures = "; ".join(
            f"rank {rank}: {one_line(error)}" for rank, (error, _) in sorted(exception.failures.items())
        )
        failure = CheckpointError(f"{folder}: {doing} failed on {failures}")
        failure.shared = True
        raise failure from None
    finally:
        logging.disable(before)
