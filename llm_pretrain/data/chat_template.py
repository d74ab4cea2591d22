"""Renders conversations with a tokenizer's chat template, in a separate process that runs `serve`.

Jinja's sandbox denies a template files and code; limits of the process bound its time and memory. The text
equals that of transformers' `apply_chat_template`.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import json
import re
import resource
import signal
import sys
from bisect import bisect
from collections.abc import Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from llm_pretrain.text import reason_of

MEMORY, MEMORY_PER_BYTE = 1 << 29, 64
"""Bytes of memory that a request may use: `MEMORY`, plus `MEMORY_PER_BYTE` per byte of the request."""
CHARACTERS, CHARACTERS_PER_BYTE = 1 << 24, 16
"""Characters that a rendered text may have: `CHARACTERS`, plus `CHARACTERS_PER_BYTE` per byte of the request.
Encoding a text takes many times its size."""

_PRIVATE = range(0xF0000, 0xFFFFE)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class RenderingError(Exception):
    """The template rejects a conversation, or the assistant's turns cannot be located in its text."""


def serve(seconds: float, seconds_per_byte: float) -> None:
    """Answers requests, each a line of JSON, until the input ends.

    Arguments of `ChatTemplate` set the template, without an answer. Arguments of `ChatTemplate.rendered` are
    answered by a line with its result, or with `error`. SIGPROF ends this process if a request takes more
    processor time than `seconds`, plus `seconds_per_byte` for each of its bytes.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles it and goes on
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    template = ChatTemplate("", [], {})
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, seconds + seconds_per_byte * len(line))
        memory = MEMORY + MEMORY_PER_BYTE * len(line)
        if most == resource.RLIM_INFINITY or memory < most:
            resource.setrlimit(resource.RLIMIT_DATA, (memory, most))
        try:
            request = json.loads(line)
            if "template" in request:
                template = ChatTemplate(**request)
                continue
            answer = template.rendered(**request, most=CHARACTERS + CHARACTERS_PER_BYTE * len(line))
        except MemoryError:
            answer = {"error": f"expected a template that needs up to {memory >> 20} MiB, found more"}
        except RecursionError:
            answer = {"error": "expected messages and tools to be flatter, found deep nesting"}
        except RenderingError as error:
            answer = {"error": str(error)}
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


class ChatTemplate:
    """A tokenizer's template, texts of special tokens, and variables such as `bos_token`."""

    def __init__(self, template: str, special_tokens: list[str], variables: dict[str, str]):
        self.text = template
        self.variables = variables
        self.names = sorted(filter(None, special_tokens), key=len, reverse=True)
        self.index = {name: index for index, name in enumerate(self.names)}
        self.special = re.compile("|".join(map(re.escape, self.names)) or r"(?!)")

    def rendered(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, date: str, is_prompt: bool, most: int
    ) -> dict[str, Any]:
        """Renders a conversation; `is_prompt` adds the header of the assistant's next turn.

        Text of a message never becomes a special token.

        Args:
            date: The date that `strftime_now` writes, in ISO format.
            most: Largest number of characters of the text.

        Returns:
            `text`; `places`: the (start, end) in `text` of each special token that the template wrote, or
            None if `text` has no others; `spans`: the (start, end) of each assistant turn with its end token.

        Raises:
            RenderingError: the template rejects the conversation, or turns cannot be located.
        """
        job = self._job(messages, tools, date)
        if is_prompt:
            return job.restored(job.render(job.messages, add_generation_prompt=True), (), most)
        return job.restored(job.text, job.assistant_spans(), most)

    def _job(self, messages: list[dict[str, Any]], tools: list[Any] | None, date: str) -> _Job:
        """Drops null fields like transformers. If rendering fails, sets missing content to null, then ""."""
        messages = [_with_reasoning({k: v for k, v in m.items() if v is not None}) for m in messages]
        variants = [messages]
        if any("content" not in message for message in messages):
            variants += [[{"content": content} | message for message in messages] for content in (None, "")]
        for variant in variants[:-1]:
            with contextlib.suppress(RenderingError):
                return _Job(self, variant, tools, date)
        return _Job(self, variants[-1], tools, date)


class _Job:
    """Renders one conversation: puts placeholders for special tokens in messages, renders, restores them."""

    def __init__(self, template: ChatTemplate, messages: list[dict[str, Any]], tools: Any, date: str):
        self._names, self._index, self._special = template.names, template.index, template.special
        seen = set(json.dumps([messages, tools], ensure_ascii=False) + template.text)
        free = (chr(code) for code in _PRIVATE if chr(code) not in seen)
        self._open, self._close, self._begin, self._end, self._probe = (next(free) for _ in range(5))
        self._placeholder = re.compile(f"{self._open}(\\d+){self._close}")
        self.messages = self._guarded(messages)
        now = datetime.datetime.fromisoformat(date)
        self._variables = {"tools": self._guarded(tools), "strftime_now": now.strftime} | template.variables
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
            raise RenderingError(
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
            raise RenderingError(
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
            raise RenderingError("expected turns that end in a special token, found none in the template")
        return start, closing.end()

    def _start(self, turn: int) -> int:
        try:
            head = self.render(self.messages[:turn], add_generation_prompt=True)
            if self.text.startswith(head):
                return len(head)
            before = self.render(self.messages[:turn])
        except RenderingError:
            if turn:
                raise
            raise RenderingError(
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
            raise RenderingError(
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
        except RenderingError:
            return {}
        if "".join(parts[::2]) != self.text:
            return {}
        places = itertools.accumulate(map(len, parts[::2]))
        return {int(number): place for number, place in zip(parts[1::2], places, strict=False)}

    def restored(self, text: str, spans: Sequence[tuple[int, int]], most: int) -> dict[str, Any]:
        """Replaces placeholders by special tokens and moves `spans` along. Returns the dict of `rendered`."""
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
            raise RenderingError(
                "expected content without special tokens, as this template alters it, found one"
            )
        if len(restored) > most:
            raise RenderingError(f"expected at most {most} characters, found a template that makes more")
        try:
            restored.encode("utf-8")
        except UnicodeEncodeError as error:
            code = ord(restored[error.start])
            raise RenderingError(f"expected text, found the lone surrogate U+{code:04X}") from error
        found = (match.span() for match in self._special.finditer(restored)) if literal else ()
        return {
            "text": restored,
            "places": [span for span in found if span not in literal] if literal else None,
            "spans": [[place + shifts[bisect(ends, place) - 1] for place in span] for span in spans],
        }


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Copies a message's reasoning to both fields that templates read, as transformers does."""
    names = ("reasoning_content", "thinking", "reasoning")
    found = next((message[name] for name in names if message.get(name) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


@functools.lru_cache(maxsize=8)
def _compiled(template: str, begin: str, end: str) -> Any:
    """Compiles a template as transformers does; writes `begin` and `end` around {% generation %} blocks."""

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
        raise RenderingError(f"expected a Jinja template, found: {reason_of(error)}") from error
