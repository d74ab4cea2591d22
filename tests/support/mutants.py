"""Small faults in the package's source: drawn by lines, stored by the text around them, found again."""

from __future__ import annotations

import ast
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from support.fork_server import ROOT
from support.reached import DEFINITIONS, PROBED, blocks

COMPARISONS: dict[type, tuple[type, ...]] = {
    ast.Lt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Gt, ast.Lt),
}
for one, other in ((ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)):
    COMPARISONS |= {one: (other,), other: (one,)}
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div}
OPERATORS |= dict.fromkeys((ast.Div, ast.FloorDiv, ast.Mod, ast.Pow), ast.Mult)
COMMUTES = {"min", "max", "print", "add_argument"}
LOGS = {"logger", "_logger", "_log", "logging", "warnings"}
SKIPPED = ast.Raise | ast.Assert | ast.JoinedStr | ast.arg | ast.Import | ast.ImportFrom


class Mutant(NamedTuple):
    """A fault as it is stored: `new` in the place of `old`, an expression or a simple statement.

    `function` is a qualified name, empty at module level; `occurrence` says which of several equal ones in
    the function, from 0; `replaces` is the number of a mutant whose code is gone.
    """

    number: int
    file: str
    function: str
    kind: str
    old: str
    new: str
    occurrence: int = 0
    replaces: int | None = None


class Spot(NamedTuple):
    """An expression or statement, and the expressions `around` it, up to a simple statement, innermost first.

    `block` is empty where a module is imported; `is_condition`: it decides an `if` or `while`.
    """

    node: ast.expr | ast.stmt
    around: tuple[ast.expr | ast.stmt, ...]
    function: str
    block: str
    is_condition: bool


def sources() -> list[str]:
    package, *scripts = PROBED
    found = [*(ROOT / package).rglob("*.py"), *(ROOT / script for script in scripts)]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def folder_of(file: str) -> str:
    """`llm_pretrain/FOLDER`, `llm_pretrain` for its own files, or `scripts`."""
    parts = Path(file).parts
    return "/".join(parts[: min(2, len(parts) - 1)]) or "scripts"


