"""Trains a SentencePiece BPE tokenizer, and writes the same ids as a tokenizer.json.

The settings that lose nothing are in `sentencepiece_model.py`; opening and encoding in `tokenizers.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from llm_pretrain.data.sentencepiece_model import DECODER, SPACE, read_pieces, train_sentencepiece
from llm_pretrain.data.tokenizer_folder import SPECIAL_TOKENS, bpe_model, tokenizer_json
from llm_pretrain.data.tokenizers import SPACE_SPLIT


def build_sentencepiece_bpe(blocks: Iterator[str], vocab_size: int) -> tuple[dict[str, Any], bytes]:
    """(tokenizer.json, tokenizer.model) of exactly `vocab_size` ids.

    SentencePiece merges, among all neighbours whose concatenation is a piece, those of the best-scored
    piece first, the leftmost among equals. The `tokenizers` library merges listed pairs in the list's order,
    so every split of a piece into two pieces is listed, pieces by falling score. Raises DataError.
    """
    model = train_sentencepiece(blocks, vocab_size, "bpe")
    pieces = read_pieces(model)
    scores = pieces.scores
    merges = [
        [piece[:cut], piece[cut:]]
        for piece in sorted(scores, key=lambda piece: -scores[piece])
        for cut in _cuts(piece)
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    content = tokenizer_json(
        pieces.ids,
        chat=True,
        normalizer=SPACE_SPLIT["normalizer"],
        pre_tokenizer=_pre_tokenizer(scores),
        decoder=DECODER,
        model=bpe_model(pieces.ids, merges, byte_fallback=True, unk_token=SPECIAL_TOKENS[0]),
    )
    return content, model


def _cuts(piece: str) -> list[int]:
    """Where to cut a piece in two, in the order that prefers the leftmost of two overlapping merges.

    Neighbours x, y, z with x + y = y + z = piece overlap in y, a border of the piece, and the left merge
    cuts at len(x). Cuts rise, except where only the shorter of the two borders exists.
    """
    length = len(piece)
    cuts = list(range(1, length))
    for short in range(1, (length + 1) // 2):
        has_short = piece[:short] == piece[length - short :]
        has_long = piece[: length - short] == piece[short:]
        if has_short and not has_long:
            cuts[short - 1], cuts[length - short - 1] = length - short, short
    return cuts


def _pre_tokenizer(pieces: dict[str, float]) -> dict[str, Any] | None:
    """Splits before every run of spaces, for speed; exact where no piece has a space after something else."""
    if any(re.search(f"[^{SPACE}]{SPACE}", piece) for piece in pieces):
        return None
    return SPACE_SPLIT["pre_tokenizer"]
