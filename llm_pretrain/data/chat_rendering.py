"""Renders conversations with a tokenizer's Jinja template, as transformers does; finds the assistant's part.

What a message says can never pass for the template's own special tokens: where it contains the text of one,
a placeholder takes its place until the template is done. Knows no token ids: `chat.py` encodes.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from llm_pretrain.data.chat_sandbox import ChatTemplateError, compile_template, render

TRAINING_DATE = datetime.datetime(2024, 7, 26)
"""What templates that name the day are told for training, so that a corpus is the same on every day."""

_PRIVATE = range(0xF0000, 0xFFFFE)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    `text` is what the tokenizer is to see; of its (start, end), `literal` is what looks like a special token
    but is part of a message, and `spans` what the assistant says, end tokens included.
    """

    text: str
    literal: tuple[tuple[int, int], ...]
    spans: tuple[tuple[int, int], ...]


class ChatRenderer:
    """Renders with one `template`; `special_tokens` are the texts that the tokenizer takes for special."""

    def __init__(self, template: str, special_tokens: Sequence[str], variables: dict[str, str]):
        self._template = template
        self._special_tokens = sorted(filter(None, special_tokens), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, self._special_tokens)) or r"(?!)")
        self._variables = variables

    def conversation(self, messages: Sequence[dict[str, Any]], tools: list[Any] | None = None) -> Rendered:
        """The whole conversation, for training. Raises ChatTemplateError."""
        job = _Job(self, messages, tools, TRAINING_DATE)
        spans = job.assistant_spans()
        return job.restored(job.text, spans)

    def prompt(
        self,
        messages: Sequence[dict[str, Any]],
        tools: list[Any] | None = None,
        date: datetime.datetime | None = None,
    ) -> Rendered:
        """The conversation with the head of the assistant's next turn. Raises ChatTemplateError."""
        job = _Job(self, messages, tools, date or datetime.datetime.now())
        return job.restored(job.render(len(messages), add_generation_prompt=True), ())

    def special_places(self, rendered: Rendered) -> list[tuple[int, int]]:
        """(start, end) of the special tokens that are the template's own."""
        found = [match.span() for match in self._special.finditer(rendered.text)]
        return [span for span in found if span not in rendered.literal]


