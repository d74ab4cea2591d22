"""Declares options from the parameters of functions and dataclasses, and formats tables."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Callable, Collection, Sequence
from inspect import Parameter, signature
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from llm_pretrain.config.schema import check_ranges, documentation
from llm_pretrain.errors import ConfigError

_LONG = 30
"""Choices of more characters stand in an option's help, not in the usage."""
_DASHED = ("world_size",)
"""Options that may be written with dashes too."""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of descriptions and examples, except for those that the terminal has no room for."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(wrapped(line, width) for line in text.splitlines())


def wrapped(line: str, width: int) -> str:
    """A line of text, cut to `width` columns: a command before its options, a table in its last column."""
    if len(line) <= width:
        return line
    if line.startswith("  llm-pretrain "):
        parts = re.split(r" (?=--)", line)
        lines = [parts[0]]
        for part in parts[1:]:
            if len(lines[-1]) + len(part) + 3 > width:
                lines[-1] += " \\"
                lines.append("     ")
            lines[-1] += f" {part}"
        return "\n".join(lines)
    indent = re.match(r" *(.* {2,})?", line)
    assert indent is not None
    return textwrap.fill(
        line, width, subsequent_indent=" " * indent.end(), break_long_words=False, break_on_hyphens=False
    )


def add_parameters(
    parser: argparse.ArgumentParser,
    called: Callable[..., Any],
    *,
    without: Collection[str] = (),
    positional: Collection[str] = (),
) -> None:
    """Declare an option for each parameter of a function, or field of a dataclass, that its `Args:` describe.

    A parameter's annotation gives the option's type, choices or number of values; its description the help.

    Args:
        parser: The command's parser.
        called: The function or dataclass.
        without: Parameters that get no option.
        positional: Parameters that become positional arguments.
    """
    hints, texts = get_type_hints(called), documentation(cast(type, called))[1]
    for name, parameter in signature(called).parameters.items():
        if name in without:
            continue
        kind, text = hints[name], texts[name].removesuffix(".").replace("%", "%%")
        if get_origin(kind) in (Union, UnionType):  # as in `int | None` and `str | Path`
            kind = get_args(kind)[0]
        options: dict[str, Any] = {"help": text[0].lower() + text[1:]}
        if kind is bool:
            options["action"] = "store_true"
        elif get_origin(kind) is Literal:
            options["choices"] = get_args(kind)
            if len(names := ", ".join(get_args(kind))) > _LONG:
                options |= {"metavar": name.upper(), "help": f"{options['help']}: {names}"}
        elif kind in (int, float):
            options |= {"type": kind, "metavar": "N"}
        elif get_origin(kind) is Sequence:
            metavar = name.rpartition("_")[2].upper()
            options |= {"nargs": "+", "type": get_args(kind)[0], "metavar": metavar}
        if name in positional:
            options["metavar"] = name.upper()
            parser.add_argument(name, **options)
            continue
        if get_origin(kind) is Sequence:
            options["action"] = "extend"
        if parameter.default is Parameter.empty:
            options["required"] = True
        else:
            options["default"] = parameter.default
        if parameter.default not in (Parameter.empty, None) and kind is not bool:
            options["help"] += " (default: %(default)s)"
        spellings = [f"--{name.replace('_', '-')}"] if name in _DASHED else []
        parser.add_argument(*spellings, f"--{name}", **options)


def chosen(arguments: argparse.Namespace, called: Callable[..., Any], *problems: str) -> dict[str, Any]:
    """The values of a command line for the parameters of `called`, by name.

    Raises:
        ConfigError: there are `problems` that were found before, or numbers out of range.
    """
    found = {name: value for name, value in vars(arguments).items() if name in signature(called).parameters}
    if problems := (*problems, *check_ranges(called, found, "--")):
        raise ConfigError(*problems)
    return found
