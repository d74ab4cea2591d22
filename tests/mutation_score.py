"""Measures how many small faults in the core the quick suite detects.

    python tests/mutation_score.py [--count 60] [--seed 0] [--target llm_pretrain/training/step.py]

Each mutant changes one operator, constant, condition or call in a copy of the checkout, and runs the quick
tests of that file until the first failure. The survivors are printed with their line, to be looked at one by
one: some do not change behaviour.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMIT_SECONDS = 900

STEP_TESTS = [
    "tests/training/test_objective.py",
    "tests/training/test_global_balance.py",
    "tests/training/test_mixture_losses.py",
    "tests/training/test_dropout_seed.py",
    "tests/training/test_step_monitor.py",
    "tests/traps/test_traps_normalisation.py",
    "tests/traps/test_traps_bit_identity.py",
    "tests/traps/test_traps_mixed_precision.py",
    "tests/training/test_loop.py",
    "tests/distributed/test_invariance.py",
    "tests/distributed/test_resume.py",
]
CHECKPOINT_TESTS = ["tests/checkpoints", "tests/traps/test_traps_checkpoints.py"]
TARGETS: dict[str, tuple[str, list[str]]] = {
    "llm_pretrain/training/step.py": ("", STEP_TESTS),
    "train_pretrain.py": ("train_step", STEP_TESTS),
    "train_pretrain_accelerate.py": ("train_step", STEP_TESTS),
    "llm_pretrain/training/spikes.py": (
        "",
        ["tests/training/test_spikes.py", "tests/training/test_step_monitor.py"],
    ),
    "llm_pretrain/data/packing.py": ("", ["tests/data"]),
    "llm_pretrain/data/sample_order.py": ("", ["tests/data"]),
    "llm_pretrain/checkpoints/store.py": ("", CHECKPOINT_TESTS),
    "llm_pretrain/checkpoints/state.py": ("", CHECKPOINT_TESTS),
    "llm_pretrain/model/moe.py": ("", ["tests/model", "tests/training/test_global_balance.py"]),
    "llm_pretrain/optim/schedule.py": ("", ["tests/training/test_schedule.py"]),
}
"""File -> the function to mutate (all if empty), and the quick tests that are to detect it."""

COMPARISONS = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
}


@dataclass(frozen=True)
class Mutant:
    """One change of one file: characters `start` to `end` become `text`."""

    file: str
    line: int
    start: int
    end: int
    text: str
    kind: str
    original: str


def mutations(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Each (kind, replacement) of one node."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        flipped = COMPARISONS[type(node.ops[0])]()
        yield "comparison", ast.Compare(node.left, [flipped, *node.ops[1:]], node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield "operator", ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        swapped = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "and/or", ast.BoolOp(swapped, node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not", node.operand
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield "sign", node.operand
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield "off by one", ast.Constant(node.value + 1)
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield "boolean", ast.Constant(not node.value)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "dropped call", ast.Pass()


def mutants_of(file: str, function: str) -> list[Mutant]:
    """Every mutant of a file, or of one function in it; annotations and assertions are left alone."""
    source = (ROOT / file).read_text()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    encoded, found = source.encode(), []

    def visit(node: ast.AST, inside: bool) -> None:
        if isinstance(node, ast.FunctionDef):
            inside = inside or not function or node.name == function
        elif isinstance(node, ast.Assert | ast.Raise | ast.arguments | ast.JoinedStr):
            return
        if inside and isinstance(node, ast.expr | ast.stmt):
            for kind, changed in mutations(node):
                assert node.end_lineno is not None
                assert node.end_col_offset is not None
                start = starts[node.lineno - 1] + node.col_offset
                end = starts[node.end_lineno - 1] + node.end_col_offset
                text = ast.unparse(ast.fix_missing_locations(changed))
                text = f"({text})" if isinstance(changed, ast.expr) else text
                original = " ".join(encoded[start:end].decode().split())
                found.append(Mutant(file, node.lineno, start, end, text, kind, original))
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child, inside)

    visit(ast.parse(source), False)
    return found


def survives(mutant: Mutant | None, copy: Path, tests: list[str]) -> bool:
    """Whether the tests pass with the mutant in the copy (or, for None, as it is)."""
    original = None
    if mutant is not None:
        target = copy / mutant.file
        original = target.read_bytes()
        changed = original[: mutant.start] + mutant.text.encode() + original[mutant.end :]
        target.write_bytes(changed)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ended = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, timeout=LIMIT_SECONDS, check=False
        )
        return ended.returncode == 0
    except subprocess.TimeoutExpired:
        return False  # an endless loop is detected by the time limit of CI
    finally:
        if mutant is not None and original is not None:
            (copy / mutant.file).write_bytes(original)


def main() -> int:
    """Print each mutant, the score and the survivors; returns 1 if fewer than 90 % are detected."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=60, help="mutants to try")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=sorted(TARGETS), action="append", help="default: all")
    arguments = parser.parse_args()
    targets = arguments.target or sorted(TARGETS)
    generator = random.Random(arguments.seed)
    candidates = {file: mutants_of(file, TARGETS[file][0]) for file in targets}
    chosen = []
    for index in range(arguments.count):  # the files take turns, so that each counts alike
        left = candidates[targets[index % len(targets)]]
        if left:
            chosen.append(left.pop(generator.randrange(len(left))))
    survivors, tried = [], Counter()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        files = subprocess.run(
            ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split()
        for name in files:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
        for file in targets:
            if not survives(None, copy, TARGETS[file][1]):
                print(f"{file}: its tests fail without a mutant", file=sys.stderr)
                return 2
        for mutant in chosen:
            start = time.monotonic()
            alive = survives(mutant, copy, TARGETS[mutant.file][1])
            tried[mutant.file] += 1
            survivors += [mutant] if alive else []
            outcome = "SURVIVED" if alive else "detected"
            seconds = time.monotonic() - start
            print(
                f"{outcome} {seconds:5.0f} s  {mutant.file}:{mutant.line} {mutant.kind}: "
                f"{mutant.original} -> {mutant.text}",
                flush=True,
            )
    print(f"\ndetected {len(chosen) - len(survivors)} of {len(chosen)}")
    for file, count in tried.items():
        alive = sum(mutant.file == file for mutant in survivors)
        print(f"  {file}: {count - alive} of {count}")
    return int(10 * len(survivors) > len(chosen))


if __name__ == "__main__":
    sys.exit(main())
