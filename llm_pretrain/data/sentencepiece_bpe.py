"""Trains a SentencePiece BPE tokenizer that loses nothing, and writes it as a Hugging Face folder.

The folder holds SentencePiece's own `tokenizer.model` and a `tokenizer.json` with the same ids, so that
`AutoTokenizer.from_pretrained` opens it. Opening and encoding are in `tokenizers.py`.
"""

from __future__ import annotations

import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_pretrain.data.documents import EMPTY, RecordError, parse_record, read_records
from llm_pretrain.data.tokenizers import SPACE_SPLIT, Tokenizer, open_tokenizer
from llm_pretrain.errors import ConfigError, DataError

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<pad>")
SAMPLE_BYTES = 32 << 20
"""More text than this is sampled, by the hash of its blocks."""

_SPACE = "▁"
_BLOCK_CHARACTERS = 1000
_TRAINER = {
    "model_type": "bpe",
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
    "num_threads": 1,
    "minloglevel": 3,
}


@dataclass(frozen=True)
class TokenizerReport:
    """What was trained on, and how well the tokenizer packs it.

    `bytes_per_token` is taken over the sampled text; `altered_documents` counts documents, of those
    sampled in full, that decoding does not give back exactly; `skipped` bad records by cause.
    """

    documents: int
    text_bytes: int
    sampled_bytes: int
    bytes_per_token: float
    altered_documents: int
    skipped: dict[str, int]


def train_sentencepiece_bpe(
    inputs: Sequence[str], output: str | Path, vocab_size: int, *, on_error: str = "fail"
) -> TokenizerReport:
    """Trains on the text of `inputs` and writes the folder `output`.

    `vocab_size` counts the four special tokens and 256 bytes. The same inputs give the same files. Raises
    DataError for bad records, an empty corpus, and a size that is too small or too large for the text;
    ConfigError for one that is no size at all.
    """
    if vocab_size < 1:
        raise ConfigError(f"--vocab_size: expected more than 0, found {vocab_size}")
    folder = Path(output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder}: expected a new or empty folder, found one in use; choose another")
    texts, skipped = _read_texts(inputs, on_error)
    total = sum(len(text.encode()) for text in texts)
    if not total:
        raise DataError(f"{', '.join(inputs)}: expected text, found none")
    sample = min(1.0, SAMPLE_BYTES / total)
    model = _train((block for text in texts for block in _blocks(text, sample)), vocab_size)
    write_folder(model, folder)
    tokenizer = open_tokenizer(folder)
    checked = texts if sample == 1.0 else ["".join(_blocks(text, sample)) for text in texts]
    tokens, altered = _check(tokenizer, checked)
    sampled = sum(len(text.encode()) for text in checked)
    return TokenizerReport(len(texts), total, sampled, sampled / tokens, altered, dict(skipped))


def write_folder(model: bytes, folder: Path) -> None:
    """Writes a trained SentencePiece model (a serialised `ModelProto`) as a tokenizer folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(model)
    unknown, first, last, padding = SPECIAL_TOKENS
    names = {"unk_token": unknown, "bos_token": first, "eos_token": last, "pad_token": padding}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 30,
        **names,
    }
    for file, content in (
        ("tokenizer.json", _tokenizer_json(model)),
        ("tokenizer_config.json", config),
        ("special_tokens_map.json", names),
    ):
        (folder / file).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _read_texts(inputs: Sequence[str], on_error: str) -> tuple[list[str], Counter[str]]:
    texts: list[str] = []
    skipped: Counter[str] = Counter()
    for record in read_records(inputs):
        try:
            document = parse_record(record)
            texts.append("".join(text for text, _ in document.segments))
        except RecordError as bad:
            if on_error == "fail" and bad.cause != EMPTY:
                raise DataError(f"{bad}; mend it, or leave such records out with --on_error skip") from bad
            skipped[bad.cause] += 1
    return texts, skipped


def _blocks(text: str, sample: float) -> Iterator[str]:
    """Whole lines of about `_BLOCK_CHARACTERS`, of which the share `sample` is kept, chosen by their hash."""
    block: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        for start in range(0, len(line), 2 * _BLOCK_CHARACTERS):
            part = line[start : start + 2 * _BLOCK_CHARACTERS]
            block.append(part)
            size += len(part)
            if size >= _BLOCK_CHARACTERS:
                yield from _sampled("".join(block), sample)
                block, size = [], 0
    if block:
        yield from _sampled("".join(block), sample)


def _sampled(block: str, sample: float) -> Iterator[str]:
    if sample == 1.0 or zlib.crc32(block.encode()) < sample * (1 << 32):
        yield block


def _train(blocks: Iterator[str], vocab_size: int) -> bytes:
    import sentencepiece

    model = io.BytesIO()
    train: Any = sentencepiece.SentencePieceTrainer
    try:
        train.train(sentence_iterator=blocks, model_writer=model, vocab_size=vocab_size, **_TRAINER)
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


def _check(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[int, int]:
    """(tokens of all texts, number of texts that decoding does not give back)."""
    tokens = altered = 0
    for start in range(0, len(texts), 256):
        part = texts[start : start + 256]
        for text, ids in zip(part, tokenizer.encode(part), strict=True):
            tokens += len(ids)
            altered += tokenizer.decode(ids) != text
    return max(tokens, 1), altered


def _tokenizer_json(model: bytes) -> dict[str, Any]:
    """The same tokenizer for the `tokenizers` library.

    SentencePiece merges, among all neighbours whose concatenation is a piece, those of the best-scored
    piece first, the leftmost among equals. The library merges listed pairs in the list's order, so every
    split of a piece into two pieces is listed, pieces by falling score.
    """
    import sentencepiece

    processor: Any = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = range(processor.get_piece_size())
    vocabulary = {processor.id_to_piece(i): i for i in ids}
    reserved = {i for i in ids if processor.is_byte(i) or processor.is_control(i) or processor.is_unknown(i)}
    scores = {processor.id_to_piece(i): processor.get_score(i) for i in ids if i not in reserved}
    merges = [
        [piece[:cut], piece[cut:]]
        for piece in sorted(scores, key=lambda piece: -scores[piece])
        for cut in _cuts(piece)
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    bos = SPECIAL_TOKENS[1]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(vocabulary[token], token) for token in SPECIAL_TOKENS],
        "normalizer": SPACE_SPLIT["normalizer"],
        "pre_tokenizer": _pre_tokenizer(scores),
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [_special(bos, 0), _sequence("A", 0)],
            "pair": [_special(bos, 0), _sequence("A", 0), _special(bos, 1), _sequence("B", 1)],
            "special_tokens": {bos: {"id": bos, "ids": [vocabulary[bos]], "tokens": [bos]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": SPECIAL_TOKENS[0],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }


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
    if any(re.search(f"[^{_SPACE}]{_SPACE}", piece) for piece in pieces):
        return None
    return SPACE_SPLIT["pre_tokenizer"]


def _added_token(index: int, content: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": index, "content": content, **flags}


def _special(token: str, type_id: int) -> dict[str, Any]:
    return {"SpecialToken": {"id": token, "type_id": type_id}}


def _sequence(name: str, type_id: int) -> dict[str, Any]:
    return {"Sequence": {"id": name, "type_id": type_id}}
