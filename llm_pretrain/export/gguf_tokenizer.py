"""Converts a tokenizer to GGUF metadata if llama.cpp then computes the same token ids; refuses others.

The supported tokenizers are SentencePiece BPE with byte fallback, single characters with byte fallback, and
byte-level BPE with a split pattern that llama.cpp knows by name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llm_pretrain.errors import DataError
from llm_pretrain.export.huggingface import chat_template, end_of_turn_id
from llm_pretrain.files import read_data, read_object, read_special_tokens
from llm_pretrain.text import reason_of

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
"""llama.cpp's token types."""

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_AFTER_NUMBERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _AFTER_NUMBERS: ("qwen2", False),
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _AFTER_NUMBERS: ("llama-bpe", True),
}
"""Split pattern of tokenizer.json -> llama.cpp's name of the pattern, and the value of `ignore_merges`."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer metadata of a GGUF file.

    Args:
        model: `llama` (SentencePiece BPE) or `gpt2` (byte-level BPE).
        pre: llama.cpp's name of the split pattern.
        tokens: The text of each token, one per row of the embedding.
        types: llama.cpp's type of each token.
        scores: SentencePiece's scores, which order the merges; None for byte-level BPE.
        merges: Merges of byte-level BPE in order, as `left right`; None for SentencePiece.
        special: `bos_token_id`, `eos_token_id` and others -> id.
        adds_bos: Whether llama.cpp adds bos before a text, as the tokenizer does.
        add_space_prefix: Whether llama.cpp adds a space before a text.
        chat_template: Jinja template, without the tags that only training needs.
        notes: Notes for the user of the file.
    """

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float] | None
    merges: list[str] | None
    special: dict[str, int]
    adds_bos: bool
    add_space_prefix: bool
    chat_template: str | None
    notes: list[str] = field(default_factory=list)


def read_vocabulary(folder: Path, vocab_size: int) -> Vocabulary:
    """The tokenizer of a weights folder as GGUF metadata.

    Args:
        folder: The weights folder: with `tokenizer.json`, and with `tokenizer.model` for SentencePiece.
        vocab_size: Rows of the embedding; ids without a token become unused tokens.

    Raises:
        DataError: a file is missing or broken, or llama.cpp would compute other token ids.
    """
    path = folder / "tokenizer.json"
    spec = read_object(path)
    notes: list[str] = []
    model = spec.get("model") or {}
    pre_tokenizers = _flat(spec.get("pre_tokenizer"), "pretokenizers")
    scores: list[float] | None = None
    merges: list[str] | None = None
    space_prefix = False
    is_bpe = model.get("type") == "BPE"
    is_byte_level = is_bpe and any(part["type"] == "ByteLevel" for part in pre_tokenizers)
    if not is_byte_level and not (is_bpe and model.get("byte_fallback")):
        raise DataError(
            f"{path}: expected byte-level BPE or SentencePiece BPE, found {model.get('type')!r}, which "
            "llama.cpp would cut into other tokens; export to huggingface"
        )
    tokens, types = _tokens(spec, vocab_size, path)
    if is_byte_level:
        kind, pre = "gpt2", _pattern_name(pre_tokenizers, model, path)
        notes += _check_normalizer(spec.get("normalizer"), path)
        merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    elif spec.get("normalizer") is None and not model["merges"]:
        kind, pre = "llama", "default"
        tokens, types = _single_characters(tokens, types, model.get("unk_token"), path)
        scores = [0.0] * len(tokens)
        notes.append("llama.cpp reads the character ▁ (U+2581) in a text as a space")
    else:
        kind, pre = "llama", "default"
        space_prefix = _space_prefix(spec.get("normalizer"), path)
        scores, types = _sentencepiece(folder, tokens, types)
    first = _first_token(path)
    special = _special_ids(folder, tokens)
    if first is not None:
        special["bos_token_id"] = first
    return Vocabulary(
        model=kind,
        pre=pre,
        tokens=tokens,
        types=types,
        scores=scores,
        merges=merges,
        special=special,
        adds_bos=first is not None,
        add_space_prefix=space_prefix,
        chat_template=chat_template(folder),
        notes=notes,
    )


