"""Weights between our decoder and transformers' files, in both directions.

Names and layout are `tensor_layout.py`. Files are read here; writing them safely is the checkpoints'
business.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from torch import Tensor

from llm_pretrain.config import ModelConfig
from llm_pretrain.errors import CheckpointError, DivergedError
from llm_pretrain.export.config_json import model_config_from_huggingface
from llm_pretrain.export.tensor_files import TensorFiles
from llm_pretrain.export.tensor_layout import from_disk, to_disk
from llm_pretrain.model import Decoder


def _cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Floating tensors in `dtype`, others as they are.

    A router's bias stays in fp32: it moves in steps that a low precision would swallow.

    Raises:
        CheckpointError: a value becomes infinite.
        DivergedError: it was no finite number before.
    """
    if not tensor.is_floating_point() or name.endswith(("e_score_correction_bias", "expert_bias")):
        return tensor.detach().cpu().clone()
    cast = tensor.detach().to("cpu", dtype, copy=True).contiguous()
    if not bool(torch.isfinite(cast).all()):
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


def to_huggingface(state: dict[str, Tensor], model: ModelConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of `model.safetensors`, each its own memory on the CPU.

    Experts stand one by one (transformers stacks them when it loads; other readers know nothing else),
    a tied head is left out, floating tensors are cast and others left alone. Names and layout are those of
    the architecture that `huggingface_config` names; where it refuses, those that only we open.

    Args:
        state: `Decoder.state_dict()`.
        model: The decoder's shape.
        dtype: Of the floating tensors.

    Raises:
        CheckpointError: Naming tensor and value, where a value does not fit in `dtype`.
        DivergedError: Likewise, where a value is not finite.
    """
    return {name: _cast(name, tensor, dtype) for name, tensor in to_disk(state, model)}


def from_huggingface(state: dict[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """A state for `Decoder.load_state_dict(strict=True)`, from stacked experts or one by one.

    Args:
        state: Tensors of a weights file, in any home's layout.
        model: The decoder's shape, as `model_config_from_huggingface` gives it for the file beside it.

    Raises:
        CheckpointError: Where an expert is missing, or a tensor is not zero that our decoder lacks.
    """
    return from_disk(state, model)


def read_config(folder: str | Path) -> dict:
    """A weights folder's `config.json`; CheckpointError where there is none or it is broken."""
    path = Path(folder) / "config.json"
    if not path.exists():
        raise CheckpointError(
            f"{path}: expected a weights folder's config.json, found none; "
            "name a folder such as RUN/weights/step-00000100"
        )
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        found = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{path}: expected a weights folder's config.json, found: {found}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def load_pretrained(folder: str | Path, *, dtype: torch.dtype | None = None) -> Decoder:
    """Open a weights folder, ours or transformers', as a decoder on the CPU, in training mode.

    Args:
        folder: With `config.json` and `model.safetensors` (or its shards and their index).
        dtype: Of all parameters. Default: fp32, whatever the file holds.

    Raises:
        CheckpointError: Missing or broken files, or tensors that do not belong to the config.
        ConfigError: An architecture that our decoder cannot compute.
    """
    folder = Path(folder)
    config = model_config_from_huggingface(read_config(folder))
    with TensorFiles(folder) as files:
        state = from_huggingface({name: files.read(name) for name in files.names}, config)
    model = Decoder(config)
    try:
        model.load_state_dict(state, strict=True)
    except RuntimeError as error:
        details = " ".join(str(error).split())
        raise CheckpointError(
            f"{folder}: expected the tensors that config.json describes, found: {details}"
        ) from error
    return model if dtype is None else model.to(dtype)
