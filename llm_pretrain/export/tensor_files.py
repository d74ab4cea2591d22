"""The tensors of a weights folder, one at a time: for what is larger than memory.

Opening a whole folder as a decoder is in `huggingface.py`.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from llm_pretrain.errors import CheckpointError


class TensorFiles:
    """`model.safetensors`, or the shards that its index names, opened for reading. A context manager.

    Attributes: `folder`, `names` (of all tensors, in the files' order). Raises CheckpointError.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        files = ["model.safetensors"]
        if index.exists():
            try:
                weight_map = json.loads(index.read_text("utf-8"))["weight_map"]
                files = sorted({str(file) for file in weight_map.values()})
            except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                raise CheckpointError(f"{index}: expected an index of shards, found: {error}") from error
        self._stack = ExitStack()
        self._of: dict[str, Any] = {}
        for file in files:
            opened = self._open(folder / file)
            self._of |= dict.fromkeys(opened.keys(), opened)
        self.names = list(self._of)

    def _open(self, path: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            return self._stack.enter_context(safe_open(str(path), "pt"))
        except (OSError, SafetensorError) as error:
            self._stack.close()
            reason = " ".join(str(error).split())
            raise CheckpointError(f"{path}: expected a safetensors file, found: {reason}") from error

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, name: str) -> Tensor:
        """A tensor, on the CPU."""
        return self._of[name].get_tensor(name)