class _Job:
    """The rendering of one conversation, from guarded messages to the restored text."""

    def __init__(self, renderer: ChatRenderer, messages: Sequence[dict], tools: Any, date: datetime.datetime):
        self._special = renderer._special
        self._names = renderer._special_tokens
        self._variables = renderer._variables
        try:
            self._take(renderer, messages, tools)
        except RecursionError as error:
            raise ChatTemplateError(
                "expected messages and tools to be flatter, found deep nesting"
            ) from error
        self._date = date
        self._compiled = compile_template(renderer._template, self._begin, self._end)
        self._has_marks = bool(_GENERATION.search(renderer._template))
        self.text, self._marked = self._without_marks(self._raw(len(messages), False))

    def _take(self, renderer: ChatRenderer, messages: Sequence[dict], tools: Any) -> None:
        """Guards what is said, with characters for the marks that occur nowhere in it."""
        given = json.dumps([messages, tools], ensure_ascii=False, default=str) + renderer._template
        self._size, seen = len(given), set(given)
        free = (chr(code) for code in _PRIVATE if chr(code) not in seen)
        self._open, self._close, self._begin, self._end = (next(free) for _ in range(4))
        self._marks = re.compile(f"{self._open}(\\d+){self._close}")
        self._messages = [self._guard(message) for message in messages]
        self._tools = self._guard(tools)

    def _guard(self, value: Any) -> Any:
        """A copy in which placeholders stand for the texts of special tokens."""
        if isinstance(value, str):
            return self._special.sub(
                lambda match: f"{self._open}{self._names.index(match[0])}{self._close}", value
            )
        if isinstance(value, dict):
            return {self._guard(key): self._guard(item) for key, item in value.items()}
        return [self._guard(item) for item in value] if isinstance(value, list) else value

    def _raw(self, count: int, add_generation_prompt: bool) -> str:
        try:
            variables = {
                "messages": self._guard(self._messages[:count]),  # a copy: templates may change what they get
                "tools": self._tools,
                "add_generation_prompt": add_generation_prompt,
                "strftime_now": self._date.strftime,
            }
            return render(self._compiled, self._size, variables | self._variables)
        except ChatTemplateError:
            raise
        except Exception as error:  # what a template does wrong shows in any kind
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ChatTemplateError(
                f"expected a conversation that the template takes, found: {reason}"
            ) from error

    def render(self, count: int, *, add_generation_prompt: bool = False) -> str:
        """The first `count` messages."""
        return self._without_marks(self._raw(count, add_generation_prompt))[0]

    def _without_marks(self, raw: str) -> tuple[str, list[tuple[int, int]]]:
        spans, parts, length, start = [], [], 0, 0
        for part in re.split(f"([{self._begin}{self._end}])", raw):
            if part == self._begin:
                start = length
            elif part == self._end:
                spans.append((start, length))
            else:
                parts.append(part)
                length += len(part)
        return "".join(parts), [span for span in spans if span[0] < span[1]]

    def assistant_spans(self) -> list[tuple[int, int]]:
        """(start, end) in `text` of the assistant's turns: by the template's marks, or else by comparison."""
        if self._has_marks and self._marked:
            return [(start, self._with_end_token(start, end)) for start, end in self._marked]
        turns = [k for k, message in enumerate(self._messages) if message["role"] == "assistant"]
        spans = [self._span(turn) for turn in turns]
        if not spans or any(before[1] > after[0] for before, after in pairwise(spans)):
            raise ChatTemplateError(
                "expected a template that shows where the assistant's turns are, found none; "
                "mark them in it with {% generation %}"
            )
        return spans

    def _with_end_token(self, start: int, end: int) -> int:
        """A marked span's end; templates that mark the content alone leave the end token just behind it."""
        if self._special.search(self.text, start, end):
            return end
        behind = self._special.match(self.text, end)
        return behind.end() if behind else end

    def _span(self, turn: int) -> tuple[int, int]:
        """From the head that generation would be given, to the end token of the turn."""
        start = self._start(turn)
        whole = self.render(turn + 1)
        if start < len(whole) and self.text.startswith(whole):
            *_, last = [None, *self._special.finditer(self.text, start, len(whole))]
            if last and not self.text[last.end() : len(whole)].strip():
                return start, last.end()  # the line break behind the end token is never generated
            return start, len(whole)
        first = self._special.search(self.text, start)  # earlier turns are shown otherwise than last ones
        if first is None:
            raise ChatTemplateError("expected turns that end in a special token, found none in the template")
        return start, first.end()

    def _start(self, turn: int) -> int:
        try:
            before = self.render(turn)
            head = self.render(turn, add_generation_prompt=True)
        except ChatTemplateError:
            if turn:
                raise
            raise ChatTemplateError(
                "expected a user's message before the assistant's first, found none"
            ) from None
        if self.text.startswith(head):
            return len(head)
        common = next(
            (k for k, (a, b) in enumerate(zip(head, self.text, strict=False)) if a != b), len(self.text)
        )
        inside = [match.end() for match in self._special.finditer(head, len(before))]
        shared = max((end for end in inside if end <= common), default=-1)
        if shared < 0 or not head.startswith(before) or common < len(before):
            raise ChatTemplateError(
                "expected a template that shows earlier turns as it showed them, found another; "
                "mark the assistant's turns in it with {% generation %}"
            )
        return shared

    def restored(self, text: str, spans: Sequence[tuple[int, int]]) -> Rendered:
        """`text` with what the messages say in place of the placeholders."""
        parts, literal, cuts, position, length = [], [], [], 0, 0
        for mark in self._marks.finditer(text):
            parts.append(text[position : mark.start()])
            length += mark.start() - position
            name = self._names[int(mark[1])]
            parts.append(name)
            literal.append((length, length + len(name)))
            length += len(name)
            position = mark.end()
            cuts.append((position, length - position))
        parts.append(text[position:])
        restored = "".join(parts)
        if self._open in restored or self._close in restored:
            raise ChatTemplateError(
                "expected content without special tokens, as this template alters it, found one"
            )

        try:
            restored.encode("utf-8")
        except UnicodeEncodeError as error:
            code = ord(restored[error.start])
            raise ChatTemplateError(f"expected text, found the lone surrogate U+{code:04X}") from error

        def moved(place: int) -> int:
            return place + next((shift for end, shift in reversed(cuts) if end <= place), 0)

        return Rendered(restored, tuple(literal), tuple((moved(start), moved(end)) for start, end in spans))
