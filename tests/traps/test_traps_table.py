"""The tables of docs/traps.md: what they name exists."""

from __future__ import annotations

import ast
import re
from functools import cache

from support.launching import ROOT

NAMED = re.compile(r"`((?:[\w.-]+/)*[\w.-]+\.(?:py|yaml|toml|md|ipynb))(?:::(\w+))?`")


def rows(start: str) -> list[list[str]]:
    """Cells of the lines that begin so."""
    page = (ROOT / "docs" / "traps.md").read_text()
    return [line.strip("| ").split(" | ") for line in page.splitlines() if re.match(start, line)]


@cache
def names(path: str) -> set[str]:
    """Names that a file defines at its top."""
    found: set[str] = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def check(cell: str, tests: bool) -> None:
    """A cell names at least one thing, and whatever it names is there."""
    named = NAMED.findall(cell)
    assert named, f"names nothing: {cell}"
    for path, name in named:
        assert (ROOT / path).is_file(), path
        assert path.startswith("tests/") == tests, path
        assert name.startswith("test_") or not tests, path
        assert not name or name in names(path), f"{path} has no {name}"


def test_traps_are_numbered_and_have_a_guard_and_tests():
    traps = rows(r"\| \d")
    assert [int(number) for number, *_ in traps] == list(range(1, 28))
    for _, _, guard, tests in traps:
        check(guard, tests=False)
        check(tests, tests=True)


def test_errors_of_others_have_a_source_and_a_test():
    found = rows(r"\| .*https://github")
    assert len(found) >= 12
    for _, source, *_, tests in found:
        assert "](https://github.com/" in source
        check(tests, tests=True)
