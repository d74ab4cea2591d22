"""Writes a weights folder as one GGUF file that llama.cpp opens: same token ids, same logits.

Tensor by tensor, so that a model needs no more memory than its largest layer of experts. Which
architecture it becomes is in `gguf_architecture.py`, the tokenizer in `gguf_tokenizer.py`.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from llm_pretrain.config import ModelConfig
from llm_pretrain.errors import CheckpointError, ConfigError
from llm_pretrain.export.config_json import model_config_from_huggingface
from llm_pretrain.export.gguf_architecture import (
    gguf_architecture,
    gguf_metadata,
    gguf_name,
    has_interleaved_rotary,
)
from llm_pretrain.export.gguf_tokenizer import Vocabulary, read_vocabulary
from llm_pretrain.export.huggingface import read_config
from llm_pretrain.export.tensor_files import TensorFiles

if TYPE_CHECKING:
    from gguf import GGUFWriter

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_FILE_TYPES = {"fp32": "ALL_F32", "fp16": "MOSTLY_F16", "bf16": "MOSTLY_BF16"}
_MIXTRAL_ROLES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


class _Entry(NamedTuple):
    """One tensor of the file, made when its turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]


def write_gguf(weights: Path, output: Path, dtype: str) -> list[str]:
    """Write `output` whole or not at all.

    Args:
        weights: A weights folder, ours or transformers', with its tokenizer.
        output: The file; replaced if it exists.
        dtype: `bf16`, `fp16` or `fp32`, of the matrices. Norms, router and its bias are always fp32, as
            llama.cpp's own converter has them.

    Returns:
        What the reader of the file should know, one line each.

    Raises:
        ConfigError: Naming the fields that llama.cpp has no architecture for, or a missing `gguf`.
        DataError: A tokenizer that llama.cpp would split otherwise.
        CheckpointError: Broken weights, or a value that does not fit in `dtype`.
    """
    try:
        import gguf
    except ImportError:
        raise ConfigError(
            "--to gguf: expected the package gguf, found none; pip install 'llm_pretrain[gguf]'"
        ) from None
    model = model_config_from_huggingface(read_config(weights))
    architecture = gguf_architecture(model)
    vocabulary = read_vocabulary(weights, model.vocab_size or 0)
    with TensorFiles(weights) as files:
        entries = _entries(files, model, architecture, _DTYPES[dtype])
        temporary = output.with_name(f".{output.name}.tmp-{uuid.uuid4().hex}")
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            writer = gguf.GGUFWriter(temporary, architecture)
            _add_metadata(writer, model, architecture, output.stem, _FILE_TYPES[dtype])
            _add_vocabulary(writer, vocabulary)
            _write(writer, entries)
            os.replace(temporary, output)
        except OSError as error:
            reason = error.strerror or " ".join(str(error).split())
            raise CheckpointError(f"{output}: writing failed: {reason}") from error
        finally:
            temporary.unlink(missing_ok=True)
    return vocabulary.notes


def _entries(files: TensorFiles, model: ModelConfig, architecture: str, dtype: torch.dtype) -> list[_Entry]:
    """Every tensor of the file, in a fixed order."""
    groups: dict[str, list[tuple[int, str]]] = {}
    for disk_name in files.names:
        name, expert = _our_name(disk_name)
        if name == "lm_head.weight" and model.tie_word_embeddings:
            continue
        groups.setdefault(name, []).append((expert, disk_name))
    entries = []
    for name, members in groups.items():
        target = gguf_name(name, architecture)
        if target is None:
            raise CheckpointError(
                f"{files.folder}: expected tensors of a {architecture} model, found {name}; "
                "config.json and the weights do not belong together"
            )
        entries.append(_entry(files, model, architecture, dtype, target, sorted(members)))
    if architecture == "glm4moe":
        present = {entry.name for entry in entries}
        for layer in model.moe_layers:
            if (bias := f"blk.{layer}.exp_probs_b.bias") not in present:
                zeros = torch.zeros(model.num_experts)
                entries.append(_Entry(bias, tuple(zeros.shape), torch.float32, lambda zeros=zeros: zeros))
    return entries


def _our_name(disk_name: str) -> tuple[str, int]:
    """The decoder's name of a tensor on disk without its expert, and the expert (-1: not one of them)."""
    name = disk_name.replace(".block_sparse_moe.", ".mlp.")
    match = re.fullmatch(r"(.*\.mlp\.experts)\.(\d+)\.(\w+)\.weight", name)
    if not match:
        return name, -1
    return f"{match[1]}.{_MIXTRAL_ROLES.get(match[3], match[3])}.weight", int(match[2])


def _entry(
    files: TensorFiles,
    model: ModelConfig,
    architecture: str,
    dtype: torch.dtype,
    target: str,
    members: list[tuple[int, str]],
) -> _Entry:
    is_expert = members[0][0] >= 0
    if is_expert and [expert for expert, _ in members] != list(range(model.num_experts)):
        raise CheckpointError(
            f"{files.folder}: expected {model.num_experts} experts in {target}, found {len(members)}; "
            "config.json and the weights do not belong together"
        )
    shape = files.shape(members[0][1])
    heads = 0
    if has_interleaved_rotary(architecture) and re.search(r"attn_[qk]\.weight", target):
        heads = model.num_attention_heads if "attn_q" in target else model.num_key_value_heads
    if len(shape) == 1 or "ffn_gate_inp" in target:
        dtype = torch.float32

    def make() -> Tensor:
        tensors = [_cast(name, files.read(name), dtype) for _, name in members]
        tensor = torch.stack(tensors) if is_expert else tensors[0]
        return _interleave(tensor, heads) if heads else tensor

    return _Entry(target, (len(members), *shape) if is_expert else shape, dtype, make)


def _interleave(weight: Tensor, heads: int) -> Tensor:
    """Rows of a projection [heads · D, H], so that the pairs (d, d + D/2) come to lie side by side."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


def _cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    cast = tensor.to(dtype)
    if not bool(torch.isfinite(cast).all()):
        value = tensor.float().nan_to_num(nan=float("inf")).abs().max().item()
        raise CheckpointError(
            f"{name}: expected finite values within {torch.finfo(dtype).max:.4g} for {dtype}, "
            f"found {value:.6g}; choose another --dtype or look at why it grew"
        )
    return cast


def _add_metadata(
    writer: GGUFWriter, model: ModelConfig, architecture: str, name: str, file_type: str
) -> None:
    import gguf

    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType[file_type])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in gguf_metadata(model, architecture).items():
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


def _write(writer: GGUFWriter, entries: list[_Entry]) -> None:
    import gguf
    import numpy as np

    kinds = {
        torch.float32: gguf.GGMLQuantizationType.F32,
        torch.float16: gguf.GGMLQuantizationType.F16,
        torch.bfloat16: gguf.GGMLQuantizationType.BF16,
    }
    for entry in entries:
        size = entry.dtype.itemsize
        for extent in entry.shape:
            size *= extent
        writer.add_tensor_info(entry.name, entry.shape, np.dtype(np.float32), size, kinds[entry.dtype])
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for entry in entries:
            tensor = entry.make().contiguous()
            # numpy has no bf16: its bits travel as uint16
            is_bf16 = tensor.dtype == torch.bfloat16
            writer.write_tensor_data((tensor.view(torch.uint16) if is_bf16 else tensor).numpy())
        writer.flush()
        for file in writer.fout or []:
            os.fsync(file.fileno())
    finally:
        writer.close()
