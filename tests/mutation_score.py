"""Measures how many small faults in the package and in the two scripts the quick tests detect.

    python tests/mutation_score.py draw [--count 100] [--seed 0]
    python tests/mutation_score.py map MAP.json [--workers 2] [--tests PATH …]
    python tests/mutation_score.py run MAP.json ROWS.jsonl [--count 100]
    python tests/mutation_score.py summary ROWS.jsonl

`draw` writes `assets/mutants.json`. `map` runs the quick tests and writes how long each takes and which
blocks it reaches, in forked ranks and subprocesses too. `run` applies each mutant to a copy of the checkout
and runs the nearest tests that reach it. Where a mutant's code is gone, another of its folder is drawn and
stored. `run` leaves out what has a row. Some survivors do not change behaviour: look at them one by one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from support.fork_server import ROOT
from support.mutants import Mutant, apply, draw_one, find, folder_of, sources
from support.mutation_plugin import note_name
from support.reached import NOTES

STORED = ROOT / "tests" / "assets" / "mutants.json"
BUDGET = 20.0
"""Seconds of tests for a mutant, as the map has them."""
START_SECONDS = 120
"""A generous bound on what comes before the first test: imports, the fork server, a slow machine."""
NO_TESTS = 5
"""pytest's exit code where the tests of the map are gone: it is of another commit."""


def read_stored() -> list[Mutant]:
    return [Mutant(**each) for each in json.loads(STORED.read_text())]


def write_stored(mutants: Sequence[Mutant]) -> None:
    """One mutant a line."""
    STORED.write_text("[\n" + ",\n".join(json.dumps(each._asdict()) for each in mutants) + "\n]\n")


def draw(count: int, seed: int) -> None:
    """Write mutants of all folders in proportion to their lines, in random order: a part is a sample too."""
    generator, lines, mutants = random.Random(seed), Counter(), []
    for file in sources():
        lines[folder_of(file)] += len((ROOT / file).read_text().splitlines())
    for folder in generator.choices(list(lines), list(lines.values()), k=count):
        mutants.append(draw_one(folder, generator, mutants)._replace(number=len(mutants) + 1))
    write_stored(mutants)


def replace_gone(mutants: list[Mutant]) -> list[Mutant]:
    """The mutants to run: for each whose code is gone, name it and store another of its folder."""
    replaced = {each.replaces for each in mutants}
    active = [each for each in mutants if each.number not in replaced]
    for place, mutant in enumerate(active):
        if find(mutant) is None:
            new = draw_one(folder_of(mutant.file), random.Random(mutant.number), mutants)
            active[place] = new._replace(number=len(mutants) + 1, replaces=mutant.number)
            print(f"gone: {describe(mutant._asdict())}\n  replaced by {describe(active[place]._asdict())}")
            mutants.append(active[place])
            write_stored(mutants)
    return active


def copy_checkout(copy: Path) -> None:
    """Copy what git knows or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in names:
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)


def run_tests(copy: Path, arguments: Sequence[str], limit: float, **variables: str) -> int | None:
    """Run quick tests in the copy; returns pytest's exit code, or None after `limit` seconds."""
    command = [sys.executable, "-m", "pytest", "-p", "support.mutation_plugin", "-p", "no:cacheprovider"]
    command += ["-m", "not slow", "--continue-on-collection-errors", *arguments]
    environment = os.environ | {"PYTHONPATH": f"{copy}:{copy / 'tests'}"} | variables
    with (copy.parent / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=copy, env=environment, stdout=log, stderr=log)
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                started = psutil.Process(process.pid)
                for each in [*started.children(recursive=True), started]:
                    each.kill()
                process.wait()


def read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def make_map(output: Path, tests: Sequence[str], workers: int) -> None:
    """Run the quick tests with probes and write durations, and the blocks that each test reaches."""
    with tempfile.TemporaryDirectory() as folder:
        copy, rows, notes = Path(folder) / "checkout", Path(folder) / "rows", Path(folder) / "notes"
        copy_checkout(copy)
        shutil.copy(copy / "tests/support/reached.py", copy / "sitecustomize.py")
        notes.mkdir()
        options = ["-n", str(workers), "--dist", "loadfile"] if workers else []
        variables = {NOTES: str(notes / "imports"), "PYTHONDONTWRITEBYTECODE": "1"}
        code = run_tests(copy, [*options, f"--rows={rows}", f"--notes={notes}", *tests], 1e6, **variables)
        if code not in (0, 1):
            sys.exit((copy.parent / "log").read_text()[-4000:])
        fixtures, found, blocks = {}, {}, defaultdict(lambda: len(blocks))
        for row in read_rows(rows):
            table = fixtures if "fixture" in row else found
            name = row.pop("fixture", None) or row.pop("test")
            noted = notes / note_name(name)
            names = set(noted.read_text().split()) if noted.exists() else set()
            table[name] = row | {"blocks": sorted(blocks[each] for each in names)}
    for name, row in found.items():
        if row["outcome"] == "failed":
            print(f"left out, fails without a mutant: {name}")
    passed = {name: row for name, row in found.items() if row["outcome"] == "passed"}
    output.write_text(json.dumps({"tests": passed, "fixtures": fixtures, "blocks": list(blocks)}))


