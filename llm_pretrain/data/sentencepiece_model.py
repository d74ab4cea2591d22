"""Trains SentencePiece models with settings under which no text is altered.

Writing one as a tokenizer.json is in `sentencepiece_bpe.py` and `sentencepiece_unigram.py`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llm_pretrain.data.tokenizer_folder import CHAT_TOKENS
from llm_pretrain.errors import DataError

SPACE = "▁"
"""How SentencePiece writes a space; the character itself (U+2581) it cannot tell from one."""

DECODER: dict[str, Any] = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ],
}
"""The `decoder` entry of tokenizer.json for such a model."""

_TRAINER = {
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "add_dummy_prefix": False,
    "byte_fallback": True,
    "allow_whitespace_only_pieces": True,
    "character_coverage": 0.9999,
    "max_sentence_length": 1 << 20,  # blocks are far shorter: none is passed over
    "unk_id": 0,
    "bos_id": 1,
    "eos_id": 2,
    "pad_id": 3,
    "control_symbols": list(CHAT_TOKENS),
    "num_threads": 1,
    "minloglevel": 3,
}


def train_sentencepiece(blocks: Iterator[str], vocab_size: int, model_type: str) -> bytes:
    """A serialised `ModelProto`. Raises DataError for a size that is too small or too large for the text."""
    import sentencepiece

    model = io.BytesIO()
    train: Any = sentencepiece.SentencePieceTrainer
    options = {"model_type": model_type, "vocab_size": vocab_size, **_TRAINER}
    try:
        train.train(sentence_iterator=blocks, model_writer=model, **options)
    except (RuntimeError, OSError) as error:
        raise DataError(_vocabulary_message(str(error), vocab_size)) from error
    return model.getvalue()


def _vocabulary_message(error: str, vocab_size: int) -> str:
    """SentencePiece's complaint about the size, as one line that names the option and the bound."""
    if bound := re.search(r"too high \(\d+\)\. Please set it to a value <= (\d+)", error):
        most = bound[1]
        return (
            f"--vocab_size: expected at most {most} for this text, found {vocab_size}; lower it or add text"
        )
    if bound := re.search(r"smaller than required_chars\. \d+ vs (\d+)", error):
        return f"--vocab_size: expected at least {bound[1]} for this text, found {vocab_size}; raise it"
    return f"--vocab_size {vocab_size}: SentencePiece could not train: {' '.join(error.split())}"


@dataclass(frozen=True)
class Pieces:
    """A model's vocabulary: `ids` of all pieces, `scores` of those that text is cut into."""

    ids: dict[str, int]
    scores: dict[str, float]


def read_pieces(model: bytes) -> Pieces:
    """The pieces of a serialised model."""
    import sentencepiece

    processor: Any = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = range(processor.get_piece_size())
    reserved = {i for i in ids if processor.is_byte(i) or processor.is_control(i) or processor.is_unknown(i)}
    return Pieces(
        {processor.id_to_piece(i): i for i in ids},
        {processor.id_to_piece(i): processor.get_score(i) for i in ids if i not in reserved},
    )
