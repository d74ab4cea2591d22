"""Makes a tokenizer of single characters; one that it does not know becomes its UTF-8 bytes.

Opening and encoding are in `tokenizers.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from llm_pretrain.data.tokenizer_folder import SPECIAL_TOKENS, bpe_model, tokenizer_json
from llm_pretrain.errors import ConfigError

SMALLEST = 256 + len(SPECIAL_TOKENS)
"""The special tokens and all bytes; characters come behind them, in the order of their code points."""


def build_character(texts: Iterable[str], vocab_size: int | None) -> tuple[dict[str, Any], None]:
    """(tokenizer.json, None) with a token for every character of `texts`, of the most frequent if they are
    more than `vocab_size` has room for. Raises ConfigError for a size without room for one."""
    if vocab_size is not None and vocab_size <= SMALLEST:
        raise ConfigError(
            f"--vocab_size: expected at least {SMALLEST + 1} for char (the special tokens, 256 bytes and "
            f"a character), found {vocab_size}; raise it or leave it out"
        )
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    chosen = sorted(counts, key=lambda character: (-counts[character], character))
    if vocab_size is not None:
        chosen = chosen[: vocab_size - SMALLEST]
    tokens = [*SPECIAL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(chosen)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    content = tokenizer_json(
        vocabulary,
        chat=False,
        decoder={"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        model=bpe_model(vocabulary, [], byte_fallback=True, unk_token=SPECIAL_TOKENS[0]),
    )
    return content, None
