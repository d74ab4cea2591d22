"""What the documents show exists: commands and options, files, links; and both READMEs show the same."""

from __future__ import annotations

import argparse
import re
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote

import pytest
from support.documents import DOCUMENTS, READMES, ROOT, blocks, commands

from llm_pretrain.__main__ import COMMANDS
from llm_pretrain.config import load_config

OTHERS = {"make", "source", "llm-pretrain", "torchrun", "accelerate", "python", "pip", "wandb"}
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
                load_config(arguments[words.index(script) + 1 :])


def parse(command: str, arguments: list[str]) -> None:
    module = import_module(f"llm_pretrain.commands.{command}")
    parser = argparse.ArgumentParser(exit_on_error=False)
    module.add_arguments(parser)
    parser.parse_args(arguments)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_example_of_a_command_has_its_options(command: str):
    module = import_module(f"llm_pretrain.commands.{command}")
    parser = argparse.ArgumentParser(exit_on_error=False)
    module.add_arguments(parser)
    shown = parser.format_help().replace("\\\n", " ")
    examples = re.findall(rf"^  llm-pretrain {command}\b(.*)$", shown, re.MULTILINE)
    assert examples, "a command's help ends in examples"
    import shlex

    for example in examples:
        parse(command, shlex.split(example, comments=True))


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


def test_both_readmes_show_the_same():
    english, chinese = (blocks(readme) for readme in READMES)
    assert english == chinese
    code = [re.findall(r"^```python\n(.*?)^```$", r.read_text(), re.M | re.S) for r in READMES]
    assert code[0] == code[1]
    headings = [len(re.findall(r"^#+ ", readme.read_text(), re.MULTILINE)) for readme in READMES]
    assert headings[0] == headings[1]