def _flat(part: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """The components of a `Sequence`; any other component becomes a list of one."""
    if part is None:
        return []
    return part[inner] if part["type"] == "Sequence" else [part]


def _tokens(spec: dict[str, Any], vocab_size: int, path: Path) -> tuple[list[str], list[int]]:
    """Text and type of every id; unused ids get unique texts, because llama.cpp requires them."""
    known = {index: (token, _NORMAL) for token, index in spec["model"]["vocab"].items()}
    for entry in spec.get("added_tokens") or []:
        known[entry["id"]] = (entry["content"], _CONTROL if entry.get("special") else _USER_DEFINED)
    if known and max(known) >= vocab_size:
        raise DataError(
            f"{path}: expected ids below model.vocab_size {vocab_size}, found {max(known)}; "
            "this is another model's tokenizer"
        )
    both = [known.get(index, (f"[UNUSED{index}]", _UNUSED)) for index in range(vocab_size)]
    return [token for token, _ in both], [kind for _, kind in both]


def _pattern_name(parts: list[dict[str, Any]], model: dict[str, Any], path: Path) -> str:
    """llama.cpp's name of the pre-tokenizer; token ids agree only if the patterns are identical."""
    byte_level = parts[-1]
    splits = [part for part in parts if part["type"] != "ByteLevel"]
    name, ignores_merges = "", False
    if not splits and byte_level.get("use_regex", True):
        name = "gpt-2"
    elif len(splits) == 1 and splits[0]["type"] == "Split" and not byte_level.get("use_regex", True):
        regex = splits[0].get("pattern", {}).get("Regex")
        isolates = splits[0].get("behavior") == "Isolated" and not splits[0].get("invert")
        name, ignores_merges = _PATTERNS.get(regex, ("", False)) if isolates else ("", False)
    plain = not byte_level.get("add_prefix_space") and bool(model.get("ignore_merges")) == ignores_merges
    if not name or not plain or model.get("dropout") or model.get("continuing_subword_prefix"):
        raise DataError(
            f"{path}: expected the split pattern of Qwen2, Llama 3 or GPT-2, found another, which llama.cpp "
            "would cut into other tokens; export to huggingface"
        )
    return name


def _check_normalizer(normalizer: dict[str, Any] | None, path: Path) -> list[str]:
    if normalizer is None:
        return []
    if normalizer["type"] == "NFC":
        return ["llama.cpp does not normalise text to NFC: other forms get other token ids than here"]
    raise DataError(
        f"{path}: expected no normalizer, found {normalizer['type']}, which llama.cpp does not have; "
        "export to huggingface"
    )


def _space_prefix(normalizer: dict[str, Any] | None, path: Path) -> bool:
    """Whether the normalizer adds a space before a text; refuses one that replaces more than spaces."""
    parts = _flat(normalizer, "normalizers")
    replaces = [
        p["type"] == "Replace" and p["pattern"] == {"String": " "} and p["content"] == "▁" for p in parts
    ]
    if replaces == [True]:
        return False
    if replaces == [False, True] and parts[0] == {"type": "Prepend", "prepend": "▁"}:
        return True
    raise DataError(
        f"{path}: expected a normalizer that turns spaces into ▁ and nothing else, found another, which "
        "llama.cpp does not have; export to huggingface"
    )


def _sentencepiece(folder: Path, tokens: list[str], types: list[int]) -> tuple[list[float], list[int]]:
    """Scores and types from `tokenizer.model`; tokenizer.json must have the same pieces."""
    import sentencepiece

    path = folder / "tokenizer.model"
    processor: Any = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(read_data(path))
    except RuntimeError as error:
        raise DataError(
            f"{path}: expected SentencePiece's own file, whose scores llama.cpp needs, found: "
            f"{reason_of(error)}"
        ) from error
    scores, kinds = [0.0] * len(tokens), list(types)
    for index in range(min(processor.get_piece_size(), len(tokens))):
        piece = processor.id_to_piece(index)
        if piece != tokens[index]:
            raise DataError(
                f"{path}: expected the pieces of tokenizer.json, found {piece!r} as {index} where it has "
                f"{tokens[index]!r}"
            )
        scores[index] = processor.get_score(index)
        if processor.is_byte(index):
            kinds[index] = _BYTE
        elif processor.is_unknown(index):
            kinds[index] = _UNKNOWN
        elif processor.is_control(index):
            kinds[index] = _CONTROL
    return scores, kinds


def _single_characters(
    tokens: list[str], types: list[int], unknown: str | None, path: Path
) -> tuple[list[str], list[int]]:
    """Tokens and types of a tokenizer of single characters, written as SentencePiece BPE without merges.

    llama.cpp first replaces a text's spaces by ▁, so the token for a space is named ▁.
    """
    normal = [token for token, kind in zip(tokens, types, strict=True) if kind == _NORMAL]
    longer = [token for token in normal if len(token) > 1 and not _BYTE_TOKEN.fullmatch(token)]
    if "▁" in normal or longer not in ([], [unknown]):
        found = "▁" if "▁" in normal else repr(longer[0])
        raise DataError(
            f"{path}: expected single characters other than ▁, found {found}, which llama.cpp would read "
            "otherwise; export to huggingface"
        )
    kinds = {unknown: _UNKNOWN} | {token: _BYTE for token in normal if _BYTE_TOKEN.fullmatch(token)}
    named = ["▁" if token == " " else token for token in tokens]
    return named, [kinds.get(token, kind) for token, kind in zip(tokens, types, strict=True)]


def _first_token(path: Path) -> int | None:
    """Id of the special token that the tokenizer adds before a text; None if it adds none."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a", add_special_tokens=True).ids
    if full == plain:
        return None
    if full[1:] == plain:
        return full[0]
    raise DataError(
        f"{path}: expected a post-processor that puts at most one token in front, found one that makes "
        f"{full} of {plain}; llama.cpp would not"
    )


def _special_ids(folder: Path, tokens: list[str]) -> dict[str, int]:
    """Ids of the tokens bos, eos, unknown and padding, and of the end of a turn."""
    index = {token: i for i, token in enumerate(tokens)}
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    named = read_special_tokens(folder).items()
    special = {f"{names[key]}_token_id": index[token] for key, token in named if token in index}
    if (end_of_turn := end_of_turn_id(folder)) is not None:
        special["eot_token_id"] = end_of_turn
    return special
