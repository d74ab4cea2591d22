"""Renders conversations with a tokenizer's chat template, in Jinja's sandbox.

The sandbox denies a template files and code; its time and memory have no limit. The text equals that of
transformers' `apply_chat_template`.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import json
import re
import sys
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llm_pretrain.errors import DataError
from llm_pretrain.text import reason_of

_PRIVATE = range(0xF0000, 0xFFFFE)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplateError(DataError):
    """The template rejects a conversation, or the assistant's turns cannot be located in its text."""


@dataclass(frozen=True)
class Rendered:
    """A rendered conversation.

    `places` holds the (start, end) in `text` of each special token that the template wrote; None if `text`
    has no other special tokens. `spans` holds the (start, end) of each assistant turn with its end token.
    """

    text: str
    places: list[tuple[int, int]] | None
    spans: list[tuple[int, int]]


class ChatTemplate:
    """A tokenizer's template, texts of special tokens, and variables such as `bos_token`."""

    def __init__(self, template: str, special_tokens: list[str], variables: dict[str, str]):
        self.text = template
        self.variables = variables
        self.names = sorted(filter(None, special_tokens), key=len, reverse=True)
        self.index = {name: index for index, name in enumerate(self.names)}
        self.special = re.compile("|".join(map(re.escape, self.names)) or r"(?!)")

    def rendered(
        self,
        messages: Sequence[dict[str, Any]],
        tools: list[Any] | None,
        date: datetime.datetime,
        *,
        is_prompt: bool,
    ) -> Rendered:
        """Renders a conversation; `is_prompt` adds the header of the assistant's next turn.

        Text of a message never becomes a special token. `date` is the one that `strftime_now` writes. Raises
        ChatTemplateError.
        """
        try:
            copied_messages, copied_tools = json.loads(json.dumps([messages, tools], default=str))
            job = self._job(copied_messages, copied_tools, date)
            if is_prompt:
                return job.restored(job.render(job.messages, add_generation_prompt=True), ())
            return job.restored(job.text, job.assistant_spans())
        except RecursionError as error:
            raise ChatTemplateError(
                "expected messages and tools to be flatter, found deep nesting"
            ) from error

    def _job(self, messages: list[dict[str, Any]], tools: list[Any] | None, date: datetime.datetime) -> _Job:
        """Drops null fields like transformers. If rendering fails, sets missing content to null, then ""."""
        messages = [_with_reasoning({k: v for k, v in m.items() if v is not None}) for m in messages]
        variants = [messages]
        if any("content" not in message for message in messages):
            variants += [[{"content": content} | message for message in messages] for content in (None, "")]
        for variant in variants[:-1]:
            with contextlib.suppress(ChatTemplateError):
                return _Job(self, variant, tools, date)
        return _Job(self, variants[-1], tools, date)


