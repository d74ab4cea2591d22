"""Weights and configs in the formats of other libraries, in both directions."""

from llm_pretrain.export.config_json import (
    NATIVE_MODEL_TYPE,
    huggingface_config,
    model_config_from_huggingface,
    native_config,
)
from llm_pretrain.export.gguf import write_gguf
from llm_pretrain.export.homes import home_of
from llm_pretrain.export.huggingface import from_huggingface, load_pretrained, read_config, to_huggingface
from llm_pretrain.export.model_card import CardFacts, CardSource, model_card
from llm_pretrain.export.tensor_files import TensorFiles

__all__ = [
    "NATIVE_MODEL_TYPE",
    "CardFacts",
    "CardSource",
    "TensorFiles",
    "from_huggingface",
    "home_of",
    "huggingface_config",
    "load_pretrained",
    "model_card",
    "model_config_from_huggingface",
    "native_config",
    "read_config",
    "to_huggingface",
    "write_gguf",
]