class Map:
    """Which tests reach a block, and what they cost, as `map` has written it into `file`."""

    def __init__(self, file: Path):
        content = json.loads(file.read_text())
        self.tests, self.fixtures = content["tests"], content["fixtures"]
        self.reaching = defaultdict(set)
        self.sizes = {}
        for name, row in self.tests.items():
            row["fixtures"] = [each for each in row["fixtures"] if each in self.fixtures]
            numbers = set(row["blocks"]).union(*(self.fixtures[each]["blocks"] for each in row["fixtures"]))
            self.sizes[name] = len(numbers)
            for number in numbers:
                self.reaching[content["blocks"][number]].add(name)

    def reach(self, file: str, function: str, block: str) -> tuple[str, set[str]]:
        """Tests that reach the block; if none, those of the function, then those of the file; and which."""
        for level, start in {"block": f"{block}\n", "function": f"{function}#", "file": ""}.items():
            keys = [key for key in self.reaching if f"{key}\n".startswith(f"{file}::{start}")]
            if found := set().union(*(self.reaching[key] for key in keys)):
                return level, found
        return "nothing", set()

    def nearest(self, file: str, tests: set[str]) -> tuple[list[str], float]:
        """The tests to run and their seconds: the file's name and folder first, then what reaches little."""

        def order(test: str) -> tuple[int, int, str]:
            path = Path(test.partition("::")[0])
            same_name = path.stem.endswith(f"_{Path(file).stem}") or f"_{Path(file).stem}_" in path.stem
            return -(2 * same_name + (path.parent.name == Path(file).parent.name)), self.sizes[test], test

        chosen, total, ready = [], 0.0, set()
        for test in sorted(tests, key=order):
            new = set(self.tests[test]["fixtures"]) - ready
            seconds = self.tests[test]["seconds"] + sum(self.fixtures[each]["seconds"] for each in new)
            if total + seconds <= BUDGET or not chosen:
                chosen, total, ready = [*chosen, test], total + seconds, ready | new
        return chosen, total


def run_mutant(mutant: Mutant, copy: Path, tests: Map) -> dict[str, Any]:
    """Its row: the tests that ran and those that failed."""
    start, target = time.monotonic(), copy / mutant.file
    spot = find(mutant)
    assert spot is not None
    reached, reaching = tests.reach(mutant.file, spot.function, spot.block)
    chosen, expected = tests.nearest(mutant.file, reaching)
    row = mutant._asdict() | {"line": spot.node.lineno, "outcome": "survived", "tests_reach": reached}
    row |= {"tests": [], "detectors": []}
    if chosen:
        original, before = target.read_bytes(), target.stat()
        target.write_bytes(apply(original, spot.node, mutant.new))
        os.utime(target, (before.st_atime, before.st_mtime + mutant.number))  # else bytecode may look current
        chosen_file, rows = copy.parent / "chosen", copy.parent / "rows"
        chosen_file.write_text("\n".join(chosen))
        rows.unlink(missing_ok=True)
        files = sorted({test.partition("::")[0] for test in chosen})
        arguments = [f"--rows={rows}", f"--chosen={chosen_file}", *files]
        code = run_tests(copy, arguments, START_SECONDS + 5 * expected)
        target.write_bytes(original)
        os.utime(target, ns=(before.st_atime_ns, before.st_mtime_ns))
        ran = [each for each in read_rows(rows) if "test" in each]
        row["tests"] = [each["test"] for each in ran]
        row["detectors"] = [each["test"] for each in ran if each["outcome"] == "failed"]
        if code not in (0, 1, NO_TESTS, None) and not row["detectors"]:
            row["detectors"] = [f"pytest: exit code {code}"]
        row["outcome"] = "timeout" if code is None else "detected" if row["detectors"] else "survived"
    return row | {"seconds": round(time.monotonic() - start, 1)}


def describe(row: dict[str, Any]) -> str:
    place = f"{row['file']}:{row['line']}" if "line" in row else row["file"]
    return f"{row['number']} {place} {row['function']} ({row['kind']}): {row['old']} -> {row['new']}"


def run(map_file: Path, rows: Path, count: int) -> None:
    tests = Map(map_file)
    done = {row["number"] for row in read_rows(rows)}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        copy_checkout(copy)
        for file in sorted({test.partition("::")[0] for test in tests.tests}):
            if not (copy / file).is_file():
                sys.exit(f"{map_file}: expected tests of this checkout, found {file}")
        for mutant in replace_gone(read_stored())[:count]:
            if mutant.number not in done:
                row = run_mutant(mutant, copy, tests)
                with rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(f"{row['outcome']:11} {row['seconds']:5.0f} s  {describe(row)}", flush=True)
    summarize(rows)


def summarize(file: Path) -> None:
    """Print the count, hours and survivors; a mutant that never ends counts as detected."""
    rows = read_rows(file)
    survivors = [row for row in rows if row["outcome"] == "survived"]
    hours = sum(row["seconds"] for row in rows) / 3600
    print(f"{len(rows) - len(survivors)} of {len(rows)} detected, {hours:.2f} hours\nsurvivors:")
    for row in survivors:
        print(f"  {describe(row)} [{len(row['tests'])} tests reach its {row['tests_reach']}]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    parts = {name: commands.add_parser(name) for name in ("draw", "map", "run", "summary")}
    parts["draw"].add_argument("--seed", type=int, default=0)
    parts["map"].add_argument("--workers", type=int, default=2, help="pytest processes (0: in this one)")
    for name, file in (("map", "map"), ("run", "map"), ("run", "rows"), ("summary", "rows")):
        parts[name].add_argument(file, type=Path)
    for name in ("draw", "run"):
        parts[name].add_argument("--count", type=int, default=100)
    parts["map"].add_argument("--tests", nargs="+", default=[], help="default: all")
    options = parser.parse_args()
    if options.command == "draw":
        draw(options.count, options.seed)
    elif options.command == "map":
        make_map(options.map, options.tests, options.workers)
    elif options.command == "run":
        run(options.map, options.rows, options.count)
    else:
        summarize(options.rows)


if __name__ == "__main__":
    main()
