"""Trains a tokenizer of any type on a corpus, writes its folder and measures its compression."""

from __future__ import annotations

import io
import json
import re
import shutil
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from llm_pretrain.data.documents import EMPTY, RecordError, parse_record
from llm_pretrain.data.readers import read_records
from llm_pretrain.data.tokenizers import SPACE_SPLIT, Tokenizer, first_token, open_tokenizer
from llm_pretrain.errors import ConfigError, DataError

TokenizerType = Literal["sentencepiece-bpe", "sentencepiece-unigram", "char", "bytelevel-bpe"]
SAMPLE_BYTES = 32 << 20
"""A larger corpus is sampled: the hash of a block decides whether it is used."""

_BLOCK_CHARACTERS = 1000


@dataclass(frozen=True)
class TokenizerReport:
    """The training corpus, and how well the tokenizer compresses it.

    `vocab_size` is the final size; `bytes_per_token` is measured on the sampled text. `altered_documents`
    counts checked documents that decoding does not restore; `skipped` counts bad records by cause.
    """

    vocab_size: int
    documents: int
    text_bytes: int
    sampled_bytes: int
    bytes_per_token: float
    altered_documents: int
    skipped: dict[str, int]


def train_tokenizer(
    input: Sequence[str],
    output: str | Path,
    vocab_size: int | None = None,
    *,
    type: TokenizerType = "sentencepiece-bpe",
    on_error: Literal["skip", "fail"] = "fail",
    text_column: str = "text",
    notice: Callable[[str], object] = lambda text: None,
) -> TokenizerReport:
    """Trains on the text of `input` and writes the folder `output`; a failed training leaves nothing behind.

    The same input gives the same files. Raises DataError for bad records, an empty corpus and a size that is
    impossible for this text, ConfigError for one that is impossible for any text.

    Args:
        input: Files (.jsonl, .parquet, .csv, text, …, also .gz and .zst), folders, patterns, hf://…, or
            `stdlib`: the Python standard library's source; `llm-pretrain prepare --help` lists them.
        output: New folder to write.
        vocab_size: Exact size of the vocabulary, special tokens included; for char it may be left out, and is
            a maximum: the rarest characters become bytes.
        type: Kind of tokenizer.
        on_error: A bad record is counted and left out, or stops with file and line.
        text_column: Field or column that holds a document's text.
        notice: Gets a line at the beginning of each part of the work.
    """
    if vocab_size is None and type != "char":
        raise ConfigError(f"--vocab_size: expected a size for --type {type}, found none; add --vocab_size N")
    if vocab_size is not None and vocab_size < 1:
        raise ConfigError(f"--vocab_size: expected more than 0, found {vocab_size}")
    folder = Path(output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder}: expected a new or empty folder, found one in use; choose another")
    notice(f"reading {', '.join(input)}")
    texts, skipped = _read_texts(input, on_error, text_column)
    total = sum(len(text.encode()) for text in texts)
    if not total:
        raise DataError(f"{', '.join(input)}: expected text, found none")
    sample = min(1.0, SAMPLE_BYTES / total)
    notice(f"training on {min(total, SAMPLE_BYTES):,} of {total:,} bytes in {len(texts):,} documents")
    content, model = _build(type, texts, sample, vocab_size)
    _write(folder, content, model, chat=type != "char")
    tokenizer = open_tokenizer(folder)
    notice("comparing the decoded text with the text")
    checked = texts if sample == 1.0 else ["".join(_blocks(text, sample)) for text in texts]
    tokens, altered = _measure(tokenizer, checked)
    sampled = sum(len(text.encode()) for text in checked)
    return TokenizerReport(
        vocab_size=tokenizer.vocab_size,
        documents=len(texts),
        text_bytes=total,
        sampled_bytes=sampled,
        bytes_per_token=sampled / max(1, tokens),
        altered_documents=altered,
        skipped=dict(skipped),
    )


