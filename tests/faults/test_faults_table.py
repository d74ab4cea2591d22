"""docs/reliability.md names every fault test there is, and none that there is not."""

from __future__ import annotations

import re

from support.launching import ROOT

from llm_pretrain import errors

FOLDER = ROOT / "tests" / "faults"


def section(title: str, page: str = "reliability") -> str:
    """The text under a heading of a page of docs/."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """The cells of a table's rows, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_fault_names_its_tests():
    for fault, *_, tested in rows(section("Faults")):
        files = re.findall(r"`(test_faults_\w+)\.py(?:::(\w+))?`", tested)
        assert files, f"{fault}: no test"
        for file, function in files:
            path = FOLDER / f"{file}.py"
            assert path.is_file(), f"{fault}: no file {path.name}"
            if function:
                assert re.search(rf"^def {function}\(", path.read_text(), re.MULTILINE), (
                    f"{fault}: {function}"
                )


def test_every_file_of_fault_tests_is_named():
    named = set(re.findall(r"`(test_faults_\w+\.py)", section("Faults")))
    there = {path.name for path in FOLDER.glob("test_faults_*.py")} - {"test_faults_table.py"}
    assert there <= named


def test_every_exit_code_is_explained():
    """In the table of codes; those of the faults are among them."""
    codes = {cells[0] for cells in rows(section("Exit codes", "commands"))}
    ours = {each.exit_code for each in vars(errors).values() if isinstance(each, type)}
    assert codes == {str(code) for code in ours | {0, errors.EXIT_PREEMPTED}}
    used = {code for cells in rows(section("Faults")) for code in re.findall(r"\d+", cells[2])}
    assert used <= codes
