"""Writes a weights folder as one GGUF file, from which llama.cpp computes the same token ids and logits.

Memory holds only one layer at a time.
"""

from __future__ import annotations

import math
import os
import re
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from llm_pretrain.config.model_config import YARN_BETAS, ModelConfig
from llm_pretrain.errors import CheckpointError, ConfigError
from llm_pretrain.export.config_json import GGUF_CARRIED, check_carried, model_config_from_huggingface
from llm_pretrain.export.gguf_tokenizer import Vocabulary, read_vocabulary
from llm_pretrain.export.huggingface import (
    TensorFiles,
    added_tensors,
    described_tensors,
    interleave_heads,
    part_of,
    read_config,
    rounded,
)
from llm_pretrain.model.kernels import DTYPES
from llm_pretrain.text import reason_of

if TYPE_CHECKING:
    from gguf import GGUFWriter

_FILE_TYPES = {"fp32": "ALL_F32", "fp16": "MOSTLY_F16", "bf16": "MOSTLY_BF16"}
_ALL = slice(None)
_SOFTMAX, _SIGMOID = 1, 2
"""llama.cpp's values of `expert_gating_func`."""


class _Entry(NamedTuple):
    """One tensor of the file, from the tensor `source` of our decoder. If `source` is None, it is zeros."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: str | None
    rows: slice
    """Slice of the source's second dimension, in which our gate and up projections are stacked."""


def write_gguf(
    weights: Path, output: Path, dtype: str, *, check: Callable[[], None] = lambda: None
) -> list[str]:
    """Write a GGUF file. After an error, `output` is unchanged.

    Args:
        weights: A weights folder of this package or of transformers, with a tokenizer.
        output: The file; replaced if it exists.
        dtype: Type of the matrices: `bf16`, `fp16` or `fp32`. Norms, router and router bias are always fp32,
            as in files from llama.cpp's own converter.
        check: Called before `output` is replaced; raises if `output` must not be replaced.

    Returns:
        Notes for the user of the file, one line each.

    Raises:
        ConfigError: llama.cpp has no architecture for the model, or the package `gguf` is missing.
        DataError: llama.cpp would tokenize text differently.
        CheckpointError: the weights are broken, a value does not fit in `dtype`, or writing failed.
    """
    try:
        import gguf
    except ImportError:
        raise ConfigError(
            "--to gguf: expected the package gguf, found none; pip install 'llm_pretrain[gguf]'"
        ) from None
    model = model_config_from_huggingface(read_config(weights))
    check_carried(model, "GGUF", GGUF_CARRIED)
    architecture = _architecture(model)
    with TensorFiles(weights) as files:
        files.check_size(model)
        vocabulary = read_vocabulary(weights, model.vocab_size or 0)
        described = described_tensors(model)
        entries = _entries(described, model, architecture, DTYPES[dtype])
        temporary = output.with_name(f".{output.name}.tmp-{uuid.uuid4().hex}")
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            writer = gguf.GGUFWriter(temporary, architecture)
            name = output.stem.encode("utf-8", errors="replace").decode()  # the name may be no UTF-8
            _add_metadata(writer, model, architecture, name, _FILE_TYPES[dtype])
            _add_vocabulary(writer, vocabulary)
            _write(writer, entries, _tensors(files, entries, described, model, architecture))
            check()
            os.replace(temporary, output)
        except OSError as error:
            raise CheckpointError(f"{output}: writing failed: {reason_of(error)}") from error
        finally:
            temporary.unlink(missing_ok=True)
    return vocabulary.notes


def _entries(
    described: dict[str, tuple[int, ...]], model: ModelConfig, architecture: str, dtype: torch.dtype
) -> list[_Entry]:
    """All tensors of the file, layer by layer, from the decoder's shapes."""
    import gguf

    entries: list[_Entry] = []
    key = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(key, model.num_hidden_layers)

    def add(name: str, shape: tuple[int, ...], source: str | None, rows: slice = _ALL) -> None:
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")  # as llama.cpp's converter
        target = names.get_name(name, (".weight", ".bias"))
        assert target is not None
        is_fp32 = len(shape) == 1 or "ffn_gate_inp" in target
        entries.append(_Entry(target, shape, torch.float32 if is_fp32 else dtype, source, rows))

    for name, shape in described.items():
        if name == "lm_head.weight" and model.tie_word_embeddings:
            continue
        if name.endswith("experts.gate_up_proj"):
            prefix, half = name.removesuffix("gate_up_proj"), shape[1] // 2
            for role, rows in (("gate", slice(0, half)), ("up", slice(half, None))):
                add(f"{prefix}{role}_proj.weight", (shape[0], half, shape[2]), name, rows)
        elif name.endswith("experts.down_proj"):
            add(f"{name}.weight", shape, name)
        else:
            add(name, shape, name)
    if architecture == "glm4moe":
        for layer in model.moe_layers:  # the architecture requires them, as that of transformers does
            for name, shape in added_tensors(f"model.layers.{layer}", model, "glm4_moe"):
                add(name, shape, None)
    return entries


