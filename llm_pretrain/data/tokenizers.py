"""Opens tokenizer folders of any origin and encodes text with them, losslessly where they can.

Encoding is done by the `tokenizers` library. Training one is in `tokenizer_training.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from llm_pretrain.data.token_pieces import components, piece_decoder
from llm_pretrain.errors import DataError

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
"""What a token store and a weights folder take along of a tokenizer's folder."""

SPACE_SPLIT: dict[str, Any] = {
    "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    "pre_tokenizer": {
        "type": "Split",
        "pattern": {"Regex": "▁+[^▁]*|[^▁]+"},
        "behavior": "Isolated",
        "invert": False,
    },
}
"""How a tokenizer.json says that every run of spaces begins a segment, which no token crosses."""

_TOKENIZER_PATTERNS = ("*token*", "vocab*", "*.model", "*.tiktoken")
"""What the files of every Hugging Face tokenizer are called, older ones without `tokenizer.json` too."""
_SEGMENTS = (
    re.compile(r"[ ▁]*[^\W\d_]+|[ ▁]*(?:[^\w ▁]|[\d_])+|[ ▁]+"),  # letters apart from everything else
    re.compile(r"[ ▁]+[^ ▁]*|[^ ▁]+"),
)
_KNOWN_CHARACTERS = 1 << 23
MAX_VOCAB_SIZE = 1 << 24
"""Ids above it are a mistake, and tables with an entry for each id would fill the memory."""


class Tokenizer:
    """A tokenizer folder with a `tokenizer.json`, opened for encoding.

    Text is never read as a special token: `</s>` inside a document stays text.
    Attributes: `folder`, `hash` (of `tokenizer.json`, which decides every id), `vocab_size` (highest id
    + 1), `kind` (how it cuts text, in words), `special_ids`, `bos_token_id`, `eos_token_id`, `pad_token_id`
    (None where there is none), `chat_template` (Jinja, or None).
    """

    def __init__(self, folder: Path):
        import tokenizers

        self.folder = folder
        data = _read(folder / "tokenizer.json")
        with self._refusing():
            self._spec: dict[str, Any] = json.loads(data)
            self._backend = tokenizers.Tokenizer.from_str(data.decode("utf-8"))
            self._open(hashlib.sha256(data).hexdigest())

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Turns what the library raises (Exception, its own panic) and our KeyErrors into a DataError."""
        try:
            yield
        except (DataError, KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:
            reason = " ".join(f"{type(error).__name__} {error}".split())
            raise DataError(
                f"{self.folder / 'tokenizer.json'}: expected a tokenizer, found: {reason:.300}"
            ) from error

    def _open(self, digest: str) -> None:
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True
        self._segmenter = _find_segmenter(self._spec)
        self._known: dict[str, list[int]] = {}
        self._known_characters = 0
        self.hash = digest
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        named = _special_tokens(self.folder)
        special = {entry["id"] for entry in self._spec.get("added_tokens", []) if entry.get("special")}
        ids = {key: vocabulary.get(token) for key, token in named.items()}
        special |= {token for token in ids.values() if token is not None}
        self.special_ids = frozenset(special)
        self.bos_token_id = ids.get("bos_token")
        self.eos_token_id = ids.get("eos_token")
        self.pad_token_id = ids.get("pad_token")
        self.kind = _kind(self._spec)
        self.chat_template = _chat_template(self.folder)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens."""
        if self._segmenter is None:
            return self._encode(texts)
        segments = [self._segmenter.findall(text) for text in texts]
        known = self._known
        missing = list(dict.fromkeys(s for parts in segments for s in parts if s not in known))
        known.update(zip(missing, self._encode(missing), strict=True))
        encoded = [list(chain.from_iterable(map(known.__getitem__, parts))) for parts in segments]
        self._known_characters += sum(map(len, missing))
        if self._known_characters > _KNOWN_CHARACTERS:
            known.clear()
            self._known_characters = 0
        return encoded

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        with self._refusing():  # one without an unknown token, say, that meets an unknown character
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def token(self, index: int) -> str:
        """How an id is written in the vocabulary."""
        return self._backend.id_to_token(index) or f"<{index}>"

    def token_pieces(self) -> list[bytes]:
        """The UTF-8 bytes each id stands for, empty for special ids and ids that stand for nothing.

        For a lossless tokenizer the pieces of a text's ids, joined, are the text's own bytes. One whose
        normaliser changes text, or that adds a prefix space, has none to give; its pieces are close.
        """
        with self._refusing():
            pieces = [b""] * self.vocab_size
            decode_piece = piece_decoder(self._spec)
            for token, index in self._backend.get_vocab(with_added_tokens=False).items():
                pieces[index] = decode_piece(token)
            for entry in self._spec.get("added_tokens", []):
                pieces[entry["id"]] = entry["content"].encode("utf-8")
            for index in self.special_ids:
                pieces[index] = b""
            return pieces

    def token_bytes(self) -> np.ndarray:
        """int64 [vocab_size]: the number of UTF-8 bytes each id stands for."""
        return np.array([len(piece) for piece in self.token_pieces()], dtype=np.int64)


