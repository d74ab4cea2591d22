"""Notes which blocks of the package's functions a process runs; `mutation_score.py` says who needs it.

A copy of the checkout has this file as `sitecustomize.py` in its root, so that every Python process that
imports from there, forked ranks and subprocesses too, compiles a probe into each block of statements.
Source files stay as they are, and so do line numbers. Each block is noted once, at once, in the file that
NOTES names, since a rank may be killed. Code outside the package costs nothing, unlike with a tracer.
"""

from __future__ import annotations

import ast
import builtins
import os
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from itertools import count
from pathlib import Path
from typing import Any

NOTES = "LLM_PRETRAIN_TEST_NOTES"
"""A variable: the file of the test that runs, or of the fixture that it waits for."""
ROOT = Path(__file__).parent
PROBED = ("llm_pretrain/", "train_pretrain.py", "train_pretrain_accelerate.py")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

_compile = SourceFileLoader.source_to_code
_open, _write, _close = os.open, os.write, os.close
"""Before a test replaces them."""


def blocks(tree: ast.Module) -> Iterator[tuple[str, list[ast.stmt]]]:
    """Each block in a function: `qualified.name#number` (0 is the function's body), and its statements."""

    def visit(node: ast.AST, name: str, inside: bool, numbers: Iterator[int]) -> Iterator:
        if isinstance(node, DEFINITIONS):
            name, numbers = f"{name}.{node.name}".lstrip("."), count()
            inside = not isinstance(node, ast.ClassDef)
        for field in ("body", "orelse", "finalbody"):
            if inside and (statements := getattr(node, field, None)):
                yield f"{name}#{next(numbers)}", statements
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
                yield from visit(child, name, inside, numbers)

    return visit(tree, "", False, count())


def reached(name: str) -> None:
    """Note a block, unless this process has noted it for the same test."""
    if name in reached.seen:
        return
    reached.seen.add(name)
    if path := os.environ.get(NOTES):
        file = _open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        _write(file, f"{name}\n".encode())
        _close(file)


reached.seen = set()


def _source_to_code(loader: SourceFileLoader, data: Any, path: Any, **options: Any) -> Any:
    name = os.path.relpath(os.fsdecode(path), ROOT)
    if name.startswith(PROBED):
        data = ast.parse(data, path)
        for block, statements in list(blocks(data)):
            has_docstring = ast.unparse(statements[0]).startswith(('"', "'"))
            call = ast.Call(ast.Name("_reached_", ast.Load()), [ast.Constant(f"{name}::{block}")], [])
            probe = ast.copy_location(ast.Expr(call), statements[0])
            statements.insert(int(has_docstring), ast.fix_missing_locations(probe))
    return _compile(loader, data, path, **options)


if __name__ == "sitecustomize" and NOTES in os.environ:
    builtins._reached_ = reached  # type: ignore[attr-defined]  # what the probes call
    SourceFileLoader.source_to_code = _source_to_code  # type: ignore[method-assign]
    os.register_at_fork(after_in_child=reached.seen.clear)