def _tensors(
    files: TensorFiles,
    entries: list[_Entry],
    described: dict[str, tuple[int, ...]],
    model: ModelConfig,
    architecture: str,
) -> Iterator[Tensor]:
    """The tensors of `entries`, in order, with one layer in memory at a time."""
    loaded, state = "", {}
    for entry in entries:
        if entry.source is None:
            yield torch.zeros(entry.shape, dtype=entry.dtype)
            continue
        if (part := part_of(entry.source)) != loaded:
            loaded, state = part, files.read_part(part, model, described)
        tensor = state[entry.source]
        if entry.rows != _ALL:
            tensor = tensor[:, entry.rows]
        tensor = rounded(entry.source, tensor, entry.dtype).to(entry.dtype)
        if architecture == "llama" and re.search(r"attn_[qk]\.weight", entry.name):
            tensor = interleave_heads(tensor, model.attention_head_dim)
        yield tensor


def _add_metadata(
    writer: GGUFWriter, model: ModelConfig, architecture: str, name: str, file_type: str
) -> None:
    import gguf

    writer.add_type("model")
    writer.add_quantized_by("llm_pretrain")  # `export --overwrite` replaces only files with this mark
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType[file_type])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in _metadata(model, architecture).items():
        add: Callable[[str, Any], None] = kinds[type(value)]
        add(f"{architecture}.{key}", value)


def _add_vocabulary(writer: GGUFWriter, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.scores is not None:
        writer.add_token_scores(vocabulary.scores)
        writer.add_add_space_prefix(vocabulary.add_space_prefix)
    if vocabulary.merges is not None:
        writer.add_token_merges(vocabulary.merges)
    for name, index in vocabulary.special.items():
        writer.add_uint32(f"tokenizer.ggml.{name}", index)
    writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_add_eos_token(False)
    if vocabulary.chat_template:
        writer.add_chat_template(vocabulary.chat_template)


def _write(writer: GGUFWriter, entries: list[_Entry], tensors: Iterator[Tensor]) -> None:
    import gguf
    import numpy as np

    kinds = {
        torch.float32: gguf.GGMLQuantizationType.F32,
        torch.float16: gguf.GGMLQuantizationType.F16,
        torch.bfloat16: gguf.GGMLQuantizationType.BF16,
    }
    for entry in entries:
        size = math.prod(entry.shape) * entry.dtype.itemsize
        writer.add_tensor_info(entry.name, entry.shape, np.dtype(np.float32), size, kinds[entry.dtype])
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            # numpy has no bf16, so the bits are passed as uint16
            bits = tensor.contiguous()
            bits = bits.view(torch.uint16) if bits.dtype == torch.bfloat16 else bits
            writer.write_tensor_data(bits.numpy())
        writer.flush()
        for file in writer.fout or []:
            os.fsync(file.fileno())
    finally:
        writer.close()


def _architecture(model: ModelConfig) -> str:
    """llama.cpp's architecture that computes the model.

    `qwen3moe` (with QK-norm) and `llama` (Mixtral) have normalised softmax weights, experts in every layer
    and no shared expert. Other models with experts become `glm4moe`, whose metadata expresses these options.

    Raises:
        ConfigError: llama.cpp has no such architecture; the error names the field.
    """
    if not model.moe_layers:
        return "qwen3" if model.qk_norm else "llama"
    if model.moe_layers[0] != model.num_hidden_layers - len(model.moe_layers):
        raise ConfigError(
            "model.decoder_sparse_step: llama.cpp has dense layers before those of experts only, not between "
            f"them; expected 1, found {model.decoder_sparse_step}; export to huggingface"
        )
    is_plain = (
        len(model.moe_layers) == model.num_hidden_layers
        and model.norm_topk_prob
        and model.scoring_func == "softmax"
        and model.n_shared_experts == 0
        and model.routed_scaling_factor == 1
        and model.router_bias_update_rate == 0
    )
    if not is_plain:
        return "glm4moe"
    return "qwen3moe" if model.qk_norm else "llama"


def _metadata(model: ModelConfig, architecture: str) -> dict[str, int | float | str | bool]:
    """llama.cpp's hyperparameters; keys lack the architecture's prefix."""
    head_dim = model.attention_head_dim
    is_mixtral = architecture == "llama" and bool(model.moe_layers)
    metadata: dict[str, int | float | str | bool] = {
        "context_length": model.longest_sequence,
        "embedding_length": model.hidden_size,
        "block_count": model.num_hidden_layers,
        "feed_forward_length": model.expert_intermediate_size if is_mixtral else model.intermediate_size,
        "vocab_size": model.vocab_size or 0,
        "attention.head_count": model.num_attention_heads,
        "attention.head_count_kv": model.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": model.rms_norm_eps,
        "rope.dimension_count": head_dim,
        "rope.freq_base": model.rope_theta,
    }
    if model.rope_type != "default":
        metadata |= {"rope.scaling.type": model.rope_type, "rope.scaling.factor": model.rope_factor}
    if model.rope_type == "yarn":
        metadata |= {
            "rope.scaling.original_context_length": model.rope_original_context,
            **{f"rope.scaling.yarn_{name}": value for name, value in YARN_BETAS.items()},
        }
    if model.moe_layers:
        metadata |= {
            "expert_count": model.num_experts,
            "expert_used_count": model.num_experts_per_tok,
            "expert_feed_forward_length": model.expert_intermediate_size,
        }
    if architecture == "glm4moe":
        metadata |= {
            "expert_shared_count": max(model.n_shared_experts, 1),
            "expert_gating_func": _SIGMOID if model.scoring_func == "sigmoid" else _SOFTMAX,
            "expert_weights_norm": model.norm_topk_prob,
            "expert_weights_scale": model.routed_scaling_factor,
            "leading_dense_block_count": model.moe_layers[0],
        }
    return metadata
