"""Opens tokenizer folders of any origin and encodes text with the `tokenizers` library."""

from __future__ import annotations

import base64
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, overload

import numpy as np

from llm_pretrain.errors import DataError
from llm_pretrain.files import ids_digest, read_chat_template, read_data, read_object, read_special_tokens
from llm_pretrain.text import reason_of

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "chat_template.jinja",
)
"""Files of a tokenizer folder that are copied into token stores and weights folders."""

SPACE_SPLIT: dict[str, Any] = {
    "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    "pre_tokenizer": {
        "type": "Split",
        "pattern": {"Regex": "▁+[^▁]*|[^▁]+"},
        "behavior": "Isolated",
        "invert": False,
    },
}
"""Entries of tokenizer.json that cut text before every run of spaces; no token crosses a cut."""

_SEGMENTS = (
    re.compile(r"[ ▁]*[^\W\d_]+|[ ▁]*(?:[^\w ▁]|[\d_])+|[ ▁]+"),  # letters apart from everything else
    re.compile(r"[ ▁]+[^ ▁]*|[^ ▁]+"),
)
_CACHED_CHARACTERS = 1 << 23
MAX_VOCAB_SIZE = 1 << 24
"""Larger ids are an error; a table of that many entries would fill the memory."""
MAX_GROWTH = 256
"""Bound of the factor by which normaliser and decoder can lengthen a text; the highest in use is about 30."""


