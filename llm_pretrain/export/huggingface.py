"""Weights between our names in memory and transformers' files, in both directions.

In memory experts are stacked; on disk every reader expects them one by one. Files are read here;
writing them safely is the checkpoints' business.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from llm_pretrain.config import ModelConfig
from llm_pretrain.errors import CheckpointError
from llm_pretrain.export.config_json import model_config_from_huggingface
from llm_pretrain.model import Decoder

_QWEN_NAMES = ("mlp.gate", "mlp.experts", ("gate_proj", "up_proj", "down_proj"))
_MIXTRAL_NAMES = ("block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2"))
_SHARD_INDEX = "model.safetensors.index.json"


def _moe_names(model: ModelConfig) -> tuple[str, str, tuple[str, str, str]]:
    """Names on disk of a MoE layer's router, experts, and an expert's gate, up and down projections."""
    return _QWEN_NAMES if model.qk_norm else _MIXTRAL_NAMES


def _cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Floating tensors in `dtype`, others as they are; CheckpointError where a value becomes infinite.

    A router's bias stays in fp32: it moves in steps that a low precision would swallow.
    """
    if not tensor.is_floating_point() or name.endswith("e_score_correction_bias"):
        return tensor.detach().cpu().clone()
    cast = tensor.detach().to("cpu", dtype, copy=True).contiguous()
    if not bool(torch.isfinite(cast).all()):
        value = tensor.detach().float().nan_to_num(nan=float("inf")).abs().max().item()
        limit = torch.finfo(dtype).max
        raise CheckpointError(
            f"{name}: expected finite values within {limit:.4g} for {dtype}, found {value:.6g}; "
            "choose another checkpoint.weights_dtype or look at why it grew"
        )
    return cast


def _disk_tensors(state: dict[str, Tensor], model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Name on disk and tensor, experts one by one, without the tied head."""
    gate, experts, (gate_proj, up_proj, down_proj) = _moe_names(model)
    for name, tensor in state.items():
        layer, _, rest = name.partition(".mlp.")
        if name == "lm_head.weight" and model.tie_word_embeddings:
            continue
        if rest.startswith("gate.") and not rest.startswith("gate_proj"):
            yield f"{layer}.{gate}.{rest.removeprefix('gate.')}", tensor
        elif rest == "experts.gate_up_proj":
            for e, expert in enumerate(tensor.unbind(0)):
                gate_half, up_half = expert.chunk(2)
                yield f"{layer}.{experts}.{e}.{gate_proj}.weight", gate_half
                yield f"{layer}.{experts}.{e}.{up_proj}.weight", up_half
        elif rest == "experts.down_proj":
            for e, expert in enumerate(tensor.unbind(0)):
                yield f"{layer}.{experts}.{e}.{down_proj}.weight", expert
        else:
            yield name, tensor


def to_huggingface(state: dict[str, Tensor], model: ModelConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of `model.safetensors`, each its own memory on the CPU.

    Experts stand one by one (transformers stacks them when it loads; other readers know nothing else),
    a tied head is left out, floating tensors are cast and others left alone.

    Args:
        state: `Decoder.state_dict()`.
        model: The decoder's shape.
        dtype: Of the floating tensors.

    Raises:
        CheckpointError: Naming tensor and value, where a value does not fit in `dtype`.
    """
    return {name: _cast(name, tensor, dtype) for name, tensor in _disk_tensors(state, model)}


def from_huggingface(state: dict[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """A state for `Decoder.load_state_dict(strict=True)`, from stacked experts or one by one.

    Args:
        state: Tensors of a weights file, in either layout.
        model: The decoder's shape, which gives the number of experts.

    Raises:
        CheckpointError: Where an expert is missing.
    """
    result: dict[str, Tensor] = {}
    per_expert: dict[str, dict[tuple[int, str], Tensor]] = {}
    roles = {
        "gate_proj": "gate",
        "w1": "gate",
        "up_proj": "up",
        "w3": "up",
        "down_proj": "down",
        "w2": "down",
    }
    for disk_name, tensor in state.items():
        name = disk_name.replace(".block_sparse_moe.", ".mlp.")
        match = re.fullmatch(r"(.*\.mlp\.experts)\.(\d+)\.(\w+)\.weight", name)
        if match and match[3] in roles:
            per_expert.setdefault(match[1], {})[int(match[2]), roles[match[3]]] = tensor
        else:
            result[name] = tensor
    for prefix, experts in per_expert.items():
        wanted = [(e, role) for e in range(model.num_experts) for role in ("gate", "up", "down")]
        if set(wanted) != experts.keys():
            raise CheckpointError(
                f"{prefix}: expected gate, up and down of {model.num_experts} experts, "
                f"found {len(experts)} tensors; config.json and the weights do not belong together"
            )
        pairs = [torch.cat([experts[e, "gate"], experts[e, "up"]]) for e in range(model.num_experts)]
        result[f"{prefix}.gate_up_proj"] = torch.stack(pairs)
        result[f"{prefix}.down_proj"] = torch.stack([experts[e, "down"] for e in range(model.num_experts)])
    if model.tie_word_embeddings and "model.embed_tokens.weight" in result:
        result["lm_head.weight"] = result["model.embed_tokens.weight"]
    return result


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of `model.safetensors`, or of the shards that an index names."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    index = folder / _SHARD_INDEX
    names = ["model.safetensors"]
    if index.exists():
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    tensors: dict[str, Tensor] = {}
    for name in names:
        try:
            tensors |= load_file(folder / name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder / name}: expected a safetensors file, found: {error}") from error
    return tensors


def read_config(folder: str | Path) -> dict:
    """A weights folder's `config.json`; CheckpointError where there is none or it is broken."""
    path = Path(folder) / "config.json"
    if not path.exists():
        raise CheckpointError(
            f"{path}: expected a weights folder's config.json, found none; "
            "name a folder such as RUN/weights/step-00000100"
        )
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        found = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{path}: expected a weights folder's config.json, found: {found}") from error


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
    state = from_huggingface(_read_tensors(folder), config)
    model = Decoder(config)
    try:
        model.load_state_dict(state, strict=True)
    except RuntimeError as error:
        details = " ".join(str(error).split())
        raise CheckpointError(
            f"{folder}: expected the tensors that config.json describes, found: {details}"
        ) from error
    return model if dtype is None else model.to(dtype)
