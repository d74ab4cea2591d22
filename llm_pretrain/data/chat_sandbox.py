"""Compiles a chat template in Jinja's sandbox, and bounds what it may do: steps, and characters it may make.

Jinja's own sandbox keeps a template away from files and code, but lets it loop for ever and fill the memory.
The bounds count, and measure no time, so that a corpus is the same on every machine. Nothing here knows of
messages; `chat_rendering.py` does.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from llm_pretrain.errors import DataError

STEPS, CHARACTERS = 1 << 19, 1 << 24
"""What a template may do whatever it is given: turns of loops and calls, characters put out or joined."""
PER_CHARACTER = 16
"""And so many of both more for each character that it is given."""

_BITS = 1 << 16
_LARGE = re.compile(r"\d{7}")
_SIZED = ("batch", "center", "format", "indent", "slice", "truncate", "wordwrap")
"""Filters that make as much as a number says."""


class ChatTemplateError(DataError):
    """A conversation that its template does not take, or whose turns cannot be told apart."""


class _Budget:
    """What is left to a rendering that is given `size` characters."""

    def __init__(self, size: int):
        self.most = CHARACTERS + PER_CHARACTER * size
        self.characters = self.most
        self.steps = STEPS + PER_CHARACTER * size

    def step(self, characters: int = 0) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise ChatTemplateError("expected a template that comes to its end, found too many steps")
        self.spend(characters)

    def spend(self, characters: int) -> None:
        self.characters -= characters
        if self.characters < 0:
            raise ChatTemplateError(
                f"expected at most {self.most} characters, found a template that makes more"
            )


_budget: ContextVar[_Budget | None] = ContextVar("chat_template_budget", default=None)


def render(template: Any, size: int, variables: dict[str, Any]) -> str:
    """Renders what `compile_template` made, within the bounds of an input of `size` characters."""
    token = _budget.set(_Budget(size))
    try:
        return template.render(variables)
    finally:
        _budget.reset(token)


def _spend(characters: int) -> None:
    budget = _budget.get() or _Budget(0)  # without one while constants are folded
    budget.spend(characters)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else len(str(value))


def _steps(values: Any, static: int) -> Iterator[Any]:
    """What a loop runs over; `static` is the text in its body."""
    budget = _budget.get() or _Budget(0)
    for value in values:
        budget.step(static)
        yield value


def _joined(values: Iterable[Any]) -> str:
    parts = [str(value) for value in values]
    _spend(sum(map(len, parts)))
    return "".join(parts)


def _finalized(value: Any) -> Any:
    """What every expression that is put out passes through."""
    _spend(len(value if isinstance(value, str) else str(value)))
    return value


def _check_operands(operator: str, left: Any, right: Any) -> None:
    sequences = str | list | tuple
    if operator == "+" and isinstance(left, sequences) and isinstance(right, sequences):
        _spend(len(left) + len(right))
    elif operator == "%" and isinstance(left, str):
        _check_format(left, right if isinstance(right, tuple | list) else [right])
    elif operator == "*":
        for many, times in ((left, right), (right, left)):
            if isinstance(many, sequences) and isinstance(times, int):
                _spend(len(many) * max(times, 0))
    if isinstance(left, int) and isinstance(right, int) and operator in ("*", "**"):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > _BITS:
            raise ChatTemplateError("expected numbers of some digits, found a template that makes huge ones")


def _check_format(text: str, values: Iterable[Any]) -> None:
    if _LARGE.search(text):
        raise ChatTemplateError("expected widths below a million, found a larger one in the template")
    _check_numbers(values)
    _spend(len(text) + sum(map(_size, values)))


def _check_numbers(values: Iterable[Any]) -> None:
    if any(isinstance(value, int) and abs(value) > CHARACTERS for value in values):
        raise ChatTemplateError("expected sizes below 2^24, found a larger one in the template")


def _check_method(method: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Of a string's methods, those that make more than they are given."""
    text = getattr(method, "__self__", None)
    if not isinstance(text, str):
        return
    values = [*arguments, *options.values()]
    name = getattr(method, "__name__", "")
    _check_numbers(values)
    if name in ("format", "format_map"):
        _check_format(text, values)
    elif name == "join" and arguments and isinstance(arguments[0], list | tuple):
        _spend(sum(map(_size, arguments[0])) + len(text) * len(arguments[0]))
    elif name == "replace" and len(arguments) > 1:
        _spend(
            len(text) + (text.count(str(arguments[0])) if arguments[0] else len(text)) * _size(arguments[1])
        )
    elif name in ("ljust", "rjust", "center", "zfill", "expandtabs"):
        sizes = [value for value in values if isinstance(value, int)]
        _spend(len(text) * (max(sizes, default=1) if name == "expandtabs" else 1) + max(sizes, default=0))