class Tokenizer:
    """A tokenizer folder with a `tokenizer.json`, opened for encoding.

    Text never becomes a special token (`</s>` inside a document stays text) unless `parse_special` is set.
    Attributes: `folder`, `hash` (SHA-256 of what determines ids in `tokenizer.json`), `vocab_size`
    (highest id + 1), `kind` (the algorithm, in words), `special_ids`, `bos_token_id`, `eos_token_id`,
    `pad_token_id` (None if undefined), `chat_template` (Jinja, or None), `tool_template` (for
    conversations with tools; None if they use `chat_template`), `special_pattern` (matches special tokens
    that are written in a text), `added_tokens` (the library's, by id), `length_shows_loss` (whether every
    text that decoding does not restore is longer than its decoded text).
    """

    def __init__(self, folder: Path, parse_special: bool = False):
        import tokenizers

        self.parses_special = parse_special
        self.folder = folder
        data = read_data(folder / "tokenizer.json")
        with self.wrapped_errors():
            self._spec: dict[str, Any] = json.loads(data) | {"truncation": None, "padding": None}
            self._check_spec()
            self._backend = tokenizers.Tokenizer.from_str(json.dumps(self._spec))
            self._open(ids_digest(self._spec))

    @contextmanager
    def wrapped_errors(self) -> Iterator[None]:
        """Turns errors and panics of the library, and errors of malformed content, into a DataError."""
        try:
            yield
        except (DataError, MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:
            reason = " ".join(f"{type(error).__name__} {error}".split())
            raise DataError(
                f"{self.folder / 'tokenizer.json'}: expected a tokenizer, found: {reason:.300}"
            ) from error

    def _check_spec(self) -> None:
        """Refuses dropout (random ids) and text growth at which the library runs out of memory and aborts."""
        file = self.folder / "tokenizer.json"
        if dropout := self._spec["model"].get("dropout"):
            raise DataError(
                f"{file}: expected model.dropout null, so that a text always has the same ids, "
                f"found {dropout}; set it to null"
            )
        parts = (self._spec.get(key) for key in ("normalizer", "pre_tokenizer", "decoder"))
        growth = math.prod(_growth(component) for part in parts for component in components(part))
        if growth > MAX_GROWTH:
            raise DataError(
                f"{file}: expected a normalizer and decoder that lengthen text up to {MAX_GROWTH} times, "
                f"found some that do so {min(growth, 1e300):.3g} times; remove their Replace entries"
            )

    def _open(self, digest: str) -> None:
        self._segmenter = _find_segmenter(self._spec)
        self.length_shows_loss = self._segmenter is not None  # others may change text at equal length
        self._cache: dict[str, list[int]] = {}
        self._cached_characters = 0
        self.hash = digest
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        self.added_tokens: dict[int, Any] = self._backend.get_added_tokens_decoder()
        self.vocab_size = max(vocabulary.values()) + 1
        file = self.folder / "tokenizer.json"
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise DataError(f"{file}: expected token ids below {MAX_VOCAB_SIZE}, found {self.vocab_size - 1}")
        for entry in self._spec.get("added_tokens", []):
            if (index := vocabulary.get(entry["content"])) != entry["id"]:  # the library assigns ids anew
                raise DataError(
                    f"{file}: expected ids 0 to {self.vocab_size - 1} without a gap, found {entry['id']} for "
                    f"the added token {entry['content']!r}, which is read as {index}; correct added_tokens"
                )
        named = read_special_tokens(self.folder)
        special = {entry["id"] for entry in self._spec.get("added_tokens", []) if entry.get("special")}
        ids = {key: vocabulary.get(token) for key, token in named.items()}
        special |= {token for token in ids.values() if token is not None}
        self.special_ids = frozenset(special)
        names = sorted((t for t, i in vocabulary.items() if i in special and t[1:]), key=len, reverse=True)
        self._special_texts = frozenset(names)  # not a line break, which may be eos and text
        self.special_pattern = re.compile("|".join(map(re.escape, names)) or "(?!)")
        self.bos_token_id = ids.get("bos_token")
        self.eos_token_id = ids.get("eos_token")
        self.pad_token_id = ids.get("pad_token")
        self.kind = _kind(self._spec)
        self.chat_template = read_chat_template(self.folder)
        self.tool_template = read_chat_template(self.folder, "tool_use")

    @cached_property
    def _text_backend(self) -> Any:
        """The library's tokenizer that finds no special token in a text."""
        spec = _without(self._spec, self._special_texts, self.hash)
        backend = type(self._backend).from_str(json.dumps(spec))
        backend.encode_special_tokens = True
        return backend

    def check_named_tokens(self) -> None:
        """Raises DataError, with file, key and token, if other files name a token that tokenizer.json lacks.

        transformers would add such a token; here it would stay text.
        """
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        for file in (self.folder / "tokenizer_config.json", self.folder / "special_tokens_map.json"):
            content = read_object(file) if file.is_file() else {}
            for key in ("added_tokens_decoder", "extra_special_tokens", "additional_special_tokens"):
                value = content.get(key)
                entries = value.values() if isinstance(value, dict) else value
                for entry in entries if isinstance(entries, Iterable) else ():
                    token = entry.get("content") if isinstance(entry, dict) else entry
                    if token and isinstance(token, str) and token not in vocabulary:
                        raise DataError(
                            f"{file}: {key}: expected tokens that tokenizer.json holds, found "
                            f"{token!r:.100}; save the tokenizer with transformers' save_pretrained"
                        )
            if "added_tokens_decoder" in content:  # then transformers reads no further file
                return

    @overload
    def encode(self, texts: str) -> list[int]: ...  # pyright: ignore[reportOverlappingOverload]
    @overload
    def encode(self, texts: Sequence[str]) -> list[list[int]]: ...
    def encode(self, texts: Sequence[str]) -> list[int] | list[list[int]]:
        """Token ids of a text, or of each of several, without bos and eos; DataError if one has no ids."""
        if isinstance(texts, str):
            return self.encode([texts])[0]
        if self._segmenter is None or self.parses_special:
            return [encoding.ids for encoding in self.encodings(texts, self.parses_special)]
        segments = [self._segmenter.findall(text) for text in texts]
        cache = self._cache
        missing = list(dict.fromkeys(s for parts in segments for s in parts if s not in cache))
        cache.update((s, encoding.ids) for s, encoding in zip(missing, self.encodings(missing), strict=True))
        encoded = [list(chain.from_iterable(map(cache.__getitem__, parts))) for parts in segments]
        self._cached_characters += sum(map(len, missing))
        if self._cached_characters > _CACHED_CHARACTERS:
            cache.clear()
            self._cached_characters = 0
        return encoded

    def encodings(self, texts: Sequence[str], special: bool = False, offsets: bool = False) -> list[Any]:
        """The library's encoding of each text; `special` parses special tokens, `offsets` adds places."""
        with self.wrapped_errors():  # a character without a token, or too long a run for a pattern to match
            backend = self._backend if special else self._text_backend
            encode = backend.encode_batch if offsets else backend.encode_batch_fast
            return encode(list(texts), add_special_tokens=False)

    def plain_text(self, text: str) -> str:
        """The text without what becomes special tokens."""
        return self.special_pattern.sub("", text) if self.parses_special else text

    def files_with_first(self, first: int | None) -> dict[str, bytes]:
        """New content of the files by which readers put the token `first`, and no other, around a text.

        Empty if `first` is None, or if they do so already.
        """
        from tokenizers import Tokenizer, models

        probe = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
        probe.post_processor = self._backend.post_processor
        if first is None or probe.encode("a").ids == [first, 0]:
            return {}
        added = {"add_bos_token": first == self.bos_token_id, "add_eos_token": False}
        added |= {"tokenizer_class": "PreTrainedTokenizerFast"}  # others may ignore the post-processor
        contents = {"tokenizer.json": {**self._spec, "post_processor": first_token(self.token(first), first)}}
        if (file := self.folder / "tokenizer_config.json").is_file():
            contents[file.name] = read_object(file) | added
        return {name: json.dumps(each, ensure_ascii=False).encode() for name, each in contents.items()}

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def token(self, index: int) -> str:
        """The vocabulary entry of an id."""
        return self._backend.id_to_token(index) or f"<{index}>"

    def token_pieces(self) -> list[bytes]:
        """UTF-8 bytes of each id, empty for special and unused ids.

        For a lossless tokenizer, the concatenated pieces of a text's ids are the bytes of the text. They are
        an approximation if the normaliser changes text or the tokenizer adds a prefix space.
        """
        with self.wrapped_errors():
            pieces = [b""] * self.vocab_size
            decode_piece = piece_decoder(self._spec)
            for token, index in self._backend.get_vocab(with_added_tokens=False).items():
                pieces[index] = decode_piece(token)
            for entry in self._spec.get("added_tokens", []):
                pieces[entry["id"]] = entry["content"].encode("utf-8")
            for index in self.special_ids:
                pieces[index] = b""
            return pieces

    def byte_ids(self) -> list[int]:
        """Ids of `<0x00>` to `<0xFF>`: bytes of characters without a token; empty without byte fallback."""
        if not self._spec["model"].get("byte_fallback"):
            return []
        vocabulary = self._backend.get_vocab(with_added_tokens=False)
        return [index for token, index in vocabulary.items() if _BYTE_TOKEN.fullmatch(token)]

    def token_bytes(self) -> np.ndarray:
        """int64 [vocab_size]: number of UTF-8 bytes of each id."""
        return np.array([len(piece) for piece in self.token_pieces()], dtype=np.int64)


def open_tokenizer(folder: str | Path, *, parse_special: bool = False) -> Tokenizer:
    """Opens a folder with `tokenizer.json` and an EOS token, see `Tokenizer`. Raises DataError."""
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(
            f"{folder}: expected a tokenizer folder, found none; make one with `llm-pretrain tokenizer`"
        )
    if not (folder / "tokenizer.json").is_file():
        raise DataError(f"{folder}: expected tokenizer.json in the tokenizer folder, found none")
    tokenizer = Tokenizer(folder, parse_special)
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"{folder / 'tokenizer_config.json'}: expected an eos_token of the vocabulary, found none; name "
            'it there, such as "eos_token": "</s>"'
        )
    return tokenizer


