"""Reads and writes YAML by the core schema of version 1.2, without aliases and of bounded size.

PyYAML implements YAML 1.1, in which `1e-3` is a string, `on` is true, `010` is eight and keys may repeat.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError

from llm_pretrain.files import read_plain
from llm_pretrain.text import first_line

MAX_BYTES = 1 << 18
"""Largest size of a settings file in bytes: a hundred times the size of the longest preset."""

_TAG = "tag:yaml.org,2002:"
_DIGITS = "[0-9]+(?:_[0-9]+)*"
_INT = re.compile(f"[-+]?{_DIGITS}$")
_FLOAT = re.compile(
    rf"[-+]?(?:\.[0-9]+|{_DIGITS}(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$"
    r"|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
)


class YamlError(ValueError):
    """Text that is not YAML; `line` counts from 1, and is None if the parser names none."""

    def __init__(self, line: int | None, text: str):
        self.line = line
        self.text = text
        super().__init__(f"line {line}: {text}" if line else text)


class _Reader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict = {}  # noqa: RUF012  # PyYAML keeps its tables on the class
    yaml_constructors: dict = {}  # noqa: RUF012

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Lets PyYAML compose the node, but no alias: a few lines of aliases can mean billions of values."""
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise ComposerError(None, None, "an alias; write the value out", mark)
        return super().compose_node(parent, index)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Does nothing: merge keys (`<<`) are not part of YAML 1.2."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                problem = f"the key {key.value} occurs twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
        return super().construct_mapping(node, deep=deep)


def _integer(loader: _Reader, node: Any) -> int:
    return int(str(loader.construct_scalar(node)))


def _number(loader: _Reader, node: Any) -> float:
    text = str(loader.construct_scalar(node))
    return float(re.sub(r"\.(inf|nan)$", r"\1", text.lower()))


_Reader.add_implicit_resolver(_TAG + "null", re.compile("(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Reader.add_implicit_resolver(_TAG + "bool", re.compile("(?:true|True|TRUE|false|False|FALSE)$"), [*"tTfF"])
_Reader.add_implicit_resolver(_TAG + "int", _INT, [*"-+0123456789"])
_Reader.add_implicit_resolver(_TAG + "float", _FLOAT, [*"-+.0123456789"])
for _kind in ("null", "bool", "str", "seq", "map"):
    _Reader.add_constructor(_TAG + _kind, yaml.SafeLoader.yaml_constructors[_TAG + _kind])
_Reader.add_constructor(_TAG + "int", _integer)
_Reader.add_constructor(_TAG + "float", _number)
_Reader.yaml_constructors[None] = yaml.SafeLoader.yaml_constructors[None]  # any other tag is an error


class _Writer(yaml.SafeDumper):
    """Quotes every text that YAML 1.1 or 1.2 would read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        return super().increase_indent(flow, False)


def _text(writer: yaml.SafeDumper, value: str) -> yaml.Node:
    # PyYAML writes some line breaks (U+0085) unquoted and reads them back as spaces
    return writer.represent_scalar(_TAG + "str", value, style=None if value.isprintable() else '"')


_Writer.add_representer(str, _text)
_Writer.add_implicit_resolver(_TAG + "float", _FLOAT, [*"-+.0123456789"])


def read_yaml_file(path: str | Path) -> Any:
    """`read_yaml` of a file.

    Raises:
        YamlError: as `read_yaml`.
        OSError, ValueError: as `read_settings_text`.
    """
    return read_yaml(read_settings_text(path))


def read_settings_text(path: str | Path) -> str:
    """The text of a settings file; never blocks, and reads at most `MAX_BYTES`.

    Raises:
        OSError: the file cannot be read, is no plain file (opening a pipe would block), or is too large.
        ValueError: the file is not UTF-8, or no file can have this path.
    """
    text = read_plain(path, MAX_BYTES).decode("utf-8", "replace").removeprefix("\ufeff")
    if "\0" in text or "\ufffd" in text:
        raise ValueError("not UTF-8 text, perhaps UTF-16; save it as UTF-8")
    return text


def read_yaml(text: str) -> Any:
    """The value of a YAML text; None for an empty one.

    Raises:
        YamlError: not YAML, an alias, a repeated key, or a tag of an object.
    """
    try:
        return yaml.load(text, Loader=_Reader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise YamlError(mark.line + 1 if mark else None, error.problem or str(error)) from None
    except (yaml.YAMLError, ValueError, KeyError, RecursionError) as error:
        raise YamlError(None, f"{type(error).__name__}: {first_line(error)}") from None


def write_yaml(sections: Mapping[str, Mapping[str, Any]], comments: Mapping[str, str] | None = None) -> str:
    """Writes two levels of settings as block YAML, from which `read_yaml` reads equal values.

    Args:
        comments: Text to write above a section (`run`) or a setting (`run.name`).
    """
    return "".join(_lines(sections, comments or {}))


def _lines(sections: Mapping[str, Mapping[str, Any]], comments: Mapping[str, str]) -> Iterator[str]:
    for section, fields in sections.items():
        yield _comment(comments.get(section), "")
        yield f"{section}:\n" if fields else f"{section}: {{}}\n"
        for name, value in fields.items():
            yield _comment(comments.get(f"{section}.{name}"), "  ")
            entry = yaml.dump({name: value}, Dumper=_Writer, allow_unicode=True, sort_keys=False, width=10**9)
            yield textwrap.indent(entry, "  ")


def _comment(text: str | None, indent: str) -> str:
    if not text:
        return ""
    prefix = indent + "# "
    return textwrap.fill(text, 100, initial_indent=prefix, subsequent_indent=prefix) + "\n"
