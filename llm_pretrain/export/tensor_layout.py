"""Converts tensors between our names and stacked experts in memory and each architecture's layout on disk."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.errors import CheckpointError, ConfigError
from llm_pretrain.export.hf_architectures import (
    ROUTER_BIAS,
    SHARED_EXPERT,
    match_hf_architecture,
    scales_down_proj,
)

_BIAS = ".mlp.gate.e_score_correction_bias"
_RENAMES = {
    "mixtral": (
        (r"\.mlp\.", ".block_sparse_moe."),
        (r"(experts\.\d+)\.gate_proj", r"\1.w1"),
        (r"(experts\.\d+)\.up_proj", r"\1.w3"),
        (r"(experts\.\d+)\.down_proj", r"\1.w2"),
    ),
    "ernie4_5_moe": ((r"\.mlp\.gate\.e_score_correction_bias", ".mlp.moe_statics.e_score_correction_bias"),),
    "qwen2_moe": ((r"\.mlp\.shared_experts\.", ".mlp.shared_expert."),),
    "hy_v3": (
        (r"\.mlp\.gate\.weight", ".mlp.router.gate.weight"),
        (r"\.mlp\.gate\.e_score_correction_bias", ".mlp.expert_bias"),
        (r"\.mlp\.shared_experts\.", ".mlp.shared_mlp."),
    ),
}
"""From the common names to an architecture's, as in the published checkpoints."""
_COMMON_NAMES = (
    (r"\.block_sparse_moe\.", ".mlp."),
    (r"(experts\.\d+)\.w1\.", r"\1.gate_proj."),
    (r"(experts\.\d+)\.w3\.", r"\1.up_proj."),
    (r"(experts\.\d+)\.w2\.", r"\1.down_proj."),
    (r"\.mlp\.router\.gate\.", ".mlp.gate."),
    (r"\.mlp\.(gate\.)?moe_statics\.", ".mlp.gate."),
    (r"\.mlp\.(expert_bias|e_score_correction_bias)$", _BIAS),
    (r"\.mlp\.(shared_mlp|shared_expert)\.", ".mlp.shared_experts."),
)
"""From any architecture's names to the common ones."""
_ROTATED = re.compile(r"\.self_attn\.[qk]_proj\.weight$")
_QKV_BIAS = re.compile(r"\.self_attn\.[qkv]_proj\.bias$")
_EXPERT_DOWN = re.compile(r"\.experts\.(\d+\.)?down_proj(\.weight)?$")
_SHARED_GATE = ".mlp.shared_expert_gate.weight"
_SHARED_DOWN = ".mlp.shared_experts.down_proj.weight"
_SHARED_IN = (".mlp.shared_experts.gate_proj.weight", ".mlp.shared_experts.up_proj.weight")


