"""Reads weights folders of this package and of transformers, and converts tensors from and to disk layouts.

In memory, experts are stacked and all architectures share names. On disk, layouts differ by architecture.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.errors import CheckpointError, ConfigError, DivergedError
from llm_pretrain.export.config_json import (
    ROUTER_BIAS,
    SHARED_EXPERT,
    match_hf_architecture,
    model_config_from_huggingface,
    scales_down_proj,
)
from llm_pretrain.files import open_safetensors, read_chat_template, read_json, read_object
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.text import reason_of

INDEX_FILE = "model.safetensors.index.json"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class TensorFiles(ExitStack):
    """Opens a weights folder's safetensors file, or the shards in its index, to read one tensor at a time.

    A context manager. Attributes: `folder`; `names`, the names of all tensors in the files' order; `parts`,
    the names grouped by `part_of`.

    Raises:
        CheckpointError: a file is missing or broken.
    """

    def __init__(self, folder: Path):
        super().__init__()
        self.folder = folder
        index = folder / INDEX_FILE
        files = ["model.safetensors"]
        if index.exists() and not (folder / files[0]).exists():  # transformers prefers the single file, too
            try:
                weight_map = read_json(index)["weight_map"]
                files = sorted({str(file) for file in weight_map.values()})
            except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                raise CheckpointError(f"{index}: expected an index of shards, found: {error}") from error
        if outside := [file for file in files if Path(file).name != file]:
            raise CheckpointError(f"{index}: expected names of files beside it, found {outside[0]!r:.80}")
        self._file_of: dict[str, Any] = {}
        for file in files:
            opened = self.enter_context(open_safetensors(folder / file))
            self._file_of |= dict.fromkeys(opened.keys(), opened)
        self.names = list(self._file_of)
        self.parts: dict[str, list[str]] = {}
        for name in self.names:
            self.parts.setdefault(part_of(name), []).append(name)

    def check_size(self, config: ModelConfig) -> None:
        """Check vocabulary and number of layers, before anything as large as config.json says is allocated.

        Raises:
            CheckpointError: the files have another vocabulary, or fewer tensors than config.json has layers.
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
            CheckpointError: the type is not in `_DTYPES`, for example because weights are quantised: those
                mean nothing without their scales.
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
        """The tensors of a part, under the decoder's names.

        Args:
            part: A result of `part_of`.
            model: The decoder's shape.
            described: Name and shape of all tensors of the decoder.

        Raises:
            CheckpointError: other tensors than described, or a value is not finite; see `from_huggingface`.
        """
        tensors = {name: self.read(name) for name in self.parts.get(part, [])}
        state = from_huggingface(tensors, model, names=self.names)
        own = {name: shape for name, shape in described.items() if part_of(name) == part}
        _check_tensors(self.folder, state, own)
        return state


def part_of(name: str) -> str:
    """The part of a tensor: `layers.3` for a tensor of layer 3, `outer` for tensors outside the layers."""
    match = re.match(r"model\.(layers\.\d+)\.", name)
    return match[1] if match else "outer"


_CHECKED_ELEMENTS = 1 << 20
"""Elements to check at a time, because `isfinite` makes copies of them."""


