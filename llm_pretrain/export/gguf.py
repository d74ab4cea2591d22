"""Writes a weights folder as one GGUF file that llama.cpp opens: same token ids, same logits.

Tensor by tensor, so that a model needs no more memory than its largest layer of experts. Which
architecture it becomes is in `gguf_architecture.py`, the tokenizer in `gguf_tokenizer.py`.
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

from llm_pretrain.config import ModelConfig
from llm_pretrain.errors import CheckpointError, ConfigError
from llm_pretrain.export.config_json import model_config_from_huggingface
from llm_pretrain.export.gguf_architecture import (
    gguf_architecture,
    gguf_metadata,
    gguf_name,
    has_interleaved_rotary,
    missing_in_glm4moe,
)
from llm_pretrain.export.gguf_tokenizer import Vocabulary, read_vocabulary
from llm_pretrain.export.huggingface import read_config
from llm_pretrain.export.tensor_files import TensorFiles
from llm_pretrain.export.tensor_layout import from_disk, interleave_heads
from llm_pretrain.model import Decoder

if TYPE_CHECKING:
    from gguf import GGUFWriter

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_FILE_TYPES = {"fp32": "ALL_F32", "fp16": "MOSTLY_F16", "bf16": "MOSTLY_BF16"}
_ALL = slice(None)


class _Entry(NamedTuple):
    """One tensor of the file: from a tensor of ours, or zeros where `source` is None."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: str | None
    rows: slice
    """Of the second dimension: gate and up projections are stacked in ours."""


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
    entries = _entries(model, architecture, _DTYPES[dtype])
    with TensorFiles(weights) as files:
        temporary = output.with_name(f".{output.name}.tmp-{uuid.uuid4().hex}")
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            writer = gguf.GGUFWriter(temporary, architecture)
            _add_metadata(writer, model, architecture, output.stem, _FILE_TYPES[dtype])
            _add_vocabulary(writer, vocabulary)
            _write(writer, entries, _tensors(files, entries, model, architecture))
            os.replace(temporary, output)
        except OSError as error:
            reason = error.strerror or " ".join(str(error).split())
            raise CheckpointError(f"{output}: writing failed: {reason}") from error
        finally:
            temporary.unlink(missing_ok=True)
    return vocabulary.notes


def _entries(model: ModelConfig, architecture: str, dtype: torch.dtype) -> list[_Entry]:
    """Every tensor of the file, layer by layer, by the decoder's own shapes."""
    with torch.device("meta"):
        state = Decoder(model).state_dict()
    entries: list[_Entry] = []

    def add(name: str, shape: tuple[int, ...], source: str | None, rows: slice = _ALL) -> None:
        target = gguf_name(name, architecture)
        assert target is not None, name
        is_fp32 = len(shape) == 1 or "ffn_gate_inp" in target
        entries.append(_Entry(target, shape, torch.float32 if is_fp32 else dtype, source, rows))

    for name, tensor in state.items():
        shape = tuple(tensor.shape)
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
        for name, shape in missing_in_glm4moe(model, state.keys()):
            add(name, shape, None)
    return entries


def _tensors(
    files: TensorFiles, entries: list[_Entry], model: ModelConfig, architecture: str
) -> Iterator[Tensor]:
    """The tensors of `entries`, in their order, with one layer in memory at a time."""
    parts: dict[str, list[str]] = {}
    for name in files.names:
        parts.setdefault(_part(name), []).append(name)
    loaded, state = "", {}
    for entry in entries:
        if entry.source is None:
            yield torch.zeros(entry.shape, dtype=entry.dtype)
            continue
        if (part := _part(entry.source)) != loaded:
            read = {name: files.read(name) for name in parts.get(part, [])}
            loaded, state = part, from_disk(read, model, names=files.names)
            _refuse_foreign(files, state, entries)
        tensor = state.get(entry.source)
        if entry.rows != _ALL and tensor is not None:
            tensor = tensor[:, entry.rows]
        if tensor is None or tuple(tensor.shape) != entry.shape:
            found = "none" if tensor is None else tuple(tensor.shape)
            raise CheckpointError(
                f"{files.folder}: expected {entry.source} of shape {entry.shape}, found {found}; "
                "config.json and the weights do not belong together"
            )
        tensor = _cast(entry.source, tensor, entry.dtype)
        if has_interleaved_rotary(architecture) and re.search(r"attn_[qk]\.weight", entry.name):
            tensor = interleave_heads(tensor, model.attention_head_dim)
        yield tensor


def _part(name: str) -> str:
    """`layers.3` of a tensor in it; the same for all that are in none."""
    match = re.match(r"model\.(layers\.\d+)\.", name)
    return match[1] if match else "outer"


def _refuse_foreign(files: TensorFiles, state: dict[str, Tensor], entries: list[_Entry]) -> None:
    known = {entry.source for entry in entries} | {"lm_head.weight"}
    if foreign := state.keys() - known:
        raise CheckpointError(
            f"{files.folder}: expected the tensors that config.json describes, found {min(foreign)} too; "
            "they do not belong together"
        )


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
            # numpy has no bf16: its bits travel as uint16
            bits = tensor.contiguous()
            bits = bits.view(torch.uint16) if bits.dtype == torch.bfloat16 else bits
            writer.write_tensor_data(bits.numpy())
        writer.flush()
        for file in writer.fout or []:
            os.fsync(file.fileno())
    finally:
        writer.close()
