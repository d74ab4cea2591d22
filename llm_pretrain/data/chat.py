"""Encodes conversations by the tokenizer's chat template, with an exact loss mask.

The ids equal those of transformers' `apply_chat_template`, with one exception: text in a message never
becomes a special token.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from llm_pretrain.data.chat_template import ChatTemplate, ChatTemplateError, Rendered
from llm_pretrain.data.tokenizers import Tokenizer
from llm_pretrain.errors import DataError

TRAINING_DATE = datetime.datetime(2024, 7, 26)
"""The date given to templates in training, so that a corpus does not depend on the day."""

_SPACES = re.compile(r"\s+")


class NoChatTemplateError(DataError):
    """The tokenizer has no chat template."""


def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], tools: list[Any] | None = None
) -> tuple[list[int], list[int]]:
    """Returns (ids, loss mask) of a conversation; the mask is 1 in assistant turns and their end tokens.

    Raises NoChatTemplateError, and ChatTemplateError for a conversation that the template does not accept.
    """
    encoder = _encoder(tokenizer)
    rendered = encoder.render(messages, tools, TRAINING_DATE, is_prompt=False)
    ids, starts = encoder.encode(rendered)
    mask = np.zeros(len(ids), dtype=np.int64)
    for first, last in np.searchsorted(starts, np.array(rendered.spans)):  # starts ascend
        mask[first:last] = 1
    return ids, mask.tolist()


def chat_prompt_ids(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]]) -> list[int]:
    """Ids of a conversation and the header of the assistant's next turn. Raises like `encode_chat`."""
    encoder = _encoder(tokenizer)
    rendered = encoder.render(messages, None, datetime.datetime.now(), is_prompt=True)
    return encoder.encode(rendered)[0]


class _ChatEncoder:
    """The chat templates of a tokenizer, and its special tokens."""

    def __init__(self, tokenizer: Tokenizer):
        template = tokenizer.chat_template
        if template is None:
            raise NoChatTemplateError(
                f"{tokenizer.folder}: expected a tokenizer with a chat template, found none; add a "
                "chat_template.jinja, or use records of text"
            )
        self._encodings = tokenizer.encodings
        self._special = {t.content: (index, t) for index, t in tokenizer.added_tokens.items() if t.special}
        named = {
            "bos_token": tokenizer.bos_token_id,
            "eos_token": tokenizer.eos_token_id,
            "pad_token": tokenizer.pad_token_id,
        }
        variables = {name: tokenizer.token(i) for name, i in named.items() if i is not None}
        self._template = ChatTemplate(template, list(self._special), variables)
        self._tool_template = ChatTemplate(
            tokenizer.tool_template or template, list(self._special), variables
        )
        unread = tokenizer.folder / "additional_chat_templates" / "tool_use.jinja"
        self._unread_template = unread if unread.exists() else None

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: list[Any] | None,
        date: datetime.datetime,
        is_prompt: bool,
    ) -> Rendered:
        """Renders a conversation, see `ChatTemplate.rendered`. Raises ChatTemplateError."""
        if tools is not None and self._unread_template:
            raise ChatTemplateError(
                f"{self._unread_template}: expected the template for tools in tokenizer_config.json, found a "
                "file; save the tokenizer with save_pretrained(save_jinja_files=False)"
            )
        template = self._template if tools is None else self._tool_template
        return template.rendered(messages, tools, date, is_prompt=is_prompt)

    def encode(self, rendered: Rendered) -> tuple[list[int], list[int]]:
        """Returns the ids, and the position in the text where each token starts."""
        if rendered.places is None:
            return self._encode(rendered.text, 0, special=True)
        ids: list[int] = []
        starts: list[int] = []
        position = 0
        for place, end in rendered.places:
            index, token = self._special[rendered.text[place:end]]
            text = rendered.text[position:place]
            self._extend(ids, starts, text.rstrip() if token.lstrip else text, position)
            ids.append(index)
            starts.append(place)
            position = end
            if token.rstrip and (spaces := _SPACES.match(rendered.text, position)):
                position = spaces.end()
        self._extend(ids, starts, rendered.text[position:], position)
        return ids, starts

    def _extend(self, ids: list[int], starts: list[int], text: str, offset: int) -> None:
        more, places = self._encode(text, offset, special=False)
        ids += more
        starts += places

    def _encode(self, text: str, offset: int, *, special: bool) -> tuple[list[int], list[int]]:
        (encoding,) = self._encodings([text], special, offsets=True)
        return encoding.ids, [offset + start for start in _starts(text, encoding.offsets)]


def _starts(text: str, offsets: list[tuple[int, int]]) -> list[int]:
    """Returns the position where each token starts.

    Unigram encodes adjacent characters outside its vocabulary as one token per byte, and gives all these
    tokens the same offsets. Here each of them gets the start of the character that its byte belongs to.
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
