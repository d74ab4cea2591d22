"""Corpora and foreign token files turned into token stores."""

from llm_pretrain.data.prepare.conversion import convert
from llm_pretrain.data.prepare.preparation import Preparation, input_bytes, prepare_store

__all__ = [
    "Preparation",
    "convert",
    "input_bytes",
    "prepare_store",
]
