"""Reads weights folders, ours and transformers', and converts a state to the tensors of such a folder."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.errors import CheckpointError, DivergedError
from llm_pretrain.export.config_json import model_config_from_huggingface
from llm_pretrain.export.tensor_layout import from_huggingface, to_disk
from llm_pretrain.files import open_plain, read_json
from llm_pretrain.model.decoder import Decoder

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class TensorFiles:
    """Opens a weights folder's safetensors file, or the shards in its index, to read one tensor at a time.

    A context manager. Attributes: `folder`; `names` of all tensors, in the files' order; `parts`: the same by
    `part_of`.

    Raises:
        CheckpointError: a file is missing or broken, or the folder has a single file and an index of others.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        files = ["model.safetensors"]
        if index.exists():
            try:
                weight_map = read_json(index)["weight_map"]
                files = sorted({str(file) for file in weight_map.values()})
            except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                raise CheckpointError(f"{index}: expected an index of shards, found: {error}") from error
        if outside := [file for file in files if Path(file).name != file]:
            raise CheckpointError(f"{index}: expected names of files beside it, found {outside[0]!r:.80}")
        if files != ["model.safetensors"] and (folder / "model.safetensors").exists():
            raise CheckpointError(
                f"{index}: expected no model.safetensors beside the shards that it lists, found one, which "
                "transformers would load alone; remove that file or the index"
            )
        self._stack = ExitStack()
        self._file_of: dict[str, Any] = {}
        for file in files:
            opened = self._open(folder / file)
            if twice := self._file_of.keys() & opened.keys():
                self._stack.close()
                raise CheckpointError(
                    f"{folder / file}: expected each tensor in one shard, found {min(twice)} again"
                )
            self._file_of |= dict.fromkeys(opened.keys(), opened)
        self.names = list(self._file_of)
        self.parts: dict[str, list[str]] = {}
        for name in self.names:
            self.parts.setdefault(part_of(name), []).append(name)

    def _open(self, path: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            open_plain(path).close()  # safetensors would wait for a pipe
            return self._stack.enter_context(safe_open(str(path), "pt"))
        except (OSError, ValueError, SafetensorError) as error:  # ValueError: no name of a file
            self._stack.close()
            reason = " ".join(str(error).split())
            raise CheckpointError(f"{path}: expected a safetensors file, found: {reason}") from error

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def check_size(self, config: ModelConfig) -> None:
        """Check vocabulary and number of layers, before anything of the size that config.json says is made.

        Raises:
            CheckpointError: the files have another vocabulary, or fewer tensors than that many layers.
        """
        name, expected = "model.embed_tokens.weight", (config.vocab_size, config.hidden_size)
        found = tuple(self._file_of[name].get_slice(name).get_shape()) if name in self._file_of else None
        if found != expected:
            first = min(self.names, default="nothing")
            what = f"{first} and no {name}" if found is None else f"{name}: {found}"
            raise CheckpointError(
                f"{self.folder}: expected the tensors that config.json describes, found {what} "
                f"instead of {expected}"
            )
        if len(self.names) < config.num_hidden_layers:
            raise CheckpointError(
                f"{self.folder}: expected the tensors that config.json describes, found {len(self.names)} "
                f"for {config.num_hidden_layers} layers"
            )

    def read(self, name: str) -> Tensor:
        """A tensor on the CPU.

        Raises:
            CheckpointError: it has another type than `_DTYPES`, as quantised weights have, which mean nothing
                without their scales.
        """
        tensor = self._file_of[name].get_tensor(name)
        if tensor.dtype not in _DTYPES:
            found = str(tensor.dtype).removeprefix("torch.")
            raise CheckpointError(
                f"{self.folder}: expected {name} in float32, bfloat16, float16 or float64, found {found}; "
                "name weights that are not quantised"
            )
        return tensor

    def read_part(
        self, part: str, model: ModelConfig, described: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Tensor]:
        """The tensors of a part under the decoder's names.

        Args:
            part: As `part_of`.
            model: The decoder's shape.
            described: Name and shape of all of the decoder's tensors.

        Raises:
            CheckpointError: as `from_huggingface`; they are not those described, or a value is not finite.
        """
        tensors = {name: self.read(name) for name in self.parts.get(part, [])}
        state = from_huggingface(tensors, model, names=self.names)
        own = {name: shape for name, shape in described.items() if part_of(name) == part}
        _check_tensors(self.folder, state, own)
        return state


def part_of(name: str) -> str:
    """`layers.3` for a tensor of that layer, `outer` for the tensors outside the layers."""
    match = re.match(r"model\.(layers\.\d+)\.", name)
    return match[1] if match else "outer"


_CHECKED_ELEMENTS = 1 << 20
"""Looked at together, because `isfinite` makes copies of what it looks at."""


def disk_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The type of a tensor on disk: `dtype` if it is floating, else its own.

    The router bias stays in fp32, because its updates are smaller than the rounding of a lower precision.

    Args:
        name: On disk.
        tensor: Ours.
        dtype: Of floating tensors.
    """
    is_bias = name.endswith(("e_score_correction_bias", "expert_bias"))
    return dtype if tensor.is_floating_point() and not is_bias else tensor.dtype


def rounded(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy on the CPU of a tensor on disk, or of a part of it, in its `disk_dtype`.

    Raises:
        CheckpointError: a value becomes infinite.
        DivergedError: a value was not finite before.
    """
    dtype = disk_dtype(name, tensor, dtype)
    cast = tensor.detach().to("cpu", dtype, copy=True).contiguous()
    if not all(bool(torch.isfinite(chunk).all()) for chunk in cast.view(-1).split(_CHECKED_ELEMENTS)):
        value = tensor.detach().float().abs().max().item()
        if not math.isfinite(value):
            raise DivergedError(
                f"{name}: expected finite values to save, found {value}; what was saved before is sound: "
                "continue from there with a lower optimizer.learning_rate or another data.seed"
            )
        limit = torch.finfo(dtype).max
        raise CheckpointError(
            f"{name}: expected finite values within {limit:.4g} for {dtype}, found {value:.6g}; "
            "choose another checkpoint.weights_dtype or look at why it grew"
        )
    return cast


def to_huggingface(state: Mapping[str, Tensor], model: ModelConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of `model.safetensors`, on the CPU, none sharing memory.

    Experts are separate tensors (transformers stacks them when it loads; other readers cannot read stacked
    ones), a tied head is left out, floating tensors are cast and others are unchanged. Names and layout are
    those of the architecture that `match_hf_architecture` returns; where there is none, our own.

    Args:
        state: `Decoder.state_dict()`.
        model: The decoder's shape.
        dtype: Of the floating tensors.

    Raises:
        CheckpointError: a value does not fit in `dtype`.
        DivergedError: a value is not finite.
    """
    return {name: rounded(name, tensor, dtype) for name, tensor in to_disk(state, model)}


def read_config(folder: str | Path) -> dict:
    """A weights folder's `config.json`; CheckpointError if it is missing or broken."""
    path = Path(folder) / "config.json"
    if not path.exists():
        raise CheckpointError(
            f"{path}: expected a weights folder's config.json, found none; "
            "name a folder such as RUN/weights/step-00000100"
        )
    try:
        content = read_json(path)
    except (OSError, ValueError, RecursionError) as error:
        found = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{path}: expected a weights folder's config.json, found: {found}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def load_pretrained(folder: str | Path, *, dtype: torch.dtype | None = None) -> Decoder:
    """Load a weights folder, ours or transformers', as a decoder on the CPU, in training mode.

    Args:
        folder: With `config.json` and `model.safetensors` (or its shards and their index).
        dtype: Of all parameters. Default: fp32, whatever the file holds.

    Raises:
        CheckpointError: a file is missing or broken, the tensors do not match the config, or a value is not
            finite.
        ConfigError: an architecture that our decoder cannot compute.
    """
    folder = Path(folder)
    config = model_config_from_huggingface(read_config(folder))
    state: dict[str, Tensor] = {}
    for part in read_parts(folder, config):  # all of them before a model of the size that config.json says
        state |= part
    model = Decoder(config)
    model.load_state_dict(state, strict=True)
    return model if dtype is None else model.to(dtype)


def read_parts(folder: Path, config: ModelConfig) -> Iterator[dict[str, Tensor]]:
    """The decoder's tensors from a weights folder, first those outside the layers, then layer by layer.

    Args:
        folder: Ours or transformers'.
        config: As its `config.json` says.

    Raises:
        CheckpointError: a file is missing or broken, the tensors do not match the config, or a value is not
            finite.
    """
    with TensorFiles(folder) as files:
        files.check_size(config)
        described = described_tensors(config)
        for part in dict.fromkeys(map(part_of, described)):
            yield files.read_part(part, config, described)


def described_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of the decoder's tensors, made without memory."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in Decoder(config).state_dict().items()}


def _check_tensors(folder: Path, state: dict[str, Tensor], described: dict[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError if the tensors have other names or shapes, or a value that is not finite."""
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if differing := [name for name in found | described if described.get(name) != found.get(name)]:
        name = differing[0]
        raise CheckpointError(
            f"{folder}: expected the tensors that config.json describes, found others, the first is {name}: "
            f"{found.get(name, 'missing')} instead of {described.get(name, 'none')}"
        )
    for name, tensor in state.items():
        finite = (
            tensor.float() if tensor.dtype == torch.float64 else tensor
        ).isfinite()  # of fp32, as it is loaded
        if not bool(finite.all()):
            value = tensor[~finite][0].item()
            raise CheckpointError(f"{folder}: expected finite fp32 values in {name}, found {value}")
