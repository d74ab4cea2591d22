"""Reads and writes weights and configs in the formats of other libraries."""

from llm_pretrain.export.config_json import (
    NATIVE_MODEL_TYPE,
    huggingface_config,
    model_config_from_huggingface,
    native_config,
)
from llm_pretrain.export.gguf import write_gguf
from llm_pretrain.export.gguf_tokenizer import end_of_turn_id
from llm_pretrain.export.hf_architectures import match_hf_architecture
from llm_pretrain.export.huggingface import (
    TensorFiles,
    disk_dtype,
    load_pretrained,
    read_config,
    read_parts,
    rounded,
    to_huggingface,
)
from llm_pretrain.export.model_card import ModelCardData, ModelCardSource, model_card
from llm_pretrain.export.tensor_layout import DiskTensor, disk_layout, from_huggingface

__all__ = [
    "NATIVE_MODEL_TYPE",
    "DiskTensor",
    "ModelCardData",
    "ModelCardSource",
    "TensorFiles",
    "disk_dtype",
    "disk_layout",
    "end_of_turn_id",
    "from_huggingface",
    "huggingface_config",
    "load_pretrained",
    "match_hf_architecture",
    "model_card",
    "model_config_from_huggingface",
    "native_config",
    "read_config",
    "read_parts",
    "rounded",
    "to_huggingface",
    "write_gguf",
]
