"""Declares options from the parameters of functions and dataclasses, and formats tables."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Sequence
from inspect import Parameter, signature
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from llm_pretrain.config.schema import check_ranges, documentation
from llm_pretrain.errors import ConfigError

_DASHED = ("world_size",)
"""Options that may be written with dashes too."""


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
        elif kind in (int, float):
            options |= {"type": kind, "metavar": "N"}
        elif get_origin(kind) is Sequence:
            options |= {"nargs": "+", "type": get_args(kind)[0]}
        if name in positional:
            parser.add_argument(name, metavar=name.upper(), **options)
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
