"""Tokenizer folders: opening, encoding, and the files of four types."""

from llm_pretrain.data.tokenizers.tokenizer import Tokenizer, open_tokenizer

__all__ = [
    "Tokenizer",
    "open_tokenizer",
]
