"""Encodes conversations by the tokenizer's chat template, with an exact loss mask.

The ids equal those of transformers' `apply_chat_template`, with one exception: text in a message never
becomes a special token.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import json
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from llm_pretrain.data.tokenizers import Tokenizer
from llm_pretrain.errors import DataError, ResourceError

TRAINING_DATE = datetime.datetime(2024, 7, 26)
"""The date given to templates in training, so that a corpus does not depend on the day."""

SECONDS, SECONDS_PER_BYTE = 10.0, 2e-5
"""Processor time that a conversation may take to render: `SECONDS`, plus `SECONDS_PER_BYTE` for each of its
bytes. If the template has no {% generation %}, every turn is rendered again with all turns before it."""

_SPACES = re.compile(r"\s+")


@dataclass(frozen=True)
class Rendered:
    """A rendered conversation.

    `places` holds the (start, end) in `text` of each special token that the template wrote; None if `text`
    has no other special tokens. `spans` holds the (start, end) of each assistant turn with its end token.
    """

    text: str
    places: list[tuple[int, int]] | None
    spans: list[tuple[int, int]]


class ChatTemplateError(DataError):
    """The template rejects a conversation, or the assistant's turns cannot be located in its text."""


class _TemplateProcess:
    """The process that renders. The first conversation starts it, and the next one if it has ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._template = b""

    def render(self, template: bytes, **conversation: Any) -> Rendered:
        """Calls `ChatTemplate.rendered` in the process; `template`: the class's arguments as a line of JSON.

        Raises ChatTemplateError, and ResourceError if the process was killed.
        """
        try:
            answer = self._answer(template, json.dumps(conversation, default=str).encode() + b"\n")
        except RecursionError as error:
            raise ChatTemplateError(
                "expected messages and tools to be flatter, found deep nesting"
            ) from error
        except BaseException:  # such as Ctrl-C: the next request would read this late answer
            self.end()
            raise
        if "error" in answer:
            raise ChatTemplateError(answer["error"])
        return Rendered(**answer)

    def _answer(self, template: bytes, request: bytes) -> dict[str, Any]:
        if self._process is None:
            self._template = b""
            loop = "from llm_pretrain.data.chat_template import serve"
            code = f"import sys; sys.path[:] = {sys.path!r}; {loop}; serve({SECONDS}, {SECONDS_PER_BYTE})"
            command = [sys.executable, "-c", code]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        answer = b""
        with contextlib.suppress(BrokenPipeError):
            if self._template is not template:
                stdin.write(template)
            self._template = template
            stdin.write(request)
            stdin.flush()
            answer = stdout.readline()
        if answer.endswith(b"\n"):
            return json.loads(answer)
        status = self.end()
        if status != -signal.SIGPROF:
            raise ResourceError(
                f"chat template: expected its process to render, found exit code {status} (out of memory?)"
            )
        limit = f"{SECONDS + SECONDS_PER_BYTE * len(request):.0f} s of processor time"
        advice = "shorten the conversation, or mark the assistant's turns with {% generation %}"
        return {"error": f"expected a template that takes up to {limit}, found one that takes more; {advice}"}

    def end(self) -> int | None:
        """Ends the process; returns its exit code, negative for a signal."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.kill()
        with contextlib.suppress(BrokenPipeError):  # the request was not written completely
            process.communicate()
        return process.returncode


_process = _TemplateProcess()
atexit.register(_process.end)


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
    """The chat templates of a tokenizer, and a backend that recognises special tokens."""

    def __init__(self, tokenizer: Tokenizer):
        import tokenizers

        template = tokenizer.chat_template
        if template is None:
            raise NoChatTemplateError(
                f"{tokenizer.folder}: expected a tokenizer with a chat template, found none; add a "
                "chat_template.jinja, or use records of text"
            )
        self._backend = tokenizers.Tokenizer.from_file(str(tokenizer.folder / "tokenizer.json"))
        self._wrapped_errors = tokenizer.wrapped_errors
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
        arguments = {"template": template, "special_tokens": list(self._special), "variables": variables}
        self._template = self._tool_template = json.dumps(arguments).encode() + b"\n"
        if (template := tokenizer.tool_template) is not None:
            self._tool_template = json.dumps(arguments | {"template": template}).encode() + b"\n"
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
        return _process.render(
            template, messages=messages, tools=tools, date=date.isoformat(), is_prompt=is_prompt
        )

    def encode(self, rendered: Rendered) -> tuple[list[int], list[int]]:
        """Returns the ids, and the position in the text where each token starts."""
        if rendered.places is None:
            return self._encode(rendered.text, 0)
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
        self._backend.encode_special_tokens = True
        more, places = self._encode(text, offset)
        self._backend.encode_special_tokens = False
        ids += more
        starts += places

    def _encode(self, text: str, offset: int) -> tuple[list[int], list[int]]:
        with self._wrapped_errors():
            encoding = self._backend.encode(text, add_special_tokens=False)
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
