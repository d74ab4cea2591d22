"""Options of commands that are the parameters of what they call."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Sequence
from inspect import Parameter, signature
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from llm_pretrain.config.schema import documentation


def add_parameters(
    parser: argparse.ArgumentParser, called: Callable[..., Any], *, without: Collection[str] = ()
) -> None:
    """Declare an option for each parameter of a function, or field of a dataclass, that its `Args:` describe.

    The annotation gives its type, choices or number of values, the description its help.

    Args:
        parser: The command's parser.
        called: The function or dataclass.
        without: Parameters that are no options.
    """
    hints, texts = get_type_hints(called), documentation(cast(type, called))[1]
    for name, parameter in signature(called).parameters.items():
        if name in without:
            continue
        kind, text = hints[name], texts[name].removesuffix(".").replace("%", "%%")
        options: dict[str, Any] = {"help": text[0].lower() + text[1:]}
        if kind is bool:
            options["action"] = "store_true"
        elif get_origin(kind) is Literal:
            options["choices"] = get_args(kind)
        elif get_origin(kind) is Sequence:
            options |= {"nargs": "+", "action": "extend"}
        else:
            options["type"] = next((each for each in (int, float) if each in (kind, *get_args(kind))), str)
        if parameter.default is Parameter.empty:
            options["required"] = True
        else:
            options["default"] = parameter.default
        if parameter.default not in (Parameter.empty, None, False):
            options["help"] += " (default: %(default)s)"
        parser.add_argument(f"--{name}", **options)


def chosen(arguments: argparse.Namespace, called: Callable[..., Any]) -> dict[str, Any]:
    """The arguments of `called` that a command line has options for."""
    return {name: value for name, value in vars(arguments).items() if name in signature(called).parameters}