def open_tokenizer(folder: str | Path) -> Tokenizer:
    """Opens a folder with `tokenizer.json`, ready to encode documents. Raises DataError."""
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(
            f"{folder}: expected a tokenizer folder, found none; make one with `llm-pretrain tokenizer`"
        )
    if not (folder / "tokenizer.json").is_file():
        raise DataError(f"{folder}: expected tokenizer.json in the tokenizer folder, found none")
    tokenizer = Tokenizer(folder)
    if tokenizer.vocab_size > MAX_VOCAB_SIZE:
        raise DataError(
            f"{folder / 'tokenizer.json'}: expected token ids below {MAX_VOCAB_SIZE}, "
            f"found {tokenizer.vocab_size - 1}"
        )
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"{folder / 'tokenizer_config.json'}: expected an eos_token of the vocabulary, found none"
        )
    return tokenizer


def convert_tokenizer(folder: str | Path, target: Path) -> None:
    """Writes a folder without `tokenizer.json` (an older Hugging Face tokenizer) with one into `target`."""
    folder = Path(folder)
    if not any(path for pattern in _TOKENIZER_PATTERNS for path in folder.glob(pattern)):
        raise DataError(f"{folder}: expected a Hugging Face tokenizer folder, found no tokenizer.json in it")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        tokenizer.save_pretrained(str(target))
    except Exception as error:  # transformers raises many kinds, all mean the same here
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{folder}: expected a Hugging Face tokenizer folder, found: {reason}") from error
    if not (target / "tokenizer.json").is_file():
        raise DataError(f"{folder}: expected a tokenizer that has a fast form (tokenizer.json), found none")


def use_one_thread() -> None:
    """Keeps the `tokenizers` library to one thread; for processes of which there is one per core."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: expected a readable file, found: {error.strerror}") from error


def _json_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: expected JSON, found: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: expected a JSON object, found a {type(content).__name__}")
    return content


def _kind(spec: dict[str, Any]) -> str:
    model = spec["model"]
    if model["type"] != "BPE":
        return model["type"].lower()
    if any(part["type"] == "ByteLevel" for part in components(spec.get("pre_tokenizer"))):
        return "byte-level BPE"
    return "BPE with byte fallback" if model["merges"] else "characters"


def _chat_template(folder: Path) -> str | None:
    """Of chat_template.jinja, or else of tokenizer_config.json (of several, the one named `default`)."""
    if (folder / "chat_template.jinja").is_file():
        return _read(folder / "chat_template.jinja").decode("utf-8", errors="replace")
    if not (folder / "tokenizer_config.json").is_file():
        return None
    template = _json_object(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        entries = [entry for entry in template if isinstance(entry, dict)]
        template = next((entry.get("template") for entry in entries if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _special_tokens(folder: Path) -> dict[str, str]:
    """{"bos_token": "<s>", …} of tokenizer_config.json, or else of special_tokens_map.json."""
    named: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        if not (folder / file).is_file():
            continue
        content = _json_object(folder / file)
        for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
            value = content.get(key)
            token = value.get("content") if isinstance(value, dict) else value
            if isinstance(token, str):
                named[key] = token
    return named


def _find_segmenter(spec: dict[str, Any]) -> re.Pattern[str] | None:
    """Cuts text into segments that no token crosses, where the tokenizer is known to allow it.

    Segments repeat, so each different one is encoded once: about twice as fast as encoding the text whole.
    A pattern fits when it cuts no token of the vocabulary, as its cuts depend on two neighbours alone.
    """
    model, added = spec["model"], spec.get("added_tokens", [])
    plain = model["type"] == "BPE" and model.get("byte_fallback") and all(token["special"] for token in added)
    if not plain or any(spec.get(key) != value for key, value in SPACE_SPLIT.items()):
        return None
    pieces = ["".join(pair) for pair in model["merges"]]
    fitting = (p for p in _SEGMENTS if all(p.fullmatch(s) and len(p.findall(s)) == 1 for s in pieces))
    return next(fitting, None)
