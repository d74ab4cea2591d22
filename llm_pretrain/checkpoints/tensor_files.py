"""Writes and reads safetensors files in the layout of torch.distributed.checkpoint (DCP).

DCP can read the files too. Our writer has no tensor in memory twice, holds the interpreter lock only briefly
in a background thread, and detects non-finite values while the data is in the cache. Our reader has no
communication: DCP's ranks exchange all names and gather their plans on one rank.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from llm_pretrain.checkpoints.manifest import FileEntry
from llm_pretrain.checkpoints.state import Piece
from llm_pretrain.distributed.collectives import one_line
from llm_pretrain.distributed.initial_values import local_part
from llm_pretrain.errors import CheckpointError, DivergedError
from llm_pretrain.files import naming, open_safetensors

BYTES_PER_FILE = 256 << 20
"""Approximate size of the files that a rank writes. When reading, ranks divide the files to verify them."""
CHUNK_BYTES = 4 << 20
"""Bytes to check, hash and write at a time, so that they stay in the CPU cache."""
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


def write_pieces(pieces: list[Piece], folder: Path, *, rank: int) -> dict[str, FileEntry]:
    """Write and fsync this rank's pieces into `folder`; returns the files' sizes and digests.

    Raises:
        DivergedError: a value is not finite; names its tensor.
        OSError: naming the file.
    """
    files = list(_files_of(pieces))
    written = {}
    for number, content in enumerate(files, start=1):
        name = f"shard-{rank + 1:05d}-model-{number:05d}-of-{len(files):05d}.safetensors"
        offsets = {piece.name: {"saved_offsets": list(piece.offsets)} for piece in content}
        metadata = {"DCP_SHARDING_INFO": json.dumps(offsets), **_FORMAT}
        tensors = {piece.name: piece.tensor for piece in content}
        written[name] = write_safetensors(folder / name, tensors, metadata)
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


def write_safetensors(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> FileEntry:
    """Write and fsync one file; returns its size and digest.

    Raises:
        DivergedError: a value is not finite; names its tensor.
        OSError: naming the file.
    """
    digest, size = hashlib.sha256(), 0
    with naming(file), file.open("wb") as stream:
        for chunk in _chunks(tensors, metadata):
            digest.update(chunk)
            stream.write(chunk)
            size += len(chunk)
        stream.flush()
        os.fsync(stream.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def _chunks(tensors: dict[str, Tensor], metadata: dict[str, str]) -> Iterator[bytes | memoryview]:
    """The file's content in chunks: the header, then the data."""
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
    """A file's content before the data, and the byte at which each tensor begins, in the file's order.

    Args:
        tensors: Tensors by name; the meta device suffices.
        metadata: Metadata of the file.
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
    if values.dtype in (torch.float32, torch.float64):  # NumPy, because it starts no threads
        with np.errstate(over="ignore", invalid="ignore"):
            finite = np.isfinite(values.numpy().sum())
    else:
        finite = torch.isfinite(values.sum(dtype=torch.float32))
    if not finite and not bool(torch.isfinite(values).all()):  # a sum of finite values may overflow
        found = values[~torch.isfinite(values)][0].item()
        raise DivergedError(
            f"{name}: expected finite values to save, found {found}; what was saved before is sound: "
            "continue from there with a lower optimizer.learning_rate or another data.seed"
        )


def read_tensors(tensors: dict[str, Tensor], folder: Path, files: Iterable[str]) -> None:
    """Fill `tensors`, or this rank's parts of sharded tensors, in place from safetensors files.

    Names, shapes and dtypes must have been compared before. Ranks do not communicate: each rank opens files
    in the given order until it has all values.

    Raises:
        CheckpointError: a file cannot be read, or the files lack values.
    """
    try:
        _read(tensors, folder, files)
    except (OSError, SafetensorError, RuntimeError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{folder}: reading tensors failed: {one_line(error)}") from error


def _read(tensors: dict[str, Tensor], folder: Path, files: Iterable[str]) -> None:
    parts = {name: local_part(tensor) for name, tensor in tensors.items()}
    missing = {name: part.numel() for name, (part, _) in parts.items() if part.numel()}
    for file in files:
        if not missing:
            return
        with open_safetensors(folder / file) as content:
            info = json.loads((content.metadata() or {})["DCP_SHARDING_INFO"])
            for name in missing.keys() & content.keys():
                (part, offsets), saved_at = parts[name], info[name]["saved_offsets"]
                saved = content.get_slice(name)
                lows = [max(pair) for pair in zip(offsets, saved_at, strict=True)]
                ends = zip(offsets, part.shape, saved_at, saved.get_shape(), strict=True)
                highs = [min(own + size, start + length) for own, size, start, length in ends]
                if any(low >= high for low, high in zip(lows, highs, strict=True)):
                    continue
                values = saved[_box(lows, highs, saved_at)]
                part[_box(lows, highs, offsets)].copy_(values)
                missing[name] -= values.numel()
                if not missing[name]:
                    del missing[name]
    if missing:
        raise ValueError(f"{', '.join(sorted(missing)[:3])}: not all values are in the files")


def _box(lows: Sequence[int], highs: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    """Slices of a part that begins at `origin`: its elements from `lows` to `highs` of the whole tensor."""
    return tuple(slice(low - at, high - at) for low, high, at in zip(lows, highs, origin, strict=True))
