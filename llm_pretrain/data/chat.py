"""Conversations as token ids: with a loss mask for training, or as the prompt of the assistant's next turn.

The template is applied in `chat_rendering.py`; the ids are those of transformers' `apply_chat_template`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from llm_pretrain.data.chat_rendering import ChatRenderer, Rendered
from llm_pretrain.data.chat_sandbox import ChatTemplateError
from llm_pretrain.data.tokenizers import Tokenizer
from llm_pretrain.errors import DataError

__all__ = ["ChatTemplateError", "NoChatTemplateError", "chat_prompt_ids", "encode_chat"]


class NoChatTemplateError(DataError):
    """The tokenizer has no chat template, so that no conversation can be encoded with it."""


def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], tools: list[Any] | None = None
) -> tuple[list[int], list[int]]:
    """(ids, loss mask) of a whole conversation: 1 for what the assistant says, end token included.

    Raises NoChatTemplateError, and ChatTemplateError for a conversation that the template does not take.
    """
    encoder = _encoder(tokenizer)
    rendered = encoder.renderer.conversation(messages, tools)
    ids, starts = encoder.encode(rendered)
    mask = np.zeros(len(ids), dtype=np.int64)
    places = np.array(starts)
    for start, end in rendered.spans:
        mask[(places >= start) & (places < end)] = 1
    return ids, mask.tolist()


def chat_prompt_ids(
    tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], tools: list[Any] | None = None
) -> list[int]:
    """Ids of the conversation so far with the head of the assistant's turn. Raises as `encode_chat`."""
    encoder = _encoder(tokenizer)
    return encoder.encode(encoder.renderer.prompt(messages, tools))[0]


class _ChatEncoder:
    """A tokenizer's template, and its backend with special tokens recognised."""

    def __init__(self, tokenizer: Tokenizer):
        import tokenizers

        template = tokenizer.chat_template
        if template is None:
            raise NoChatTemplateError(
                f"{tokenizer.folder}: expected a tokenizer with a chat template, found none; add a "
                "chat_template.jinja, or use records of text"
            )
        self._backend = tokenizers.Tokenizer.from_file(str(tokenizer.folder / "tokenizer.json"))
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        self._special = {token.content: (index, token) for index, token in added.items() if token.special}
        named = {
            "bos_token": tokenizer.bos_token_id,
            "eos_token": tokenizer.eos_token_id,
            "pad_token": tokenizer.pad_token_id,
        }
        tokens = {name: None if i is None else self._backend.id_to_token(i) for name, i in named.items()}
        variables = {name: token for name, token in tokens.items() if token is not None}
        self.renderer = ChatRenderer(template, list(self._special), variables)

    def encode(self, rendered: Rendered) -> tuple[list[int], list[int]]:
        """Ids, and where in the text each token begins."""
        if not rendered.literal:
            return self._encode(rendered.text, 0)
        ids: list[int] = []
        starts: list[int] = []
        position = 0
        for place, end in self.renderer.special_places(rendered):
            index, token = self._special[rendered.text[place:end]]
            text = rendered.text[position:place]
            self._extend(ids, starts, text.rstrip() if token.lstrip else text, position)
            ids.append(index)
            starts.append(place)
            position = end
            if token.rstrip:
                rest = rendered.text[position:]
                position += len(rest) - len(rest.lstrip())
        self._extend(ids, starts, rendered.text[position:], position)
        return ids, starts

    def _extend(self, ids: list[int], starts: list[int], text: str, offset: int) -> None:
        self._backend.encode_special_tokens = True
        more, places = self._encode(text, offset)
        self._backend.encode_special_tokens = False
        ids += more
        starts += places

    def _encode(self, text: str, offset: int) -> tuple[list[int], list[int]]:
        encoding = self._backend.encode(text, add_special_tokens=False)
        return encoding.ids, [offset + start for start in _starts(text, encoding.offsets)]


def _starts(text: str, offsets: list[tuple[int, int]]) -> list[int]:
    """Where each token begins.

    Unigram gives neighbouring characters outside its vocabulary, a token per byte, one (start, end) for
    all; each of these bytes begins where its own character does.
    """
    starts: list[int] = []
    for (start, end), run in groupby(offsets):
        count = sum(1 for _ in run)
        places = [start] * count
        if count > 1 and end - start > 1:
            by_byte = [k for k in range(start, end) for _ in text[k].encode("utf-8")]
            places = by_byte if len(by_byte) == count else places
        starts += places
    return starts


_encoders: WeakKeyDictionary[Tokenizer, _ChatEncoder] = WeakKeyDictionary()


def _encoder(tokenizer: Tokenizer) -> _ChatEncoder:
    if tokenizer not in _encoders:
        _encoders[tokenizer] = _ChatEncoder(tokenizer)
    return _encoders[tokenizer]
