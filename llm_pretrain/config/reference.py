"""Prints the reference of all settings, docs/configuration.md, from the docstrings of the dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, get_args

from llm_pretrain.config.schema import describe, documentation, field_types
from llm_pretrain.config.tree import Config
from llm_pretrain.text import markdown_table, setting_text

_INTRODUCTION = """\
# Configuration

<!-- Written by `make docs` from the docstrings in llm_pretrain/config; edit those. -->

Every setting can be set in a YAML file given as `--config FILE` (repeatable: the later file wins, setting by
setting), and on the command line of both scripts as `--section.field VALUE`, which wins over all files. FILE
can also be the name of a preset, such as `quickstart` (`llm-pretrain configs` lists them). `--print_config`
prints the resolved settings with these comments, and the printed text can be passed back as `--config`. An
unknown setting, a wrong type or a contradiction stops the run with one line for each problem.
"""


def reference() -> str:
    """The whole reference as Markdown."""
    return "".join(_lines())


def _lines() -> Iterator[str]:
    yield _INTRODUCTION
    for section, cls in field_types(Config).items():
        summary, docs = documentation(cls)
        yield f"\n## `{section}`\n\n{summary}\n\n"
        yield _table(cls, docs, prefix=f"{section}.")
        for name, kind in field_types(cls).items():
            for entry in get_args(kind):
                if dataclasses.is_dataclass(entry) and isinstance(entry, type):
                    summary, docs = documentation(entry)
                    yield f"\nAn entry of `{section}.{name}` is `{{{', '.join(docs)}}}`:\n\n"
                    yield _table(entry, docs, prefix="")


def _table(cls: type, docs: dict[str, str], prefix: str) -> str:
    kinds = field_types(cls)
    rows = (
        (f"`{prefix}{field.name}`", describe(kinds[field.name]), _default(field), docs[field.name])
        for field in dataclasses.fields(cls)
    )
    return markdown_table(("setting", "type", "default", "meaning"), rows) + "\n"


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.default_factory()}`"
    if field.default is dataclasses.MISSING:
        return "must be given"
    return "–" if field.default is None else f"`{setting_text(field.default)}`"


if __name__ == "__main__":
    print(reference(), end="")
