"""Tokenizer folders: opening, encoding, and training of four types."""

from llm_pretrain.data.tokenizers.tokenizer import (
    MAX_VOCAB_SIZE,
    TOKENIZER_FILES,
    Tokenizer,
    convert_tokenizer,
    open_tokenizer,
    use_one_thread,
)

__all__ = [
    "MAX_VOCAB_SIZE",
    "TOKENIZER_FILES",
    "Tokenizer",
    "convert_tokenizer",
    "open_tokenizer",
    "use_one_thread",
]
