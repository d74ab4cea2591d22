"""YAML as configuration files mean it: plain values only, `1e-3` is a number, `on` is a word.

PyYAML follows YAML 1.1, where `1e-3` is a string, `on` is true, `010` is eight and a key may stand
twice. The reader here follows the core schema of YAML 1.2 and constructs nothing but mappings, lists,
text, numbers, booleans and null. It knows nothing of the configuration tree.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

MAX_BYTES = 1 << 18
"""Size of the largest file that is read as settings; the longest of ours has a hundredth of it."""
MAX_VALUES = 10_000
"""Values that a text may stand for, those of an alias counted at every use: a few lines of aliases to
aliases would be billions of them, and to read, to compare and to print them would take all memory."""
MAX_DEPTH = 32
"""Levels of nesting; far below where Python's own recursion ends."""
MAX_DIGITS = 500
"""Of an integer; a double has 309 before its point."""

_TAG = "tag:yaml.org,2002:"
_DIGITS = "[0-9]+(?:_[0-9]+)*"
_INT = re.compile(f"[-+]?{_DIGITS}$")
_FLOAT = re.compile(
    rf"[-+]?(?:\.[0-9]+|{_DIGITS}(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$"
    r"|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
)


class YamlError(Exception):
    """Text that is not YAML; `line` counts from 1, None where the parser names none."""

    def __init__(self, line: int | None, text: str):
        self.line = line
        self.text = text
        super().__init__(text)


class _Reader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict = {}  # noqa: RUF012  # PyYAML keeps its tables on the class
    yaml_constructors: dict = {}  # noqa: RUF012

    def __init__(self, stream: str):
        super().__init__(stream)
        self._values = self._depth = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        """As PyYAML's, while there are not too many: it stops before the rest of the text is read."""
        mark, is_alias, before = self.peek_event().start_mark, self.check_event(yaml.AliasEvent), self._values
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, f"nested deeper than {MAX_DEPTH} levels", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if is_alias and id(node) not in self._sizes:
            raise yaml.composer.ComposerError(None, None, "an alias inside of what it stands for", mark)
        self._values += self._sizes[id(node)] if is_alias else 1
        if self._values > MAX_VALUES:
            problem = f"more than {MAX_VALUES} values, aliases written out"
            raise yaml.composer.ComposerError(None, None, problem, mark)
        self._sizes.setdefault(id(node), self._values - before)
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """No merge keys: `<<` is a word like any other, and its tag one that asks for what is not read."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                problem = f"the key {key.value} stands twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
        return super().construct_mapping(node, deep=deep)


def _integer(loader: _Reader, node: Any) -> int:
    text = str(loader.construct_scalar(node))
    if len(text) > MAX_DIGITS:
        problem = f"a number of {len(text)} characters"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
    return int(text)


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
    """Quotes every text that either version of YAML would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        return super().increase_indent(flow, False)


def _text(writer: yaml.SafeDumper, value: str) -> yaml.Node:
    # PyYAML writes some line breaks (U+0085) bare and then reads them as spaces
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
    """The text of a file that a person wrote; never waits, and never takes more memory than `MAX_BYTES`.

    Raises:
        OSError: it cannot be read, is no plain file (a pipe would be waited for), or is too large.
        ValueError: not UTF-8, or a path that no file can have.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "no plain file, which every process could read", str(path))
        content = b""
        while len(content) <= MAX_BYTES and (part := os.read(descriptor, MAX_BYTES + 1 - len(content))):
            content += part
    finally:
        os.close(descriptor)
    if len(content) > MAX_BYTES:
        reason = f"larger than {MAX_BYTES >> 10} KiB, so no file of settings"
        raise OSError(errno.EFBIG, reason, str(path))
    return content.decode("utf-8").removeprefix("\ufeff")


def read_yaml(text: str) -> Any:
    """The value that `text` stands for; an empty text is None.

    Raises:
        YamlError: not YAML, a key that stands twice, a tag that asks for an object, or too much of it.
    """
    try:
        return yaml.load(text, Loader=_Reader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise YamlError(mark.line + 1 if mark else None, error.problem or str(error)) from None
    except (yaml.YAMLError, ValueError, KeyError, RecursionError) as error:
        first_line = str(error).partition("\n")[0]
        raise YamlError(None, f"{type(error).__name__}: {first_line}") from None


def write_yaml(sections: Mapping[str, Mapping[str, Any]], comments: Mapping[str, str] | None = None) -> str:
    """Two levels of settings as block YAML that `read_yaml` reads back to the same values.

    `comments` holds a text for a section (`run`) or a setting (`run.name`), written above it.
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
