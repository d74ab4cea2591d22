"""What documents name exists: commands, options, files, links, make targets; both READMEs show the same."""

from __future__ import annotations

import argparse
import ast
import re
import textwrap
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

import pytest
from support.documents import DOCUMENTS, PAGES, READMES, ROOT, blocks, commands

from llm_pretrain.__main__ import COMMANDS
from llm_pretrain.config.loading import load_config, to_dict
from llm_pretrain.config.tree import Config

FILE = re.compile(r"`([\w.*-]+(?:/[\w.*-]+)+\.(?:py|md|yaml|yml|toml|ipynb|sh|sbatch))(?:::\w+)?`")
FOLDER = re.compile(r"`((?:llm_pretrain|tests|configs|examples|benchmarks)/[\w/-]*)`")
"""Paths in backticks, of the repository or, without its name, of the package."""

OTHERS = {"make", "source", "llm-pretrain", "torchrun", "accelerate", "python", "pip", "wandb", "lm_eval"}
"""First words of the other commands that documents show."""


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_command_has_the_options_it_is_shown_with(document: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for words in commands(document):
        assert words[0] in OTHERS, words
        if words[0] == "llm-pretrain":
            assert words[1] in COMMANDS, words
            if "--help" not in words:
                parse(words[1], words[2:])
        for script in ("train_pretrain.py", "train_pretrain_accelerate.py"):
            if script in words:
                arguments = [word if word != "FILE" else "configs/tiny-dense.yaml" for word in words]
                size = dict(pairwise(words)).get("--nproc_per_node", "2")
                processes = int(size) if size.isdecimal() else 2
                load_config(arguments[words.index(script) + 1 :], world_size=processes)


def parse(command: str, arguments: list[str]) -> None:
    module = import_module(f"llm_pretrain.commands.{command}")
    parser = argparse.ArgumentParser(exit_on_error=False)
    module.add_arguments(parser)
    if parser.get_default("script_options") is None:
        parser.parse_args(arguments)
        return
    _, others = parser.parse_known_args(arguments)  # of a command that hands settings on to a script
    tree = to_dict(Config())
    for section, _, field in (name[2:].partition(".") for name in others if re.match(r"--\w+\.", name)):
        assert field in tree[section]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_example_of_a_command_has_its_options(command: str):
    module = import_module(f"llm_pretrain.commands.{command}")
    shown = module.EXAMPLES.replace("\\\n", " ")
    examples = re.findall(rf"^  llm-pretrain {command}\b(.*)$", shown, re.MULTILINE)
    assert examples, "a command's help ends in examples"
    import shlex

    for example in examples:
        parse(command, shlex.split(example, comments=True))


def test_every_command_is_documented():
    table = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert set(COMMANDS) <= set(re.findall(r"^\| `(\w+)", table, re.MULTILINE))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_link_and_picture_leads_somewhere(document: Path):
    text = document.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r'src="([^"]+)"', text)
    for target in targets:
        path, _, anchor = unquote(target).partition("#")
        if "://" in path:
            continue
        file = (document.parent / path) if path else document
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, target


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_file_that_is_named_exists(document: Path):
    text = document.read_text(encoding="utf-8")
    missing = [
        path
        for path in FILE.findall(text) + FOLDER.findall(text)
        if not any(any(root.glob(path.rstrip("/"))) for root in (ROOT, ROOT / "llm_pretrain"))
        and not path.startswith(("data/stores/", "data/tokenizers/", "runs/"))
        and "NAME" not in path
    ]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_setting_that_is_named_exists(document: Path):
    tree = to_dict(Config())
    named = re.findall(rf"[`-]({'|'.join(tree)})\.(\w+)(?=[` :=])", document.read_text(encoding="utf-8"))
    unknown = {f"{section}.{field}" for section, field in named if field not in tree[section]}
    assert not unknown


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_make_target_exists(document: Path):
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = document.read_text(encoding="utf-8")
    named = re.findall(r"`make ([a-z][a-z-]*)", text) + re.findall(
        r"^make ([a-z][a-z-]*)", text, re.MULTILINE
    )
    assert set(named) <= targets


def test_every_page_is_in_the_index_and_on_the_site():
    pages = {page.name for page in PAGES}
    site = re.findall(r"^ +- (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted({*site, "index.md"}) == sorted(pages)
    assert len(set(site)) == len(site)
    linked = set(re.findall(r"\]\((\w+\.md)\)", (ROOT / "docs" / "index.md").read_text()))
    assert linked == pages - {"index.md"}


def test_the_readme_shows_a_step_of_both_scripts():
    shown = re.findall(
        r"^```python\n(.*?)^```$", READMES[0].read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    for script, code in zip(("train_pretrain.py", "train_pretrain_accelerate.py"), shown, strict=True):
        lines = (ROOT / script).read_text(encoding="utf-8").splitlines()
        methods = [
            textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            for node in ast.walk(ast.parse("\n".join(lines)))
            if isinstance(node, ast.FunctionDef) and node.name in ("train_step", "backward")
        ]
        assert code == "\n\n\n".join(methods) + "\n"


def test_side_by_side_quotes_both_scripts():
    scripts = [
        "".join((ROOT / name).read_text(encoding="utf-8").split())
        for name in ("train_pretrain.py", "train_pretrain_accelerate.py")
    ]
    page = (ROOT / "docs" / "side_by_side.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.*) \| (.*) ?\|$", page, re.MULTILINE)
    assert len(rows) > 30
    for cells in rows:
        for cell, script in zip(cells, scripts, strict=True):
            for code in re.findall(r"`([^`]+)`", cell):
                assert "".join(code.split()).removesuffix("…") in script, code


def test_the_readme_is_short():
    assert len(READMES[0].read_text(encoding="utf-8").split()) <= 800


def test_both_readmes_show_the_same():
    english, chinese = (blocks(readme) for readme in READMES)
    assert english == chinese
    code = [re.findall(r"^```python\n(.*?)^```$", r.read_text(), re.M | re.S) for r in READMES]
    assert code[0] == code[1]
    headings = [len(re.findall(r"^#+ ", readme.read_text(), re.MULTILINE)) for readme in READMES]
    assert headings[0] == headings[1]
