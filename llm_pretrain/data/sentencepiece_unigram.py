"""Trains a SentencePiece unigram tokenizer, and writes the same ids as a tokenizer.json.

The settings that lose nothing are in `sentencepiece_model.py`; opening and encoding in `tokenizers.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llm_pretrain.data.sentencepiece_model import DECODER, SPACE, read_pieces, train_sentencepiece
from llm_pretrain.data.tokenizer_folder import tokenizer_json
from llm_pretrain.data.tokenizers import SPACE_SPLIT

SCORE_QUANTUM = 1 / 16
"""Scores are rounded to multiples of this, so that sums of them are exact in SentencePiece's float32.

Otherwise a + aa and aa + a, which score the same, are told apart by rounding, and by another rounding in
another library. Sums are exact up to 2^20, some 100,000 tokens; the rounding moves a piece's probability
by at most 3 %.
"""

_ASCII_SIGNS = r"!-@\[-`{-~"
_SEGMENT = (
    f"{SPACE}*(?:[A-Za-z](?![{_ASCII_SIGNS}{SPACE}])|[{_ASCII_SIGNS}](?![A-Za-z{SPACE}])"
    f"|[^A-Za-z{_ASCII_SIGNS}{SPACE}](?!{SPACE}))*[^{SPACE}]|{SPACE}+"
)
"""Text between cuts, which are before a run of spaces and between an ASCII letter and an ASCII sign.

No piece crosses such a cut (SentencePiece splits by script and by spaces), so the best path through a text
is the best paths through its segments. And none of `<s>`, `<0x41>` stays whole: the `tokenizers` library
would find those in text like any other piece.
"""


def build_sentencepiece_unigram(blocks: Iterator[str], vocab_size: int) -> tuple[dict[str, Any], bytes]:
    """(tokenizer.json, tokenizer.model) of exactly `vocab_size` ids. Raises DataError."""
    model = _with_exact_scores(train_sentencepiece(blocks, vocab_size, "unigram"))
    pieces = read_pieces(model)
    content = tokenizer_json(
        pieces.ids,
        chat=True,
        normalizer=SPACE_SPLIT["normalizer"],
        pre_tokenizer={
            "type": "Split",
            "pattern": {"Regex": _SEGMENT},
            "behavior": "Isolated",
            "invert": False,
        },
        decoder=DECODER,
        model={
            "type": "Unigram",
            "unk_id": 0,
            "vocab": [[piece, pieces.scores.get(piece, 0.0)] for piece in pieces.ids],
            "byte_fallback": True,
        },
    )
    _check_segments(content, pieces.ids, pieces.scores)
    return content, model


def _with_exact_scores(model: bytes) -> bytes:
    from sentencepiece import sentencepiece_model_pb2

    content: Any = sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]  # made at run time
    content.ParseFromString(model)
    for piece in content.pieces:
        piece.score = round(piece.score / SCORE_QUANTUM) * SCORE_QUANTUM
    return content.SerializeToString(deterministic=True)


def _check_segments(content: dict[str, Any], ids: dict[str, int], scores: dict[str, float]) -> None:
    """What `_SEGMENT` relies on, should another version of SentencePiece cut its pieces differently."""
    import json

    import tokenizers

    split = tokenizers.Tokenizer.from_str(json.dumps(content)).pre_tokenizer
    assert split is not None
    crossing = [piece for piece in scores if len(split.pre_tokenize_str(piece)) != 1]
    whole = [piece for piece in ids if piece not in scores and len(split.pre_tokenize_str(piece)) == 1]
    if crossing or whole:
        raise RuntimeError(f"pieces {crossing} are cut, reserved ones {whole} are not")
