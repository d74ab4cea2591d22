"""The tensors of one checkpoint, one at a time, whole whatever processes wrote them.

Reading them all at once, and loading them into a training, is the checkpoints' business.
"""

from __future__ import annotations

from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llm_pretrain.checkpoints import Manifest, read_tensors
from llm_pretrain.errors import CheckpointError


class CheckpointTensors:
    """A checkpoint's safetensors files, opened for reading. A context manager.

    Attributes: `problems`, how the files' own headers differ from the manifest, one line each. Raises
    CheckpointError for a file that is no safetensors file.
    """

    def __init__(self, folder: Path, manifest: Manifest):
        from safetensors import SafetensorError, safe_open

        self.folder, self.manifest = folder, manifest
        self._files = sorted(name for name in manifest.files if name.endswith(".safetensors"))
        self._stack = ExitStack()
        self._parts: dict[str, list[Any]] = {}
        for name in self._files:
            try:
                file: Any = self._stack.enter_context(safe_open(str(folder / name), "pt"))
            except (OSError, SafetensorError) as error:
                self._stack.close()
                reason = " ".join(str(error).split())
                raise CheckpointError(
                    f"{folder / name}: expected a safetensors file, found: {reason}"
                ) from error
            for tensor in list(file.keys()):
                self._parts.setdefault(tensor, []).append(file)
        self.problems = self._differences()

    def __enter__(self) -> CheckpointTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _differences(self) -> list[str]:
        described = self.manifest.tensors
        problems = [
            f"{name}: expected by the manifest, in no file" for name in described.keys() - self._parts
        ]
        problems += [f"{name}: in a file, not in the manifest" for name in self._parts.keys() - described]
        for name in described.keys() & self._parts.keys():
            shapes = [file.get_slice(name).get_shape() for file in self._parts[name]]
            if sum(map(prod, shapes)) != prod(described[name]["shape"]):
                problems.append(f"{name}: expected shape {described[name]['shape']}, found {shapes}")
        return sorted(problems)

    def parts(self, name: str) -> list[Tensor]:
        """A tensor's parts as they lie in the files, one where it is whole."""
        return [file.get_tensor(name) for file in self._parts[name]]

    def read(self, name: str) -> Tensor:
        """A tensor, whole, on the CPU."""
        described = self.manifest.tensors[name]
        if len(parts := self.parts(name)) == 1 and list(parts[0].shape) == described["shape"]:
            return parts[0]
        tensor = torch.empty(described["shape"], dtype=getattr(torch, described["dtype"]))
        read_tensors({name: tensor}, self.folder, self._files, world_size=1)
        return tensor


def dtype_name(tensor: Tensor) -> str:
    """`float32` and the like."""
    return str(tensor.dtype).removeprefix("torch.")


def count_non_finite(tensor: Tensor) -> int:
    """NaN and infinite values; whole numbers have none."""
    return int((~tensor.isfinite()).sum()) if tensor.is_floating_point() else 0
