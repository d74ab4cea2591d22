"""Types, ranges and documentation of dataclass fields, and checks of plain values against them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
import textwrap
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

from llm_pretrain.errors import PretrainError, printable
from llm_pretrain.text import setting_text

NoneType = type(None)
LARGEST_INTEGER, LARGEST_FLOAT = (1 << 31) - 1, 1e12
"""Bounds of fields without `Range.le`: a product of two integers fits 64 bits, a square fits a float."""
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Range:
    """Bounds of a number, as metadata of a field's type: `Annotated[int, Range(gt=0)]`.

    A value outside of its range would cause an overflow inside a library, or a list that fills the memory.
    """

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None

    def expected(self, value: float) -> str | None:
        """The range in words if `value` is outside of it, else None."""
        most = LARGEST_INTEGER if isinstance(value, int) else LARGEST_FLOAT
        most = most if self.le is None else self.le
        least = -most if self.ge is None else self.ge
        if isinstance(value, float) and not math.isfinite(value):
            return "a finite number"
        if self.gt is not None and value <= self.gt:
            return f"more than {self.gt}"
        if self.lt is not None and not least <= value < self.lt:
            return f"at least {least} and less than {self.lt}"
        if value < least:
            return f"{least} or more" if least == 0 else f"at least {least:g}"
        return (
            None if value <= most else f"at most {most:g}" if isinstance(most, float) else f"at most {most}"
        )


PositiveInt = Annotated[int, Range(gt=0)]
NonNegativeInt = Annotated[int, Range(ge=0)]
PositiveFloat = Annotated[float, Range(gt=0)]
NonNegativeFloat = Annotated[float, Range(ge=0)]
Fraction = Annotated[float, Range(ge=0, lt=1)]
Count = Annotated[int, Range(ge=0, le=1 << 62)]
"""A number that grows with a run, such as tokens; it may be larger than any setting."""


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """Maps the field names of a dataclass to their types, without metadata."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


@functools.cache
def _field_ranges(cls: type) -> dict[str, Range | None]:
    """Maps the field names of a dataclass (or the arguments of a function) to their ranges, if declared."""

    def range_of(hint: Any) -> Range | None:
        metadata = getattr(hint, "__metadata__", None)
        return metadata[0] if metadata else next(filter(None, map(range_of, get_args(hint))), None)

    return {name: range_of(hint) for name, hint in get_type_hints(cls, include_extras=True).items()}


def check_ranges(
    cls: Any, values: Mapping[str, Any], prefix: str, default: Range | None = Range()
) -> Iterator[str]:
    """Yields one line for each number outside of its range in the dataclass or function `cls`.

    Fields without a declared range have `default`; None accepts all their numbers.
    """
    for field, value in values.items():
        entries = enumerate(value) if isinstance(value, list | tuple) else ()
        for name, each in [(field, value), *((f"{field}[{i}]", entry) for i, entry in entries)]:
            if dataclasses.is_dataclass(each):
                yield from check_ranges(type(each), vars(each), f"{prefix}{name}.", default)
            elif isinstance(each, bool) or not isinstance(each, int | float):
                continue
            elif (bounds := _field_ranges(cls)[field] or default) and (expected := bounds.expected(each)):
                yield f"{prefix}{name}: expected {expected}, found {each}"


def check_value(name: str, kind: Any, value: object, origin: str = "") -> list[str]:
    """One line for each problem of setting `name`; no line if its plain value `value` has the type `kind`.

    Args:
        origin: File that the value was read from, for the messages.
    """
    item: Any = get_args(kind)[0] if get_origin(kind) is list else None
    if dataclasses.is_dataclass(item) and isinstance(value, list):
        entries = enumerate(value)
        return [line for i, entry in entries for line in _check_entry(item, entry, f"{name}[{i}]", origin)]
    if not dataclasses.is_dataclass(item) and _fits(kind, value):
        return []
    return [f"{name}: expected {describe(kind)}, found {show(value)}{in_file(origin)}"]


def _check_entry(
    cls: Any, entry: object, name: str, origin: str = "", *, whole: bool = False
) -> Iterator[str]:
    """Problems of the plain values of a dataclass.

    With `whole`, fields with a default must be there too, and texts may have any characters.
    """
    where, known, prefix = in_file(origin), field_types(cls), f"{name}." if name else ""
    if not isinstance(entry, Mapping):
        yield f"{name or 'content'}: expected {describe(cls)}, found {show(entry)}{where}"
        return
    for key in entry:
        if key not in known:
            yield f"{prefix}{printable(key)}: no such entry; expected {describe(cls)}{where}"
    for field in dataclasses.fields(cls):
        kind, place = known[field.name], f"{prefix}{field.name}"
        if field.name in entry:
            value = entry[field.name]
            if dataclasses.is_dataclass(kind):
                yield from _check_entry(kind, value, place, origin, whole=whole)
            elif not (matches_type if whole else _fits)(kind, value):
                yield f"{place}: expected {describe(kind)}, found {show(value)}{where}"
        elif whole or (field.default is field.default_factory is dataclasses.MISSING):
            yield f"{place}: expected {describe(kind)}, found nothing{where}"


