"""The table of docs/traps.md: what it names exists."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest
from support.launching import ROOT

NAMED = re.compile(r"`((?:[\w.-]+/)*[\w.-]+\.(?:py|yaml|toml|md|ipynb))(?:::(\w+))?`")


def rows() -> dict[int, list[str]]:
    """Cells (trap, guard, tests) by number."""
    page = (ROOT / "docs" / "traps.md").read_text()
    cells = [line.strip("| ").split(" | ") for line in page.splitlines() if re.match(r"\| \d", line)]
    return {int(number): rest for number, *rest in cells}


def errors_of_others() -> list[list[str]]:
    """Cells (error, source, seen as, test) of the second table."""
    page = (ROOT / "docs" / "traps.md").read_text().partition("## Silent errors of others")[2]
    return [line.strip("| ").split(" | ") for line in page.splitlines() if "https://" in line]


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


def test_the_traps_are_numbered_and_each_has_three_cells():
    assert sorted(rows()) == list(range(1, 27))
    assert all(len(cells) == 3 for cells in rows().values())


@pytest.mark.parametrize("number", rows())
def test_guards_and_tests_of_a_trap_exist(number):
    _, guard, tests = rows()[number]
    check(guard, tests=False)
    check(tests, tests=True)


def test_errors_of_others_have_a_source_and_a_test():
    found = errors_of_others()
    assert len(found) >= 12
    for _, source, *_, tests in found:
        assert "](https://github.com/" in source
        check(tests, tests=True)