def _build(
    type: str, texts: Sequence[str], sample: float, vocab_size: int | None
) -> tuple[dict[str, Any], bytes | None]:
    if type == "char":
        return build_character(texts, vocab_size)
    assert vocab_size is not None
    blocks = (block for text in texts for block in _blocks(text, sample))
    if type == "sentencepiece-bpe":
        return build_sentencepiece_bpe(blocks, vocab_size)
    if type == "sentencepiece-unigram":
        return build_sentencepiece_unigram(blocks, vocab_size)
    if type == "bytelevel-bpe":
        return build_bytelevel_bpe(blocks, vocab_size)
    raise ConfigError(f"--type: expected one of {', '.join(get_args(TokenizerType))}, found {type}")


def _write(folder: Path, content: dict[str, Any], model: bytes | None, *, chat: bool) -> None:
    """Writes the folder under a temporary name and renames it when complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.tmp-{uuid.uuid4().hex[:8]}")
    try:
        write_files(temporary, content, chat=chat, model=model)
        if folder.exists():
            folder.rmdir()
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _read_texts(inputs: Sequence[str], on_error: str, text_column: str) -> tuple[list[str], Counter[str]]:
    texts: list[str] = []
    skipped: Counter[str] = Counter()
    for record in read_records(inputs, text_column=text_column):
        try:
            text = parse_record(record, text_column).text()
        except RecordError as bad:
            if on_error == "fail" and bad.cause != EMPTY:
                raise DataError(f"{bad}; correct it, or leave such records out with --on_error skip") from bad
            skipped[bad.cause] += 1
            continue
        if text:
            texts.append(text)
        else:
            skipped["record without text"] += 1  # it has token ids only
    return texts, skipped


def _blocks(text: str, sample: float) -> Iterator[str]:
    """Yields blocks of lines, of about `_BLOCK_CHARACTERS`: the share `sample` of them, chosen by hash."""
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


def _measure(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[int, int]:
    """Counts the tokens of all texts, and the texts that decoding does not restore."""
    tokens = altered = 0
    for start in range(0, len(texts), 256):
        part = texts[start : start + 256]
        for text, ids in zip(part, tokenizer.encode(part), strict=True):
            tokens += len(ids)
            altered += tokenizer.decode(ids) != text
    return tokens, altered


SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<pad>")
"""Ids 0 to 3: unknown (never produced), begin of document, end of document, padding."""
CHAT_TOKENS = ("<|im_start|>", "<|im_end|>")
"""Ids 4 and 5 of tokenizers with a chat template."""

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' -}}
    {%- if message['role'] == 'assistant' -%}
        {%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}
    {%- else -%}
        {{- message['content'] + '<|im_end|>' -}}
    {%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
"""ChatML after BOS, since every document begins with BOS; {% generation %} marks the targets."""


def write_files(folder: Path, tokenizer_json: dict[str, Any], *, chat: bool, model: bytes | None) -> None:
    """Writes a Hugging Face tokenizer folder, and SentencePiece's `model` if given."""
    folder.mkdir(parents=True, exist_ok=True)
    unknown, first, last, padding = SPECIAL_TOKENS
    names = {"unk_token": unknown, "bos_token": first, "eos_token": last, "pad_token": padding}
    extra: dict[str, Any] = {"additional_special_tokens": list(CHAT_TOKENS)} if chat else {}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 30,
        **names,
        **extra,
    }
    if chat:
        config["chat_template"] = CHAT_TEMPLATE
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8", newline="")
    if model is not None:
        (folder / "tokenizer.model").write_bytes(model)
    for file, content in (
        ("tokenizer.json", tokenizer_json),
        ("tokenizer_config.json", config),
        ("special_tokens_map.json", names | extra),
    ):
        (folder / file).write_text(
            json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8", newline=""
        )


def tokenizer_json(vocabulary: dict[str, int], *, chat: bool, **parts: Any) -> dict[str, Any]:
    """Content of a tokenizer.json with the special tokens; its post-processor puts BOS before a text.

    `parts` are `model`, `decoder` and optionally `normalizer` and `pre_tokenizer`.
    """
    special = SPECIAL_TOKENS + (CHAT_TOKENS if chat else ())
    bos = SPECIAL_TOKENS[1]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": vocabulary[token], "content": token, **flags} for token in special],
        "normalizer": parts.get("normalizer"),
        "pre_tokenizer": parts.get("pre_tokenizer"),
        "post_processor": first_token(bos, vocabulary[bos]),
        "decoder": parts["decoder"],
        "model": parts["model"],
    }


