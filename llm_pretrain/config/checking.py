"""Plain data against the configuration tree: unknown settings and wrong types, all of them at once.

Stricter than jsonargparse, which stops at the first problem, takes the text "512" for an integer and
completes a shortened name. Contradictions between fields are in `validation.py`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from llm_pretrain.config.tree import Config

NoneType = type(None)


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem: its line for the user, and the settings that it concerns."""

    line: str
    settings: tuple[str, ...] = ()


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """Field name to resolved type, for a dataclass of the tree."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


@functools.cache
def settings() -> dict[str, Any]:
    """Every setting as `section.field`, with its type."""
    return {
        f"{section}.{name}": kind
        for section, section_class in field_types(Config).items()
        for name, kind in field_types(section_class).items()
    }


def unknown_setting(name: str, origin: str = "") -> Problem:
    """The problem of a setting that the tree does not have, with its nearest neighbour."""
    known = [*settings(), *field_types(Config)]
    name = one_line(name)
    plain = name.replace("-", "_")
    last = plain.rpartition(".")[2]
    by_last = {candidate.rpartition(".")[2]: candidate for candidate in known}
    near = (
        [candidate for candidate in known if candidate.rpartition(".")[2] == last]
        or difflib.get_close_matches(plain, known, n=1)
        or [by_last[match] for match in difflib.get_close_matches(last, by_last, n=1)]
    )
    advice = f"did you mean {near[0]}?" if near else "--help lists them all"
    return Problem(f"{name}: no such setting; {advice}{_where(origin)}", (name, *near[:1]))


def check_tree(data: object, origin: str = "") -> tuple[dict[str, dict[str, Any]], list[Problem]]:
    """The settings of `data` that are sound, and the problems of those that are not.

    Args:
        data: What a configuration file holds: a mapping of sections, each a mapping of fields.
            A section without any field may be null.
        origin: File that it came from, for the messages.
    """
    if data is None:
        return {}, []
    if not isinstance(data, Mapping):
        found = f"found {show(data)}{_where(origin)}"
        return {}, [Problem(f"configuration: expected sections such as `model:` with their fields, {found}")]
    sound: dict[str, dict[str, Any]] = {}
    problems: list[Problem] = []
    for section, fields in data.items():
        kind = field_types(Config).get(section) if isinstance(section, str) else None
        if kind is None:
            problems.append(_unknown_section(section, origin))
        elif fields is None:
            sound[section] = {}
        elif not isinstance(fields, Mapping):
            line = f"{section}: expected a section with its fields, found {show(fields)}{_where(origin)}"
            problems.append(Problem(line, (section,)))
        else:
            sound[section], found_problems = _check_fields(kind, fields, section, origin)
            problems += found_problems
    return sound, problems


def check_value(name: str, kind: Any, value: object, origin: str = "") -> list[Problem]:
    """The problems of one setting's value, none where it has the type `kind`."""
    item: type | None = get_args(kind)[0] if get_origin(kind) is list else None
    if dataclasses.is_dataclass(item) and isinstance(value, list):
        return [
            problem
            for index, entry in enumerate(value)
            for problem in _check_entry(item, entry, f"{name}[{index}]", name, origin)
        ]
    if not dataclasses.is_dataclass(item) and _matches(kind, value):
        return []
    line = f"{name}: expected {describe(kind)}, found {show(value)}{_where(origin)}"
    return [Problem(line, (name,))]


def describe(kind: Any) -> str:
    """A type in words: `an integer or null`."""
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(describe(part) for part in get_args(kind))
    if get_origin(kind) is Literal:
        choices = [str(choice) for choice in get_args(kind)]
        return choices[0] if len(choices) == 1 else "one of " + ", ".join(choices)
    if get_origin(kind) is list:
        item = get_args(kind)[0]
        if not dataclasses.is_dataclass(item):
            return "a list of " + {str: "texts", float: "numbers"}[item]
        fields = dataclasses.fields(item)
        return "a list of {" + ", ".join(f"{field.name}: …" for field in fields) + "}"
    words = {int: "an integer", float: "a number", bool: "true or false", str: "text", NoneType: "null"}
    return words[kind]


def show(value: object) -> str:
    """A value as a message shows it: one line, shortened, with its kind where the value hides it."""
    if value is None:
        return "nothing (null)"
    text = repr(value) if not isinstance(value, bool) else str(value).lower()
    text = text if len(text) <= 60 else text[:57] + "..."
    return f"the text {text}" if isinstance(value, str) else text


def one_line(name: object) -> str:
    """A name as a message shows it, whatever characters it has."""
    return str(name) if str(name).isprintable() else repr(str(name))


def _unknown_section(section: object, origin: str) -> Problem:
    if isinstance(section, str) and section in settings():
        parent, _, name = section.partition(".")
        line = f"{section}: in a file, write it inside its section, `{parent}: {{{name}: …}}`{_where(origin)}"
        return Problem(line, (section,))
    return unknown_setting(str(section), origin)


def _check_fields(
    cls: type, fields: Mapping, prefix: str, origin: str
) -> tuple[dict[str, Any], list[Problem]]:
    sound: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, value in fields.items():
        kind = field_types(cls).get(name) if isinstance(name, str) else None
        if kind is None:
            found = [unknown_setting(f"{prefix}.{name}", origin)]
        else:
            found = check_value(f"{prefix}.{name}", kind, value, origin)
        problems += found
        if not found:
            sound[name] = value
    return sound, problems


def _check_entry(cls: type, entry: object, name: str, setting: str, origin: str) -> list[Problem]:
    """Problems of one entry of a list of dataclasses."""
    known = field_types(cls)
    shape = "{" + ", ".join(f"{field}: …" for field in known) + "}"
    if not isinstance(entry, Mapping):
        return [Problem(f"{name}: expected {shape}, found {show(entry)}{_where(origin)}", (setting,))]
    lines = [
        f"{name}.{one_line(key)}: no such setting; an entry is {shape}{_where(origin)}"
        for key in entry
        if key not in known
    ]
    for field in dataclasses.fields(cls):
        kind = known[field.name]
        if field.name in entry:
            if not _matches(kind, entry[field.name]):
                found = show(entry[field.name])
                lines.append(f"{name}.{field.name}: expected {describe(kind)}, found {found}{_where(origin)}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            lines.append(f"{name}.{field.name}: expected {describe(kind)}, found nothing{_where(origin)}")
    return [Problem(line, (setting,)) for line in lines]


def _matches(kind: Any, value: object) -> bool:
    if get_origin(kind) in (Union, types.UnionType):
        return any(_matches(part, value) for part in get_args(kind))
    if get_origin(kind) is Literal:
        return any(type(value) is type(choice) and value == choice for choice in get_args(kind))
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_matches(get_args(kind)[0], entry) for entry in value)
    if kind in (int, float):
        is_int = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
        return is_int or (kind is float and isinstance(value, float))
    if kind is str:
        return isinstance(value, str) and _is_plain_text(value)
    return isinstance(value, kind)


def _is_plain_text(value: str) -> bool:
    """No NUL and no lone surrogate: file names and files can hold it."""
    return "\0" not in value and not any("\ud800" <= character <= "\udfff" for character in value)


def _where(origin: str) -> str:
    return f" ({one_line(origin)})" if origin else ""
