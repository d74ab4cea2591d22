"""Trains a byte-level BPE tokenizer that splits text as Qwen2's does.

Opening and encoding are in `tokenizers.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from llm_pretrain.data.tokenizer_folder import CHAT_TOKENS, SPECIAL_TOKENS, bpe_model, tokenizer_json
from llm_pretrain.errors import ConfigError, DataError

SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
"""Qwen2's, character for character: readers of GGUF know it as the pre-tokenizer `qwen2`.

Qwen2 also normalises to NFC, which alters texts; llama.cpp leaves that out as we do.
"""

SMALLEST = 256 + len(SPECIAL_TOKENS) + len(CHAT_TOKENS)
"""All bytes and the special tokens."""


def build_bytelevel_bpe(blocks: Iterator[str], vocab_size: int) -> tuple[dict[str, Any], None]:
    """(tokenizer.json, None) of exactly `vocab_size` ids. Raises DataError for a text with too few merges."""
    import tokenizers
    from tokenizers import models, pre_tokenizers, trainers

    if vocab_size < SMALLEST:
        raise ConfigError(
            f"--vocab_size: expected at least {SMALLEST} for bytelevel-bpe (256 bytes and the special "
            f"tokens), found {vocab_size}; raise it"
        )
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(SPLIT_PATTERN), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL_TOKENS, *CHAT_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    trained.train_from_iterator(blocks, trainer)
    spec = json.loads(trained.to_str())
    vocabulary: dict[str, int] = spec["model"]["vocab"]
    if len(vocabulary) != vocab_size:
        raise DataError(
            f"--vocab_size: expected at most {len(vocabulary)} for this text, found {vocab_size}; "
            "lower it or add text"
        )
    content = tokenizer_json(
        vocabulary,
        chat=True,
        pre_tokenizer=spec["pre_tokenizer"],
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        model=bpe_model(vocabulary, spec["model"]["merges"], byte_fallback=False, unk_token=None),
    )
    return content, None
