"""Conversations about the Python standard library, read off its docstrings: real text on every machine.

For every public function and class with a docstring, a user asks what it does and how it is called. The
sources are parsed, never imported. Which files belong to the library is `documents.py`'s business.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Iterator
from pathlib import Path

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def conversations(name: str, path: Path) -> Iterator[tuple[int, bytes]]:
    """(line, `{"messages": …}` as JSON) of every documented public definition of one source file.

    Args:
        name: Path within the library, such as `json/__init__.py`.
        path: The file; one that this Python cannot parse has none.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of invalid escapes in the library's own strings
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for dotted, node in _definitions(tree, module):
        documentation = ast.get_docstring(node)
        if documentation is None or not documentation.strip():
            continue
        kind = "class" if isinstance(node, ast.ClassDef) else "function"
        turns = [
            ("user", f"What does the {kind} `{dotted}` do?"),
            ("assistant", " ".join(documentation.strip().split("\n\n")[0].split())),
            ("user", "How is it written?"),
            ("assistant", f"`{_signature(node)}`"),
        ]
        messages = [{"role": role, "content": content} for role, content in turns]
        yield node.lineno, json.dumps({"messages": messages}, ensure_ascii=False).encode()


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, _Definition]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Definition) and not child.name.startswith("_"):
            dotted = f"{prefix}.{child.name}"
            yield dotted, child
            if isinstance(child, ast.ClassDef):
                yield from _definitions(child, dotted)


def _signature(node: _Definition) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(map(ast.unparse, node.bases))
        return f"class {node.name}({bases})" if bases else f"class {node.name}"
    prefix = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    return f"{prefix} {node.name}({ast.unparse(node.args)})"