def read(
    kind: type[T], content: object, file: str, error: type[PretrainError], name: str = "", advice: str = ""
) -> T:
    """An instance of the dataclass `kind` from an object of a JSON file that this package wrote.

    Args:
        content: The object, with all fields of `kind`.
        file: File of the object, for the message.
        error: Type of the error that is raised.
        name: Name of the object in the file; empty for all of its content.
        advice: End of the message.

    Raises:
        error: names the first wrong field, what was expected and what was found.
    """
    problem = next(_check_entry(kind, content, name, whole=True), None)
    if problem is None:
        assert isinstance(content, Mapping)
        found = build(kind, content)
        problem = next(check_ranges(kind, vars(found), f"{name}." if name else "", None), None)
        if problem is None:
            return found
    raise error(f"{file}: {problem}{advice}")


def matches_type(kind: Any, value: object) -> bool:
    """Whether a plain value, as YAML or JSON gives it, has the type `kind`; booleans are not numbers."""
    if kind is Any:
        return True
    if dataclasses.is_dataclass(kind):
        return next(_check_entry(kind, value, ""), None) is None
    if get_origin(kind) in (Union, types.UnionType):
        return any(matches_type(part, value) for part in get_args(kind))
    if get_origin(kind) is Literal:
        return any(type(value) is type(choice) and value == choice for choice in get_args(kind))
    if get_origin(kind) is list:
        return isinstance(value, list) and all(matches_type(get_args(kind)[0], entry) for entry in value)
    if get_origin(kind) is tuple:
        parts = get_args(kind)
        if not isinstance(value, list | tuple):
            return False
        parts = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
        return len(parts) == len(value) and all(map(matches_type, parts, value))
    if get_origin(kind) is dict:
        key, inner = get_args(kind)
        return isinstance(value, dict) and all(
            matches_type(key, name) and matches_type(inner, each) for name, each in value.items()
        )
    if is_typeddict(kind):
        kinds = get_type_hints(kind)
        return (
            isinstance(value, dict)
            and value.keys() == kinds.keys()
            and all(matches_type(kinds[name], each) for name, each in value.items())
        )
    if kind in (int, float):
        is_int = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
        return is_int or (kind is float and isinstance(value, float))
    return isinstance(value, kind)


def _fits(kind: Any, value: object) -> bool:
    """Whether a value has the type `kind`, and no text in it has NUL or lone surrogates."""
    entries = [*value, *value.values()] if isinstance(value, dict) else [value]
    texts = [text for entry in entries for text in (entry if isinstance(entry, list) else [entry])]
    writable = not any(isinstance(text, str) and re.search("[\0\ud800-\udfff]", text) for text in texts)
    return writable and matches_type(kind, value)


def build(kind: type[T], values: Mapping[str, Any]) -> T:
    """An instance of the dataclass `kind` from checked plain values; missing fields take their defaults."""
    hints = field_types(kind)
    return kind(**{name: _converted(hints[name], value) for name, value in values.items()})


def _converted(kind: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(kind):
        return build(kind, value)  # type: ignore[arg-type]  # a class, not an instance
    if get_origin(kind) is list:
        return [_converted(get_args(kind)[0], entry) for entry in value]
    if get_origin(kind) is tuple:
        return tuple(value)
    if get_origin(kind) in (Union, types.UnionType) and isinstance(value, Mapping):
        return next(
            (_converted(part, value) for part in get_args(kind) if dataclasses.is_dataclass(part)), value
        )
    return float(value) if kind is float else value


def describe(kind: Any) -> str:
    """A type in words: `an integer or null`."""
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(describe(part) for part in get_args(kind))
    if get_origin(kind) is Literal:
        choices = [str(choice) for choice in get_args(kind)]
        return choices[0] if len(choices) == 1 else "one of " + ", ".join(choices)
    if get_origin(kind) in (list, tuple):
        item = get_args(kind)[0]
        return "a list of " + ({str: "texts", int: "integers", float: "numbers"}.get(item) or describe(item))
    if get_origin(kind) is dict:
        return "a mapping of names to values"
    if dataclasses.is_dataclass(kind) or is_typeddict(kind):
        return "{" + ", ".join(f"{name}: …" for name in get_type_hints(kind)) + "}"
    words = {int: "an integer", float: "a number", bool: "true or false", str: "text", NoneType: "null"}
    return words[kind]


def show(value: object) -> str:
    """A value as messages print it: one line, at most 60 characters; a text is marked as one."""
    if value is None:
        return "nothing (null)"
    text = setting_text(value) if isinstance(value, bool) else repr(value)
    text = text if len(text) <= 60 else text[:57] + "..."
    return f"the text {text}" if isinstance(value, str) else text


def in_file(origin: str) -> str:
    """The end of a message about a setting that was read from the file `origin`; empty without one."""
    return f" ({printable(origin)})" if origin else ""


@functools.cache
def documentation(cls: type) -> tuple[str, dict[str, str]]:
    """The first line of a dataclass's docstring, and the text of each field under `Args:`."""
    docstring = inspect.cleandoc(cls.__doc__ or "")
    arguments = textwrap.dedent(docstring.partition("\nArgs:\n")[2].partition("\n\n")[0])
    parts = re.split(r"(?m)^(\w+): ", arguments)[1:]
    names, texts = parts[::2], (" ".join(text.split()) for text in parts[1::2])
    return docstring.partition("\n")[0], dict(zip(names, texts, strict=True))