class _Job:
    """Renders one conversation: puts placeholders for special tokens in messages, renders, restores them."""

    def __init__(
        self,
        template: ChatTemplate,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        date: datetime.datetime,
    ):
        self._names, self._index, self._special = template.names, template.index, template.special
        seen = set(json.dumps([messages, tools], ensure_ascii=False) + template.text)
        free = (chr(code) for code in _PRIVATE if chr(code) not in seen)
        self._open, self._close, self._begin, self._end, self._probe = (next(free) for _ in range(5))
        self._placeholder = re.compile(f"{self._open}(\\d+){self._close}")
        self.messages = self._guarded(messages)
        self._variables = {"tools": self._guarded(tools), "strftime_now": date.strftime} | template.variables
        self._compiled = _compiled(template.text, self._begin, self._end)
        self._has_marks = bool(_GENERATION.search(template.text))
        self.text, self._marked = self._without_marks(self._raw(self.messages, False))

    def _guarded(self, value: Any) -> Any:
        """A copy in which placeholders replace the texts of special tokens."""
        if isinstance(value, str):
            return self._special.sub(lambda match: f"{self._open}{self._index[match[0]]}{self._close}", value)
        if isinstance(value, dict):
            return {self._guarded(key): self._guarded(item) for key, item in value.items()}
        return [self._guarded(item) for item in value] if isinstance(value, list) else value

    def _raw(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        turns = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._compiled.render(self._variables | turns)
        except MemoryError:
            raise
        except Exception as error:  # a template can raise any exception
            raise ChatTemplateError(
                f"expected a conversation that the template takes, found: {reason_of(error):.300}"
            ) from error

    def render(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = False) -> str:
        return self._without_marks(self._raw(messages, add_generation_prompt))[0]

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
        """Finds (start, end) of assistant turns by {% generation %} marks, or by comparing renderings."""
        if self._has_marks and self._marked:
            return [(start, self._with_end_token(start, end)) for start, end in self._marked]
        turns = [k for k, message in enumerate(self.messages) if message["role"] == "assistant"]
        spans = [self._span(turn) for turn in turns]
        if not spans or any(before[1] > after[0] for before, after in itertools.pairwise(spans)):
            raise ChatTemplateError(
                "expected a template that shows where the assistant's turns are, found none; "
                "mark them in it with {% generation %}"
            )
        return spans

    def _with_end_token(self, start: int, end: int) -> int:
        """Returns the end of a marked span, or of the unmarked end token that directly follows the span.

        A span that ends in a special token, such as a tool call's, may be complete: only the token that ends
        the conversation extends it, and only if the span's own token is neither that token nor EOS.
        """
        behind, own = self._special.match(self.text, end), self._closing_token(self.text, start, end)
        ends = self._last, self._variables.get("eos_token")
        if behind is None or (own and (behind[0] != self._last or own[0] in ends)):
            return end
        return behind.end()

    @functools.cached_property
    def _last(self) -> str | None:
        """The special token that ends the conversation, or None."""
        last = self._closing_token(self.text)
        return last and last[0]

    def _span(self, turn: int) -> tuple[int, int]:
        """Finds (start, end) of a turn: from the end of the generation prompt to the end of its end token."""
        start = self._start(turn)
        alone = self.render(self.messages[: turn + 1])  # the conversation up to this turn
        last = self._closing_token(alone, start)
        end = last.end() if last else len(alone)  # a line break after the end token is not generated
        if start < end and self.text.startswith(alone[:end]):
            return start, end
        if last and self.text.startswith(alone[: last.start()]):  # in `self.text`, the turn lacks this token
            closing = self._closing_token(self.text, start, last.start())
            closing = closing or self._special.match(self.text, last.start())
            return start, closing.end() if closing else last.start()
        # the turn looks different in `self.text`: behind its content, take as many end tokens as in `alone`,
        # or the first special token if there is no such end token
        own, before = self._content_ends.get(turn, 0), self._content_ends.get(turn + 1, 0)
        behind = max(start, own) if own < before else start
        closing = self._special.search(self.text, behind)
        same = [
            each for each in self._special.finditer(self.text, behind, before) if last and each[0] == last[0]
        ]
        if last and same:
            content = str(self.messages[turn].get("content") or "").strip()
            count = alone.count(last[0], alone.rfind(content) if content else start)
            closing = same[: max(1, count)][-1]
        if closing is None:
            raise ChatTemplateError("expected turns that end in a special token, found none in the template")
        return start, closing.end()

    def _start(self, turn: int) -> int:
        try:
            head = self.render(self.messages[:turn], add_generation_prompt=True)
            if self.text.startswith(head):
                return len(head)
            before = self.render(self.messages[:turn])
        except ChatTemplateError:
            if turn:
                raise
            raise ChatTemplateError(
                "expected a user's message before the assistant's first, found none"
            ) from None
        common = next(
            (k for k, (a, b) in enumerate(zip(head, self.text, strict=False)) if a != b), len(self.text)
        )
        borders = re.compile(f"{self._special.pattern}|\n")
        inside = [match.end() for match in borders.finditer(head, len(before))]
        shared = max((end for end in inside if end <= common), default=-1)
        is_shared = head.startswith(before) and head[len(before) : max(shared, 0)].strip()
        if not is_shared or common < len(before):
            raise ChatTemplateError(
                "expected a template that shows earlier turns as it showed them, found another; "
                "mark the assistant's turns in it with {% generation %}"
            )
        return shared

    def _closing_token(self, text: str, start: int = 0, end: int = sys.maxsize) -> re.Match[str] | None:
        """The special token at the end of text[start:end], or None; only white space may follow the token."""
        *_, last = [None, *self._special.finditer(text, start, end)]
        return last if last and not text[last.end() : end].strip() else None

    @functools.cached_property
    def _content_ends(self) -> dict[int, int]:
        """Maps the number of a message to the end of its content in the text.

        A second rendering finds the ends: it has a probe behind each content. The mapping is empty if probes
        change other text. It lacks messages whose content is empty, is no text, or is not written.
        """
        messages = [dict(message) for message in self.messages]
        for number, message in enumerate(messages):
            content = message.get("content")
            if isinstance(content, str) and (text := content.rstrip()):
                message["content"] = f"{text}{self._probe}{number}{self._probe}{content[len(text) :]}"
        try:
            parts = re.split(f"{self._probe}(\\d+){self._probe}", self.render(messages))
        except ChatTemplateError:
            return {}
        if "".join(parts[::2]) != self.text:
            return {}
        places = itertools.accumulate(map(len, parts[::2]))
        return {int(number): place for number, place in zip(parts[1::2], places, strict=False)}

    def restored(self, text: str, spans: Sequence[tuple[int, int]]) -> Rendered:
        """Replaces placeholders by special tokens and moves `spans` along."""
        parts: list[str] = []
        literal: set[tuple[int, int]] = set()
        ends, shifts, position, length = [0], [0], 0, 0
        for mark in self._placeholder.finditer(text):
            parts += text[position : mark.start()], self._names[int(mark[1])]
            start = length + mark.start() - position
            position, length = mark.end(), start + len(parts[-1])
            literal.add((start, length))
            ends.append(position)
            shifts.append(length - position)
        restored = "".join([*parts, text[position:]])
        if self._open in restored or self._close in restored:
            raise ChatTemplateError(
                "expected content without special tokens, as this template alters it, found one"
            )
        try:
            restored.encode("utf-8")
        except UnicodeEncodeError as error:
            code = ord(restored[error.start])
            raise ChatTemplateError(f"expected text, found the lone surrogate U+{code:04X}") from error
        found = (match.span() for match in self._special.finditer(restored)) if literal else ()
        return Rendered(
            restored,
            [span for span in found if span not in literal] if literal else None,
            [
                (start + shifts[bisect(ends, start) - 1], end + shifts[bisect(ends, end) - 1])
                for start, end in spans
            ],
        )


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Copies a message's reasoning to both fields that templates read, as transformers does."""
    names = ("reasoning_content", "thinking", "reasoning")
    found = next((message[name] for name in names if message.get(name) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


@functools.lru_cache(maxsize=8)
def _compiled(template: str, begin: str, end: str) -> Any:
    """Compiles a template as transformers does; writes `begin` and `end` around {% generation %} blocks."""
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}…{% endgeneration %}` around the assistant's turn."""

        tags = {"generation"}  # noqa: RUF012  as Jinja declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

        def mark(self, caller: Any) -> str:
            return f"{begin}{caller()}{end}"

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    try:
        return environment.from_string(template)
    except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
        raise ChatTemplateError(f"expected a Jinja template, found: {reason_of(error)}") from error