def bpe_model(
    vocabulary: dict[str, int], merges: list[Any], *, byte_fallback: bool, unk_token: str | None
) -> dict[str, Any]:
    """The `model` entry of a tokenizer.json for byte-pair merges in the order of `merges`."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unk_token,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": byte_fallback,
        "byte_fallback": byte_fallback,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": merges,
    }


_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
MIN_CHARACTER_VOCAB = 256 + len(SPECIAL_TOKENS)
"""Number of special tokens and bytes; the characters follow them in code point order."""


def build_character(texts: Iterable[str], vocab_size: int | None) -> tuple[dict[str, Any], None]:
    """(tokenizer.json, None) with a token per character of `texts`; `vocab_size` keeps the most frequent.

    Other characters are encoded as UTF-8 bytes. Raises ConfigError if `vocab_size` has no room for one.
    """
    if vocab_size is not None and vocab_size <= MIN_CHARACTER_VOCAB:
        raise ConfigError(
            f"--vocab_size: expected at least {MIN_CHARACTER_VOCAB + 1} for char (the special tokens, "
            f"256 bytes and a character), found {vocab_size}; raise it or leave it out"
        )
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    chosen = sorted(counts, key=lambda character: (-counts[character], character))
    if vocab_size is not None:
        chosen = chosen[: vocab_size - MIN_CHARACTER_VOCAB]
    return character_tokenizer([*SPECIAL_TOKENS, *_BYTES, *sorted(chosen)]), None


def nanogpt_tokenizer(characters: list[str]) -> dict[str, Any]:
    """tokenizer.json with nanoGPT's ids of `characters`; special tokens and bytes follow them."""
    return character_tokenizer([*characters, *SPECIAL_TOKENS, *_BYTES])


def character_tokenizer(tokens: list[str]) -> dict[str, Any]:
    """tokenizer.json of single characters, special tokens and bytes, in the order of their ids."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return tokenizer_json(
        vocabulary,
        chat=False,
        decoder={"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        model=bpe_model(vocabulary, [], byte_fallback=True, unk_token=SPECIAL_TOKENS[0]),
    )


SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
"""The split pattern of Qwen2, which GGUF calls the pre-tokenizer `qwen2`.

Qwen2 also normalises to NFC, which alters texts; like llama.cpp, we leave that out.
"""

MIN_BYTELEVEL_VOCAB = 256 + len(SPECIAL_TOKENS) + len(CHAT_TOKENS)
"""Number of bytes and special tokens."""


def build_bytelevel_bpe(blocks: Iterator[str], vocab_size: int) -> tuple[dict[str, Any], None]:
    """Returns (tokenizer.json, None) with exactly `vocab_size` ids. Raises DataError for too few merges."""
    import tokenizers
    from tokenizers import models, pre_tokenizers, trainers

    if vocab_size < MIN_BYTELEVEL_VOCAB:
        raise ConfigError(
            f"--vocab_size: expected at least {MIN_BYTELEVEL_VOCAB} for bytelevel-bpe (256 bytes and "
            f"the special tokens), found {vocab_size}; raise it"
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


SPACE = "▁"
"""SentencePiece's symbol for a space; SentencePiece cannot distinguish a real U+2581 from a space."""

DECODER: dict[str, Any] = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ],
}
"""The `decoder` entry of tokenizer.json for a SentencePiece model."""

_TRAINER = {
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "add_dummy_prefix": False,
    "byte_fallback": True,
    "allow_whitespace_only_pieces": True,
    "character_coverage": 0.9999,
    "max_sentence_length": 1 << 20,  # longer than any block, so that none is skipped
    "unk_id": 0,
    "bos_id": 1,
    "eos_id": 2,
    "pad_id": 3,
    "control_symbols": list(CHAT_TOKENS),
    "num_threads": 1,
    "minloglevel": 3,
}