def convert_tokenizer(folder: Path, target: Path) -> Path:
    """Returns `folder`, or `target` with what transformers makes of one without `tokenizer.json` or EOS."""
    has_file = (folder / "tokenizer.json").is_file()
    if not folder.is_dir() or (has_file and "eos_token" in read_special_tokens(folder)):
        return folder
    from transformers import AutoTokenizer

    try:
        # without a value transformers asks on standard input whether to run the folder's own Python files
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        # TOKENIZER_FILES lacks the files that several templates would be saved to
        several = isinstance(tokenizer.chat_template, dict)
        tokenizer.save_pretrained(str(target), save_jinja_files=not several)
        if (folder / "tokenizer.model").is_file() and not (folder / "tokenizer_config.json").exists():
            _normalize_as_sentencepiece(folder / "tokenizer.model", target)
    except Exception as error:  # transformers raises many types of exception
        reason = reason_of(error)
        raise DataError(f"{folder}: expected a Hugging Face tokenizer folder, found: {reason}") from error
    if not (target / "tokenizer.json").is_file():
        raise DataError(f"{folder}: expected a tokenizer that has a fast form (tokenizer.json), found none")
    return folder if has_file and "eos_token" not in read_special_tokens(target) else target


def _normalize_as_sentencepiece(model: Path, target: Path) -> None:
    """Gives a converted tokenizer the model's normalizer. Raises ValueError if ids still differ."""
    from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

    content: Any = sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]  # made at run time
    content.ParseFromString(read_data(model))
    rules = content.normalizer_spec
    steps: list[dict[str, Any]] = []
    if rules.precompiled_charsmap:
        charsmap = base64.b64encode(rules.precompiled_charsmap).decode()
        steps = [{"type": "NFC"}, {"type": "Precompiled", "precompiled_charsmap": charsmap}]
    if rules.remove_extra_whitespaces:
        steps.append({"type": "Replace", "pattern": {"Regex": "^ +| +$| +(?= )"}, "content": ""})
    if rules.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": "▁"})
    normalizer = {"type": "Sequence", "normalizers": [*steps, SPACE_SPLIT["normalizer"]]}
    spec = read_object(target / "tokenizer.json") | {"normalizer": normalizer, "pre_tokenizer": None}
    (target / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    pieces = [piece.piece.replace("▁", " ") for piece in content.pieces if piece.type in (1, 4)]
    texts = [*pieces, " ".join(pieces)]
    processor: Any = SentencePieceProcessor(model_file=str(model))
    if processor.encode(texts) != Tokenizer(target).encode(texts):
        raise ValueError(
            "ids other than SentencePiece's; save it with the class of its model in transformers"
        )


def _without(spec: dict[str, Any], tokens: frozenset[str], digest: str) -> dict[str, Any]:
    """Renames `tokens` in a tokenizer.json: models that look text up in their vocabulary would find them."""

    def renamed(value: Any) -> Any:
        if isinstance(value, dict):
            return {renamed(key): renamed(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [renamed(entry) for entry in value]
        return f"\0{digest}{value}" if isinstance(value, str) and value in tokens else value

    model = spec["model"]
    if "merges" in model:
        merges = [merge for merge in model["merges"] if "".join(merge).replace(" ", "") not in tokens]
        model = model | {"merges": merges}
    return renamed(spec | {"model": model})


def first_token(token: str, index: int) -> dict[str, Any]:
    """Entry `post_processor` of tokenizer.json that puts a special token before a text."""
    first, second = (
        [{"SpecialToken": {"id": token, "type_id": k}}, {"Sequence": {"id": name, "type_id": k}}]
        for k, name in enumerate("AB")
    )
    return {
        "type": "TemplateProcessing",
        "single": first,
        "pair": first + second,
        "special_tokens": {token: {"id": token, "ids": [index], "tokens": [token]}},
    }


def use_one_thread() -> None:
    """Limits the `tokenizers` library to one thread, for worker processes (one per core)."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _kind(spec: dict[str, Any]) -> str:
    model = spec["model"]
    if model["type"] != "BPE":
        return model["type"].lower()
    if any(part["type"] == "ByteLevel" for part in components(spec.get("pre_tokenizer"))):
        return "byte-level BPE"
    return "BPE with byte fallback" if model["merges"] else "characters"


def _find_segmenter(spec: dict[str, Any]) -> re.Pattern[str] | None:
    """A pattern that cuts text into segments that no token crosses, or None.

    Every distinct segment is encoded once, which is about twice as fast as encoding whole texts. A pattern is
    valid if it cuts no token of the vocabulary, because a cut depends only on the two characters around it.
    """
    model, added = spec["model"], spec.get("added_tokens", [])
    plain = model["type"] == "BPE" and model.get("byte_fallback") and all(token["special"] for token in added)
    if not plain or any(spec.get(key) != value for key, value in SPACE_SPLIT.items()):
        return None
    pieces = ["".join(pair) for pair in model["merges"]]
    fitting = (p for p in _SEGMENTS if all(p.fullmatch(s) and len(p.findall(s)) == 1 for s in pieces))
    return next(fitting, None)


_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def components(part: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """The flattened parts of a normaliser, pre-tokenizer or decoder."""
    if part is None:
        return
    inner = part.get("decoders") or part.get("pretokenizers") or part.get("normalizers")
    if inner is None:
        yield part
    else:
        for component in inner:
            yield from components(component)


def _growth(component: dict[str, Any]) -> float:
    """Bound of the factor by which a component lengthens text. Factors multiply: 40 `a` → `aa` give 2^40."""
    if component["type"] == "ByteLevel":
        return 2.0  # a byte above 127 becomes a character of two bytes
    if component["type"] == "Precompiled":
        data = base64.b64decode(component["precompiled_charsmap"])
        replacements = data[4 + int.from_bytes(data[:4], "little") :]  # behind a table and its size
        return max(map(len, replacements.split(b"\0")))
    if component["type"] != "Replace":
        return 1.0
    added = len(component["content"])
    ((kind, pattern),) = component["pattern"].items()
    if kind == "String" and pattern:
        return max(1.0, added / len(pattern))
    return 1.0 + added  # an expression can match between two characters


def piece_decoder(spec: dict[str, Any]) -> Callable[[str], bytes]:
    """A function from a vocabulary entry to its bytes; `spec` is the content of tokenizer.json."""
    parts = [*components(spec.get("decoder")), *components(spec.get("pre_tokenizer"))]
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds:
        byte_of = {character: byte for byte, character in enumerate(_byte_level_alphabet())}
        return lambda token: (
            bytes(byte_of[c] for c in token) if all(c in byte_of for c in token) else token.encode()
        )
    has_space_symbol = "Metaspace" in kinds or any(
        part["type"] == "Replace" and part.get("pattern") == {"String": "▁"} for part in parts
    )

    def decode(token: str) -> bytes:
        match = _BYTE_TOKEN.fullmatch(token)
        if match and "ByteFallback" in kinds:
            return bytes([int(match[1], 16)])
        return (token.replace("▁", " ") if has_space_symbol else token).encode("utf-8")

    return decode


def _byte_level_alphabet() -> list[str]:
    """The character of each byte in byte-level BPE: itself if printable, else the next above 255."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    free = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(free)) for byte in range(256)]