def disk_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The type of a tensor on disk: `dtype` for a floating tensor, else the tensor's own type.

    The router bias stays in fp32, because its updates are smaller than a rounding error in lower precision.

    Args:
        name: The tensor's name on disk.
        tensor: The tensor in memory.
        dtype: Type of floating tensors on disk.
    """
    is_bias = name.endswith(("e_score_correction_bias", "expert_bias"))
    return dtype if tensor.is_floating_point() and not is_bias else tensor.dtype


def rounded(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy a tensor, or a part of it, to the CPU in its `disk_dtype`.

    Raises:
        CheckpointError: a value becomes infinite.
        DivergedError: a value is not finite before the conversion.
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
    """The tensors of `model.safetensors`, on the CPU, without shared memory.

    Experts are separate tensors: transformers stacks them when loading, and other readers cannot read stacked
    experts. A tied head is left out. Floating tensors are cast, others are unchanged. Names and layout follow
    the architecture from `match_hf_architecture`; without an architecture, they are our own.

    Args:
        state: `Decoder.state_dict()`.
        model: The decoder's shape.
        dtype: Type of the floating tensors.

    Raises:
        CheckpointError: a value does not fit in `dtype`.
        DivergedError: a value is not finite.
    """
    layout = disk_layout({name: tensor.shape for name, tensor in state.items()}, model)
    return {each.name: rounded(each.name, each.of(state[each.source]), dtype) for each in layout}


def read_config(folder: str | Path, name: str = "config.json") -> dict[str, Any]:
    """The JSON object in a weights folder's config; CheckpointError if the file is missing or broken."""
    path = Path(folder) / name
    if not path.exists():
        raise CheckpointError(
            f"{path}: expected a weights folder's {name}, found none; "
            "name a folder such as RUN/weights/step-00000100"
        )
    try:
        content = read_json(path)
    except (OSError, ValueError, RecursionError) as error:
        found = reason_of(error)
        raise CheckpointError(f"{path}: expected a weights folder's {name}, found: {found}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def load_pretrained(folder: str | Path) -> Decoder:
    """Load a weights folder as a decoder in fp32 on the CPU, in training mode.

    Args:
        folder: A folder of this package or of transformers, with `config.json` and `model.safetensors` (or
            shards and their index).

    Raises:
        CheckpointError: a file is missing or broken, tensors do not fit the config, or a value is not finite.
        ConfigError: our decoder does not support the architecture.
    """
    folder = Path(folder)
    config = model_config_from_huggingface(read_config(folder))
    state: dict[str, Tensor] = {}
    for part in read_parts(folder, config):  # read all before allocating a model as config.json says
        state |= part
    model = Decoder(config)
    model.load_state_dict(state, strict=True)
    return model


def read_parts(folder: Path, config: ModelConfig) -> Iterator[dict[str, Tensor]]:
    """The decoder's tensors from a weights folder: first the tensors outside the layers, then each layer's.

    Args:
        folder: A weights folder of this package or of transformers.
        config: The configuration that the folder's `config.json` describes.

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
    """Name and shape of the decoder's tensors, from the meta device, which takes no memory."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in Decoder(config).state_dict().items()}


def _check_tensors(folder: Path, state: dict[str, Tensor], described: dict[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError if names or shapes differ from `described`, or a value is not finite."""
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
        ).isfinite()  # in fp32, the type after loading
        if not bool(finite.all()):
            value = tensor[~finite][0].item()
            raise CheckpointError(f"{folder}: expected finite fp32 values in {name}, found {value}")


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
"""`model_type` -> patterns that turn common names into the architecture's, as in published checkpoints."""
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
"""Patterns that turn the names of any architecture into the common names."""
_ROTATED = re.compile(r"\.self_attn\.[qk]_proj\.weight$")
_QKV_BIAS = re.compile(r"\.self_attn\.[qkv]_proj\.bias$")
_EXPERT_DOWN = re.compile(r"\.experts\.(\d+\.)?down_proj(\.weight)?$")
_SHARED_GATE = ".mlp.shared_expert_gate.weight"
_SHARED_DOWN = ".mlp.shared_experts.down_proj.weight"
_SHARED_IN = (".mlp.shared_experts.gate_proj.weight", ".mlp.shared_experts.up_proj.weight")


@dataclass(frozen=True)
class DiskTensor:
    """A tensor on disk: adjacent elements of one of our tensors, possibly multiplied or with reordered rows.

    So a rank can write any part of our tensor without the other parts.

    Args:
        name, shape: Name and shape on disk.
        source: The name of our tensor.
        begin: The first element in our tensor.
        factor: Factor on the values; 0 for zeros, which take only their type from `source`.
        head_dim: Rows of a head, if rows are reordered as in `interleave_heads`; 0 if not.
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
        """The values on disk, from the whole tensor `source`; they may share its memory."""
        if self.factor == 0:
            return source.new_zeros(self.shape)
        values = source.reshape(-1)[self.begin : self.begin + self.elements].view(self.shape)
        if self.head_dim:
            values = interleave_heads(values, self.head_dim)
        return values if self.factor == 1 else values * self.factor

    def parts(self, values: Tensor, start: int) -> Iterator[tuple[Tensor, int]]:
        """The elements of this tensor in `values`, the source's elements from `start` on: vectors of adjacent
        elements on disk, not yet multiplied, and the index in this tensor where each vector begins."""
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

    If transformers has no architecture for the model, tensors keep the common names and values.

    Args:
        shapes: Shapes of our tensors, by name.
        model: The decoder's shape.
    """
    model_type = model_type_of(model)
    rules = _RENAMES.get(model_type or "", ())
    for each in _rearranged(_unstacked(shapes, model), model, model_type):
        yield replace(each, name=_renamed(each.name, rules))


def model_type_of(model: ModelConfig) -> str | None:
    """`model_type` in the exported config.json; None if only this package can open the weights."""
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
    """Adapt values to an architecture, and add its additional tensors.

    - No architecture has a factor on softmax weights, so the experts' down projections are multiplied by it
      (`from_huggingface` divides them again; see `scales_down_proj`).
    - Ernie 4.5 rotates neighbouring dimensions, so the rows of a head's query and key are interleaved.
    - Qwen2-MoE multiplies its shared expert by a sigmoid gate. A gate of zeros halves the output, so the down
      projection is doubled (both are exact in every type). The biases of its attention are zeros.
    - Some architectures always have a router bias or a shared expert; missing ones become zeros. (A shared
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
                for added, shape in added_tensors(name.removesuffix(".mlp.gate.weight"), model, model_type):
                    yield DiskTensor(added, shape, tensor.source, factor=0.0)
            if model_type == "qwen2_moe" and re.search(r"\.self_attn\.[qkv]_proj\.weight$", name):
                bias = name.removesuffix("weight") + "bias"
                yield DiskTensor(bias, tensor.shape[:1], tensor.source, factor=0.0)


def added_tensors(layer: str, model: ModelConfig, model_type: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors in a MoE layer that the architecture has and our decoder lacks.

    They are written as zeros. `layer` is the prefix of the names, such as `model.layers.3`.
    """
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

    The function recognises an architecture by tensor names that no other architecture has.

    Args:
        state: Tensors of whole layers, in any architecture's layout.
        model: The decoder's shape, from `model_config_from_huggingface` of the `config.json`.
        names: Names of all tensors of the weights, if `state` has only a part of them.

    Raises:
        CheckpointError: an expert is missing, a tensor that our decoder lacks is not zero, or a tied head
            differs from the embedding.
    """
    names = list(state if names is None else names)
    is_ernie = any(".moe_statics." in name for name in names)
    is_scaled = scales_down_proj(model) and model_type_of(model) is not None
    is_gated = any(name.endswith(_SHARED_GATE) for name in names)
    result: dict[str, Tensor] = {}
    for disk_name, tensor in state.items():
        if _layer(disk_name) >= model.num_hidden_layers or disk_name.endswith("rotary_emb.inv_freq"):
            continue  # a layer of multi-token prediction, or a table in old files
        name = _renamed(disk_name, _COMMON_NAMES)
        if name.endswith(_SHARED_IN) and model.n_shared_experts == 0:
            continue  # has no effect, since the down projection is zeros
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
    """Refuse a tied head with other values than the embedding: transformers would not tie them."""
    if head is not None and (head.shape != embedding.shape or not bool((head == embedding).all())):
        raise CheckpointError(
            "lm_head.weight: expected the values of model.embed_tokens.weight, since config.json says "
            "tie_word_embeddings, found others; set it to false in config.json, or leave the head out"
        )


def _must_be_zero(name: str, model: ModelConfig) -> bool:
    """Whether our decoder lacks this tensor, which must then be zero."""
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
    """`state`, with the separate experts stacked."""
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


_ENDS_OF_TURN = (
    *("<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|eot|>", "<|end|>", "<|endofturn|>", "[|endofturn|]"),
    *("<|end_of_turn|>", "<|END_OF_TURN_TOKEN|>", "<|endofresponse|>", "<｜end▁of▁sentence｜>"),
)
"""Tokens that end a chat turn in ChatML, Gemma, Llama 3 and 4, Phi, EXAONE, Cohere, dots and others."""


def end_of_turn_id(folder: Path) -> int | None:
    """Id of the special token that ends a chat turn; None if the tokenizer has no such token.

    Of several tokens of `_ENDS_OF_TURN`, the token whose last occurrence in the chat template is the latest
    counts. If there is no template, or it has none of them, the first token counts. Added tokens that are not
    special are ignored.

    Raises:
        DataError: a file of the tokenizer is missing or broken.
    """
    added = read_object(folder / "tokenizer.json").get("added_tokens") or []
    ids = {entry["content"]: entry["id"] for entry in added if entry.get("special")}
    template = chat_template(folder) or ""
    if "<|return|>" in ids and (not template or "<|return|>" in template):
        return ids["<|return|>"]  # in gpt-oss, <|end|> also ends the thoughts before the answer
    return ids.get(max((name for name in _ENDS_OF_TURN if name in ids), key=template.rfind, default=""))


def chat_template(folder: Path) -> str | None:
    """The chat template; `{% if true %}` replaces transformers' `{% generation %}`, which llama.cpp lacks.

    Both tags trim the same white space.
    """
    template = read_chat_template(folder)
    if template is None:
        return None
    template = template.encode("utf-8", errors="replace").decode()  # JSON may hold half a surrogate pair
    template = re.sub(r"(\{%[-+]?\s*)generation(\s*[-+]?%\})", r"\1if true\2", template)
    return re.sub(r"(\{%[-+]?\s*)endgeneration(\s*[-+]?%\})", r"\1endif\2", template)