def train_sentencepiece(blocks: Iterator[str], vocab_size: int, model_type: str) -> bytes:
    """Trains a model that alters no text; returns a `ModelProto`. Raises DataError for an impossible size."""
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
    """SentencePiece's error as one line that names the option and the bound."""
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
    """A model's vocabulary: `ids` of all pieces; `scores` of all but byte, control and unknown pieces."""

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


def build_sentencepiece_bpe(blocks: Iterator[str], vocab_size: int) -> tuple[dict[str, Any], bytes]:
    """Returns (tokenizer.json, tokenizer.model) with exactly `vocab_size` ids; both encode alike.

    SentencePiece merges adjacent symbols whose concatenation is a piece: the best-scored piece first, and the
    leftmost of equal ones first. The `tokenizers` library merges listed pairs in list order. So the list has
    every split of a piece into two pieces, by descending score of the piece. Raises DataError.
    """
    model = train_sentencepiece(blocks, vocab_size, "bpe")
    pieces = read_pieces(model)
    scores = pieces.scores
    crosses = any(re.search(f"[^{SPACE}]{SPACE}", piece) for piece in scores)
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
        pre_tokenizer=None if crosses else SPACE_SPLIT["pre_tokenizer"],  # for speed
        decoder=DECODER,
        model=bpe_model(pieces.ids, merges, byte_fallback=True, unk_token=SPECIAL_TOKENS[0]),
    )
    return content, model


def _cuts(piece: str) -> list[int]:
    """Positions to cut a piece in two, in an order that puts the leftmost of overlapping merges first.

    Two merges overlap if adjacent symbols have x + y = y + z = piece: y is a border, a prefix and suffix of
    the piece. The left merge cuts at len(x). Cuts ascend, unless only the shorter of the two borders exists.
    """
    length = len(piece)
    cuts = list(range(1, length))
    for short in range(1, (length + 1) // 2):
        has_short = piece[:short] == piece[length - short :]
        has_long = piece[: length - short] == piece[short:]
        if has_short and not has_long:
            cuts[short - 1], cuts[length - short - 1] = length - short, short
    return cuts


SCORE_QUANTUM = 1 / 16
"""Scores are rounded to multiples of this, so that their sums are exact in SentencePiece's float32.

Otherwise rounding errors would choose between a + aa and aa + a of equal score, differently per library.
Sums are exact up to 2^20, about 100,000 tokens; rounding changes a piece's probability by at most 3 %.
"""

_ASCII_SIGNS = r"!-@\[-`{-~"
_SEGMENT = (
    f"{SPACE}*(?:[A-Za-z](?![{_ASCII_SIGNS}{SPACE}])|[{_ASCII_SIGNS}](?![A-Za-z{SPACE}])"
    f"|[^A-Za-z{_ASCII_SIGNS}{SPACE}](?!{SPACE}))*[^{SPACE}]|{SPACE}+"
)
"""Matches a segment: text is cut before a run of spaces, and between an ASCII letter and an ASCII sign.

No piece crosses a cut (SentencePiece splits by script and by spaces), so the best path of a text is the
concatenation of the best paths of its segments. The cuts also split texts such as `<s>` and `<0x41>`;
otherwise the `tokenizers` library would match them to the reserved pieces.
"""


def build_sentencepiece_unigram(blocks: Iterator[str], vocab_size: int) -> tuple[dict[str, Any], bytes]:
    """(tokenizer.json, tokenizer.model) with exactly `vocab_size` ids, encoding alike. Raises DataError."""
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
    """Checks the assumptions of `_SEGMENT`: another version of SentencePiece might break them."""
    import tokenizers

    split = tokenizers.Tokenizer.from_str(json.dumps(content)).pre_tokenizer
    assert split is not None
    crossing = [piece for piece in scores if len(split.pre_tokenize_str(piece)) != 1]
    whole = [piece for piece in ids if piece not in scores and len(split.pre_tokenize_str(piece)) == 1]
    if crossing or whole:
        raise RuntimeError(f"pieces {crossing} are cut, reserved ones {whole} are not")