@dataclass(frozen=True)
class DiskTensor:
    """A tensor on disk: elements of one of ours that lie together, at most multiplied or with rows reordered.

    So a part of ours, wherever it was cut, is written without the rest.

    Args:
        name, shape: On disk.
        source: The name of our tensor.
        begin: Its first element.
        factor: Of the values; 0 for zeros, of which `source` gives only the type.
        head_dim: Rows of a head that are interleaved, as `interleave_heads` does; 0 for none.
    """

    name: str
    shape: tuple[int, ...]
    source: str
    begin: int = 0
    factor: float = 1.0
    head_dim: int = 0

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def of(self, source: Tensor) -> Tensor:
        """Its values from the whole of `source`, whose memory it may share."""
        if self.factor == 0:
            return source.new_zeros(self.shape)
        values = source.reshape(-1)[self.begin : self.begin + self.elements].view(self.shape)
        if self.head_dim:
            values = interleave_heads(values, self.head_dim)
        return values if self.factor == 1 else values * self.factor

    def parts(self, values: Tensor, start: int) -> Iterator[tuple[Tensor, int]]:
        """What it has of `values`, the source's elements from `start` on: vectors that lie together on disk,
        not yet multiplied, and the place in this tensor where each begins."""
        first, last = max(start, self.begin), min(start + len(values), self.begin + self.elements)
        while first < last and self.factor:
            size, place = last - first, first - self.begin
            part = values[first - start : last - start]
            if self.head_dim:
                columns = self.shape[-1]
                row, column = divmod(place, columns)
                head, within = divmod(row, self.head_dim)
                if within == column == 0 and size >= self.head_dim * columns:  # a head at a time
                    size = self.head_dim * columns
                    part = interleave_heads(part[:size].view(-1, columns), self.head_dim).flatten()
                else:  # a row at a time
                    size = min(size, columns - column)
                    part = part[:size]
                    half, dim = divmod(within, self.head_dim // 2)
                    place = (head * self.head_dim + 2 * dim + half) * columns + column
            yield part, place
            first += size


def disk_layout(shapes: Mapping[str, Sequence[int]], model: ModelConfig) -> Iterator[DiskTensor]:
    """The tensors on disk, in the layout of the model's architecture: separate experts, no tied head.

    A model without an architecture in transformers keeps the common names and values.

    Args:
        shapes: Of our tensors, by name.
        model: The decoder's shape.
    """
    model_type = model_type_of(model)
    rules = _RENAMES.get(model_type or "", ())
    for each in _rearranged(_unstacked(shapes, model), model, model_type):
        yield replace(each, name=_renamed(each.name, rules))


def to_disk(state: Mapping[str, Tensor], model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Name on disk and tensor, as `disk_layout` says. Tensors may share memory with `state`."""
    for each in disk_layout({name: tensor.shape for name, tensor in state.items()}, model):
        yield each.name, each.of(state[each.source])


def model_type_of(model: ModelConfig) -> str | None:
    """`model_type` of the folder's config.json; None where only this package opens the weights."""
    try:
        return match_hf_architecture(model)
    except ConfigError:
        return None


def _renamed(name: str, rules: Iterable[tuple[str, str]]) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name, count=1)
    return name


def _layer(name: str) -> int:
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return int(match[1]) if match else -1


def _unstacked(shapes: Mapping[str, Sequence[int]], model: ModelConfig) -> Iterator[DiskTensor]:
    for name, shape in shapes.items():
        prefix, _, rest = name.rpartition(".experts.")
        if name == "lm_head.weight" and model.tie_word_embeddings:
            continue
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(rest)
        if parts is None:
            yield DiskTensor(name, tuple(shape), name)
            continue
        experts, rows, columns = shape
        own = (rows // len(parts), columns)
        for number, (e, part) in enumerate(product(range(experts), parts)):
            disk_name = f"{prefix}.experts.{e}.{part}.weight"
            yield DiskTensor(disk_name, own, name, begin=number * math.prod(own))


def _rearranged(
    tensors: Iterable[DiskTensor], model: ModelConfig, model_type: str | None
) -> Iterator[DiskTensor]:
    """The values and additional tensors of an architecture.

    - No architecture has a factor on softmax weights: the experts' down projections are multiplied by it
      (`from_huggingface` divides them again; see `scales_down_proj`).
    - Ernie 4.5 rotates neighbouring dimensions, so the rows of a head's query and key are interleaved.
    - Qwen2-MoE multiplies its shared expert by a sigmoid gate: a gate of zeros halves the output, so the down
      projection is doubled (both exact in every type). Its attention has biases: zeros.
    - Architectures with a router bias always have one, and some always have a shared expert: zeros. (A shared
      expert of width 0 works in transformers, but not in every reader's kernels.)
    """
    factor = model.routed_scaling_factor if model_type and scales_down_proj(model) else 1.0
    for tensor in tensors:
        name = tensor.name
        if factor != 1 and _EXPERT_DOWN.search(name):
            yield replace(tensor, factor=factor)
        elif model_type == "ernie4_5_moe" and _ROTATED.search(name):
            yield replace(tensor, head_dim=model.attention_head_dim)
        elif model_type == "ernie4_5_moe" and name.endswith(_BIAS):
            yield replace(tensor, shape=(1, *tensor.shape))
        elif model_type == "qwen2_moe" and name.endswith(_SHARED_DOWN):
            yield replace(tensor, factor=2.0)
        else:
            yield tensor
            if name.endswith(".mlp.gate.weight") and model_type:
                for added, shape in _added(name.removesuffix(".mlp.gate.weight"), model, model_type):
                    yield DiskTensor(added, shape, tensor.source, factor=0.0)
            if model_type == "qwen2_moe" and re.search(r"\.self_attn\.[qkv]_proj\.weight$", name):
                bias = name.removesuffix("weight") + "bias"
                yield DiskTensor(bias, tensor.shape[:1], tensor.source, factor=0.0)


def _added(layer: str, model: ModelConfig, model_type: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tensors of zeros of a MoE layer that the architecture has and our decoder does not."""
    hidden, size = model.hidden_size, model.expert_intermediate_size
    if model_type in ROUTER_BIAS and model.router_bias_update_rate == 0:
        yield f"{layer}{_BIAS}", (1,) * (model_type == "ernie4_5_moe") + (model.num_experts,)
    if model_type == "qwen2_moe":
        yield f"{layer}{_SHARED_GATE}", (1, hidden)
    if model_type in SHARED_EXPERT and not model.n_shared_experts:
        for name, shape in (("gate", (size, hidden)), ("up", (size, hidden)), ("down", (hidden, size))):
            yield f"{layer}.mlp.shared_experts.{name}_proj.weight", shape


def interleave_heads(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder [heads · D, H] from rotary pairs (d, d + D/2) to pairs (2d, 2d + 1)."""
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def separate_heads(weight: Tensor, head_dim: int) -> Tensor:
    """The inverse of `interleave_heads`."""
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def from_huggingface(
    state: Mapping[str, Tensor], model: ModelConfig, *, names: Iterable[str] | None = None
) -> dict[str, Tensor]:
    """A state for `Decoder.load_state_dict(strict=True)`, from stacked or separate experts.

    The architecture is recognised by tensor names that no other has.

    Args:
        state: Tensors of whole layers, in any architecture's layout.
        model: The decoder's shape, as `model_config_from_huggingface` reads it from the `config.json`.
        names: Names of all tensors of the weights, where `state` is only a part of them.

    Raises:
        CheckpointError: an expert is missing, a tensor that our decoder lacks is not zero, or a tied head is
            not the embedding.
    """
    names = list(state if names is None else names)
    is_ernie = any(".moe_statics." in name for name in names)
    is_scaled = scales_down_proj(model) and model_type_of(model) is not None
    is_gated = any(name.endswith(_SHARED_GATE) for name in names)
    result: dict[str, Tensor] = {}
    for disk_name, tensor in _unfused(state, model):
        if _layer(disk_name) >= model.num_hidden_layers or disk_name.endswith("rotary_emb.inv_freq"):
            continue  # layers of multi-token prediction; a table in old files
        name = _renamed(disk_name, _COMMON_NAMES)
        if name.endswith(_SHARED_IN) and model.n_shared_experts == 0:
            continue  # the down projection is zeros
        if _must_be_zero(name, model):
            _refuse_nonzero(disk_name, tensor)
        elif is_ernie and _ROTATED.search(name):
            result[name] = separate_heads(tensor, model.attention_head_dim)
        elif name.endswith(_BIAS):
            result[name] = tensor.flatten()
        elif is_scaled and _EXPERT_DOWN.search(name):
            result[name] = (
                tensor.to(torch.promote_types(tensor.dtype, torch.float32)) / model.routed_scaling_factor
            )
        elif is_gated and name.endswith(_SHARED_DOWN):
            result[name] = tensor / 2
        else:
            result[name] = tensor
    result = _stacked(result, model)
    if model.tie_word_embeddings and (embedding := result.get("model.embed_tokens.weight")) is not None:
        _refuse_other_head(result.get("lm_head.weight"), embedding)
        result["lm_head.weight"] = embedding
    return result


def _refuse_other_head(head: Tensor | None, embedding: Tensor) -> None:
    """Refuse a head beside a tied embedding that has other values, which transformers would not tie."""
    if head is not None and (head.shape != embedding.shape or not bool((head == embedding).all())):
        raise CheckpointError(
            "lm_head.weight: expected the values of model.embed_tokens.weight, since config.json says "
            "tie_word_embeddings, found others; set it to false in config.json, or leave the head out"
        )


def _unfused(state: Mapping[str, Tensor], model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """`state` with the projections that Phi-3 keeps in one tensor as separate ones."""
    heads = (model.num_attention_heads, model.num_key_value_heads, model.num_key_value_heads)
    rows_of = {
        "qkv_proj": {f"{x}_proj": n * model.attention_head_dim for x, n in zip("qkv", heads, strict=True)},
        "gate_up_proj": dict.fromkeys(("gate_proj", "up_proj"), model.intermediate_size),
    }
    for name, tensor in state.items():
        match = re.fullmatch(r"(.*\.)(qkv_proj|gate_up_proj)\.weight", name)
        rows = rows_of[match[2]] if match else {}
        if match is None or sum(rows.values()) != len(tensor):
            yield name, tensor
            continue
        for part, piece in zip(rows, tensor.split(list(rows.values())), strict=True):
            yield f"{match[1]}{part}.weight", piece


def _must_be_zero(name: str, model: ModelConfig) -> bool:
    """Whether our decoder lacks this tensor, so that it must be zero."""
    if name.endswith(_BIAS):
        return model.router_bias_update_rate == 0
    if name.endswith(_SHARED_DOWN):
        return model.n_shared_experts == 0
    return name.endswith(_SHARED_GATE) or _QKV_BIAS.search(name) is not None


def _refuse_nonzero(name: str, tensor: Tensor) -> None:
    if bool(tensor.any()):
        raise CheckpointError(
            f"{name}: expected zeros, since our decoder has no such tensor, found up to "
            f"{tensor.abs().max().item():.4g}; "
            + (
                "set model.router_bias_update_rate above 0"
                if name.endswith("bias") and "_proj" not in name
                else "these weights cannot be opened"
            )
        )


def _stacked(state: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """`state` with separate experts stacked."""
    result: dict[str, Tensor] = {}
    per_expert: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name, tensor in state.items():
        match = re.fullmatch(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if match:
            per_expert.setdefault(match[1], {})[int(match[2]), match[3]] = tensor
        else:
            result[name] = tensor
    for prefix, experts in per_expert.items():
        wanted = {(e, role) for e in range(model.num_experts) for role in ("gate", "up", "down")}
        if wanted != experts.keys():
            raise CheckpointError(
                f"{prefix}: expected gate, up and down of {model.num_experts} experts, "
                f"found {len(experts)} tensors; config.json and the weights do not belong together"
            )
        pairs = [torch.cat([experts[e, "gate"], experts[e, "up"]]) for e in range(model.num_experts)]
        result[f"{prefix}.gate_up_proj"] = torch.stack(pairs)
        result[f"{prefix}.down_proj"] = torch.stack([experts[e, "down"] for e in range(model.num_experts)])
    return result
