"""Puts a known mistake into our own source, for as long as a test looks at what it does.

A mistake is a textual edit that must match exactly once, so that a test of it cannot outlive the line it is
about. Files on disk are never changed: the edited text becomes a module of its own, whose functions and
classes stand in for the original's wherever the package has imported them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parent.parent.parent
PACKAGE = "llm_pretrain"

LoadScript = Callable[[str], ModuleType]


@dataclass(frozen=True)
class Edit:
    """Replace `old` by `new` in `file`, a path from the repository's root."""

    file: str
    old: str
    new: str


def edited(file: str, edits: Sequence[Edit]) -> str:
    """Text of `file` with its edits made; fails where a text to replace is not there exactly once."""
    text = (ROOT / file).read_text()
    for edit in edits:
        if edit.file == file:
            found = text.count(edit.old)
            if found != 1:  # no AssertionError, which a test of a mistake waits for
                raise LookupError(f"{file}: expected once, found {found} times; mend the test:\n{edit.old}")
            text = text.replace(edit.old, edit.new)
    return text


@contextmanager
def mutated(*edits: Edit) -> Iterator[LoadScript]:
    """Puts edits of package files in force, and yields a function that loads a script with its edits."""
    undo: list[Callable[[], None]] = []
    try:
        for file in dict.fromkeys(edit.file for edit in edits):
            text = edited(file, edits)
            if file.startswith(PACKAGE):
                _stand_in(import_module(file.removesuffix(".py").replace("/", ".")), text, undo)
        yield lambda file: _module(file, edited(file, edits), undo)
    finally:
        for each in reversed(undo):
            each()


def _module(file: str, text: str, undo: list[Callable[[], None]]) -> ModuleType:
    """A module of `text`, known to Python (dataclasses look their module up) until undone."""
    name = f"mutant{len(undo)}_{Path(file).stem}"
    module = ModuleType(name)
    module.__file__ = str(ROOT / file)
    sys.modules[name] = module
    undo.append(lambda: sys.modules.__delitem__(name))
    exec(compile(text, str(ROOT / file), "exec"), module.__dict__)
    return module


def _stand_in(original: ModuleType, text: str, undo: list[Callable[[], None]]) -> None:
    """Bind what an edited copy of `original` defines wherever the package has the original's."""
    assert original.__file__ is not None
    mutant = _module(original.__file__, text, undo)
    replacements = {
        id(value): (value, getattr(mutant, name))
        for name, value in vars(original).items()
        if _is_own(value, original) and hasattr(mutant, name)
    }
    for module in [m for name, m in sys.modules.items() if name.startswith((PACKAGE, "mutant"))]:
        for name, value in list(vars(module).items()):
            if id(value) in replacements:
                setattr(module, name, replacements[id(value)][1])
                undo.append(lambda m=module, n=name, v=value: setattr(m, n, v))


def _is_own(value: Any, module: ModuleType) -> bool:
    """Functions and classes defined in `module`, and its dictionaries."""
    if isinstance(value, dict):
        return value is not vars(module).get("__builtins__")
    return getattr(value, "__module__", None) == module.__name__