def _bounded(name: str, original: Any) -> Any:
    """A filter that looks at what it is given, and counts what it made."""

    @functools.wraps(original)
    def bounded(*arguments: Any, **options: Any) -> Any:
        values = [*arguments, *options.values()]
        if name in _SIZED:
            _check_numbers(values)
        if name == "format":
            _check_format(str(arguments[0]), values[1:])
        texts = [value for value in values if isinstance(value, str)]
        if name == "replace" and len(texts) > 2:
            _check_method(texts[0].replace, (texts[1], texts[2]), {})
        if name == "join":
            lists = [value for value in values if isinstance(value, list | tuple)]
            _spend(sum(_size(item) for value in lists for item in value))
        made = original(*arguments, **options)
        if isinstance(made, str):
            _spend(len(made))
        return made

    return bounded


@functools.lru_cache(maxsize=8)
def compile_template(template: str, begin: str, end: str) -> Any:
    """The template in a sandbox, with what transformers offers to one; `{% generation %}` leaves marks."""
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox
    import jinja2.visitor

    nodes = jinja2.nodes

    class Generation(jinja2.ext.Extension):
        """`{% generation %}…{% endgeneration %}` around what the assistant says."""

        tags = {"generation"}  # noqa: RUF012  Jinja's own way to declare it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

        def mark(self, caller: Any) -> str:
            return f"{begin}{caller()}{end}"

    class Counting(jinja2.visitor.NodeTransformer):
        """Puts the bounds where a template repeats or joins without a call."""

        def visit_For(self, node: Any) -> Any:  # noqa: N802  Jinja looks for these names
            static = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
            self.generic_visit(node)
            arguments = [nodes.Const(static)]
            node.iter = nodes.Filter(node.iter, "_steps", arguments, [], None, None, lineno=node.lineno)
            return node

        def visit_Concat(self, node: Any) -> Any:  # noqa: N802
            self.generic_visit(node)
            parts = nodes.List(node.nodes, lineno=node.lineno)
            return nodes.Filter(parts, "_joined", [], [], None, None, lineno=node.lineno)

    class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(["+", "*", "**", "%"])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _check_operands(operator, left, right)
            return super().call_binop(context, operator, left, right)

        def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
            (_budget.get() or _Budget(0)).step(len(template) if hasattr(__obj, "catch_kwargs") else 0)
            _check_method(__obj, args, kwargs)
            return super().call(__context, __obj, *args, **kwargs)

        def _generate(self, source: Any, *args: Any, **kwargs: Any) -> str:
            return super()._generate(Counting().visit(source), *args, **kwargs)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        _check_format("", [option for option in options.values() if isinstance(option, int)])
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, jinja2.ext.loopcontrols],
        finalize=_finalized,
    )
    environment.filters |= {name: _bounded(name, each) for name, each in environment.filters.items()}
    environment.filters |= {"tojson": _bounded("tojson", to_json), "_steps": _steps, "_joined": _joined}
    environment.globals["raise_exception"] = refuse
    try:
        return environment.from_string(template)
    except (jinja2.TemplateError, RecursionError, MemoryError, SyntaxError) as error:
        raise ChatTemplateError(
            f"expected a Jinja template, found: {' '.join(str(error).split()) or type(error).__name__}"
        ) from error