def is_left_out(node: ast.AST) -> bool:
    """Whether nothing inside is changed: error texts, logging, what is for a type checker or a debugger."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'")
    if isinstance(node, ast.FunctionDef):
        return node.name in ("__repr__", "__str__")
    if isinstance(node, ast.Expr):
        is_text = isinstance(node.value, ast.Constant)
        return is_text or ast.unparse(node.value).partition(".")[0] in LOGS
    return isinstance(node, SKIPPED)


@cache
def spots(file: str) -> list[Spot]:
    """Everything in a file that may be changed, in order."""
    tree = ast.parse((ROOT / file).read_text())
    block_of = {id(statement): name for name, statements in blocks(tree) for statement in statements}
    found = []

    def visit(node: ast.AST, around: tuple, function: str, block: str, is_condition: bool) -> None:
        if is_left_out(node):
            return
        if isinstance(node, ast.stmt):
            around, block = (), block_of.get(id(node), "")
        if isinstance(node, DEFINITIONS):
            function = f"{function}.{node.name}".lstrip(".")
        if isinstance(node, ast.expr | ast.stmt):
            found.append(Spot(node, around, function, block, is_condition))
            is_simple = isinstance(node, ast.expr) or not hasattr(node, "body")
            around = (node, *around) if is_simple and not isinstance(node, ast.Expr) else around
        for field, value in ast.iter_fields(node):
            if field not in ("annotation", "returns", "decorator_list", "bases"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        decides = field == "test" and isinstance(node, ast.If | ast.While)
                        visit(child, around, function, block, decides)

    visit(tree, (), "", "", False)
    return found


def is_text(*nodes: ast.expr) -> bool:
    """Whether one is a string, so that another operator is a TypeError at once."""
    return any(
        isinstance(each, ast.JoinedStr) or isinstance(getattr(each, "value", None), str) for each in nodes
    )


def mutations(node: ast.expr | ast.stmt) -> Iterator[tuple[str, ast.AST]]:
    """Each (kind, replacement) of one node."""
    if isinstance(node, ast.Compare):
        for operator in COMPARISONS[type(node.ops[0])]:
            yield "comparison", ast.Compare(node.left, [operator(), *node.ops[1:]], node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS and not is_text(node.left, node.right):
        yield "operator", ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
    elif isinstance(node, ast.AugAssign) and type(node.op) in OPERATORS:
        yield "operator", ast.AugAssign(node.target, OPERATORS[type(node.op)](), node.value)
    elif isinstance(node, ast.BoolOp):
        yield "and/or", ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield "not" if isinstance(node.op, ast.Not) else "sign", node.operand
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield "boolean", ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield "constant", ast.Constant(node.value + 1)
        yield "constant", ast.Constant(node.value * 2 or -1)
    elif isinstance(node, ast.IfExp):
        yield "condition", ast.IfExp(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    elif isinstance(node, ast.Call) and len(node.args) > 1 and not isinstance(node.func, ast.Constant):
        first, second, *others = node.args
        name = ast.unparse(node.func).rpartition(".")[2]
        is_plain = not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred)
        if name in ("min", "max"):
            yield "min/max", ast.Call(ast.Name("max" if name == "min" else "min"), node.args, node.keywords)
        elif is_plain and name not in COMMUTES:
            yield "swapped arguments", ast.Call(node.func, [second, first, *others], node.keywords)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "dropped call", ast.Pass()
    elif isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        yield "return value", ast.Return(ast.Constant(None))


def candidates(spot: Spot) -> Iterator[tuple[str, ast.AST]]:
    """Each (kind, replacement) of a spot, with the negated conditions of `if` and `while`."""
    yield from mutations(spot.node)
    if spot.is_condition and not isinstance(spot.node, ast.UnaryOp | ast.Compare):
        yield "condition", ast.UnaryOp(ast.Not(), spot.node)


class _Exchange(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST):
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)


def equal(file: str, function: str, old: str, new: str) -> list[Spot]:
    """The spots of a function with the text `old`: statements where `new` drops one, else expressions."""
    return [
        spot
        for spot in spots(file)
        if spot.function == function
        and isinstance(spot.node, ast.Expr) == (new == "pass")
        and ast.unparse(spot.node) == old
    ]


def find(mutant: Mutant) -> Spot | None:
    """Where the mutant's code is today, or None."""
    if not (ROOT / mutant.file).exists():
        return None
    found = equal(mutant.file, mutant.function, mutant.old, mutant.new)
    return found[mutant.occurrence] if len(found) > mutant.occurrence else None


def apply(source: bytes, node: ast.expr | ast.stmt, new: str) -> bytes:
    """The source with `new` in the place of a node."""
    lines = source.splitlines(keepends=True)
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    text = f"({new})" if isinstance(node, ast.expr) else new
    return source[:start] + text.encode() + source[end:]


def as_stored(file: str, spot: Spot, kind: str, replacement: ast.AST) -> Mutant | None:
    """The mutant with the smallest text around it that its function has once; None if it changes nothing."""
    source, mutant = (ROOT / file).read_bytes(), None
    levels = (spot.node, *spot.around)
    for level in levels[isinstance(spot.node, ast.Constant) and len(levels) > 1 :]:
        old = ast.unparse(level)
        new = ast.unparse(ast.fix_missing_locations(_Exchange(spot.node, replacement).visit(level)))
        if level is not spot.node:
            _Exchange(replacement, spot.node).visit(level)
        same = equal(file, spot.function, old, new)
        try:
            changed = ast.unparse(ast.parse(apply(source, level, new)))
        except SyntaxError:  # a slice or a starred expression cannot stand in parentheses
            continue
        if changed != ast.unparse(ast.parse(source)):
            occurrence = next(number for number, each in enumerate(same) if each.node is level)
            mutant = Mutant(0, file, spot.function, kind, old, new, occurrence)
            if len(same) == 1:
                break
    return mutant


def draw_one(folder: str, generator: random.Random, taken: Sequence[Mutant]) -> Mutant:
    """A mutant of a folder: first a line, then one of its changes; none that another has."""
    lines = defaultdict(list)
    for file in sources():
        if folder_of(file) == folder:
            for spot in spots(file):
                for kind, replacement in candidates(spot):
                    lines[file, spot.node.lineno].append((file, spot, kind, replacement))
    texts = {(each.file, each.function, each.old) for each in taken}
    while True:
        choices = lines[generator.choice(list(lines))]
        mutant = as_stored(*generator.choice(choices))
        if mutant is not None and (mutant.file, mutant.function, mutant.old) not in texts:
            return mutant
