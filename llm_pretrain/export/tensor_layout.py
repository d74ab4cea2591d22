"""Tensors between our names in memory and every home's names on disk, in both directions.

In memory experts are stacked; on disk every reader expects them one by one. Some homes want more than
other names: see `_to_home`. What a home is and when it is chosen is `homes.py`; types and files are
`huggingface.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from llm_pretrain.config import ModelConfig
from llm_pretrain.errors import CheckpointError, ConfigError
from llm_pretrain.export.homes import ALWAYS_SHARED, BIASED_CHOICE, home_of, is_folded

Named = Iterable[tuple[str, Tensor]]

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
"""From the common names to a home's, as the published checkpoints have them."""
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
"""From any home's names to the common ones."""
_ROTATED = re.compile(r"\.self_attn\.[qk]_proj\.weight$")
_QKV_BIAS = re.compile(r"\.self_attn\.[qkv]_proj\.bias$")
_EXPERT_DOWN = re.compile(r"\.experts\.(\d+\.)?down_proj(\.weight)?$")
_SHARED_GATE = ".mlp.shared_expert_gate.weight"
_SHARED_DOWN = ".mlp.shared_experts.down_proj.weight"
_SHARED_IN = (".mlp.shared_experts.gate_proj.weight", ".mlp.shared_experts.up_proj.weight")


def to_disk(state: dict[str, Tensor], model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Name on disk and tensor: experts one by one, without a tied head, as the model's home wants them.

    Without a home, the common names and values. Tensors may share memory with `state`.
    """
    home = _home_or_none(model)
    for name, tensor in _to_home(_unstacked(state, model), model, home):
        yield _renamed(name, _RENAMES.get(home or "", ())), tensor


def _home_or_none(model: ModelConfig) -> str | None:
    try:
        return home_of(model)
    except ConfigError:
        return None


def _renamed(name: str, rules: Iterable[tuple[str, str]]) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name, count=1)
    return name


def _layer(name: str) -> int:
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return int(match[1]) if match else -1


def _unstacked(state: dict[str, Tensor], model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in state.items():
        prefix, _, rest = name.rpartition(".experts.")
        if name == "lm_head.weight" and model.tie_word_embeddings:
            continue
        if rest == "gate_up_proj":
            for e, expert in enumerate(tensor.unbind(0)):
                gate, up = expert.chunk(2)
                yield f"{prefix}.experts.{e}.gate_proj.weight", gate
                yield f"{prefix}.experts.{e}.up_proj.weight", up
        elif rest == "down_proj":
            for e, expert in enumerate(tensor.unbind(0)):
                yield f"{prefix}.experts.{e}.down_proj.weight", expert
        else:
            yield name, tensor


def _to_home(tensors: Named, model: ModelConfig, home: str | None) -> Iterator[tuple[str, Tensor]]:
    """What a home wants beyond names.

    - A factor on softmax weights is in no home: the experts' down projections take it (`from_disk` takes
      it out again, for those that we wrote; see `is_folded`).
    - Ernie 4.5 rotates neighbouring dimensions, so the rows of a head's query and key are interleaved.
    - Qwen2-MoE gates its shared expert by a sigmoid: a gate of zeros halves, so the output is doubled (both
      exact in every type). Its attention has biases: zeros.
    - Homes with a bias on the choice always have one, and some always have a shared expert: zeros. (Width
      0 would do in transformers, but not in every reader's kernels.)
    """
    factor = model.routed_scaling_factor if home and is_folded(model) else 1.0
    for name, tensor in tensors:
        if factor != 1 and _EXPERT_DOWN.search(name):
            yield name, tensor * factor
        elif home == "ernie4_5_moe" and _ROTATED.search(name):
            yield name, interleave_heads(tensor, model.attention_head_dim)
        elif home == "ernie4_5_moe" and name.endswith(_BIAS):
            yield name, tensor[None]
        elif home == "qwen2_moe" and name.endswith(_SHARED_DOWN):
            yield name, tensor * 2
        else:
            yield name, tensor
            if name.endswith(".mlp.gate.weight") and home:
                yield from _added(name.removesuffix(".mlp.gate.weight"), model, home, tensor)
            if home == "qwen2_moe" and re.search(r"\.self_attn\.[qkv]_proj\.weight$", name):
                yield name.removesuffix("weight") + "bias", tensor.new_zeros(len(tensor))


def _added(layer: str, model: ModelConfig, home: str, like: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a MoE layer that the home has and our decoder does not."""
    hidden, size = model.hidden_size, model.expert_intermediate_size
    if home in BIASED_CHOICE and model.router_bias_update_rate == 0:
        zeros = like.new_zeros(model.num_experts)
        yield f"{layer}{_BIAS}", zeros[None] if home == "ernie4_5_moe" else zeros
    if home == "qwen2_moe":
        yield f"{layer}{_SHARED_GATE}", like.new_zeros(1, hidden)
    if home in ALWAYS_SHARED and not model.n_shared_experts:
        for name, shape in (("gate", (size, hidden)), ("up", (size, hidden)), ("down", (hidden, size))):
            yield f"{layer}.mlp.shared_experts.{name}_proj.weight", like.new_zeros(shape)


def interleave_heads(weight: Tensor, head_dim: int) -> Tensor:
    """[heads · D, H] for rotation of the pairs (d, d + D/2), to one for the pairs (2d, 2d + 1)."""
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def separate_heads(weight: Tensor, head_dim: int) -> Tensor:
    """The inverse of `interleave_heads`."""
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def from_disk(
    state: dict[str, Tensor], model: ModelConfig, *, names: Iterable[str] | None = None
) -> dict[str, Tensor]:
    """A state for `Decoder.load_state_dict(strict=True)`, from stacked experts or one by one.

    The home is recognised by tensors that no other has: among `names`, all that the weights hold, where
    `state` is only a part of them (whole layers).

    Raises:
        CheckpointError: Where an expert is missing, or a tensor is not zero that our decoder lacks.
    """
    names = list(state if names is None else names)
    is_ernie = any(".moe_statics." in name for name in names)
    is_scaled = is_folded(model) and _home_or_none(model) is not None
    is_gated = any(name.endswith(_SHARED_GATE) for name in names)
    result: dict[str, Tensor] = {}
    for disk_name, tensor in state.items():
        if _layer(disk_name) >= model.num_hidden_layers or disk_name.endswith("rotary_emb.inv_freq"):
            continue  # layers for predicting further tokens; a table that old files carry
        name = _renamed(disk_name, _COMMON_NAMES)
        if name.endswith(_SHARED_IN) and model.n_shared_experts == 0:
            continue  # whatever goes in, zeros come out
        if _must_be_zero(name, model):
            _refuse_values(disk_name, tensor)
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
    if model.tie_word_embeddings and "model.embed_tokens.weight" in result:
        result["lm_head.weight"] = result["model.embed_tokens.weight"]
    return result


def _must_be_zero(name: str, model: ModelConfig) -> bool:
    """Whether a home has this tensor and our decoder can do without only if it is zero."""
    if name.endswith(_BIAS):
        return model.router_bias_update_rate == 0
    if name.endswith(_SHARED_DOWN):
        return model.n_shared_experts == 0
    return name.endswith(_SHARED_GATE) or _QKV_BIAS.search(name) is not None


def _refuse_values(name: str, tensor: Tensor) -> None:
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


def _stacked(state: dict[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """`state` with experts that stand one by one stacked."""
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
