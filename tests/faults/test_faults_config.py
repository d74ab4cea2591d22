"""Whatever stands in a configuration: exit code 2, every problem in its line, and nothing written."""

from __future__ import annotations

import argparse
import os
from importlib import import_module
from pathlib import Path

import pytest
from support.launching import train

from llm_pretrain.__main__ import COMMANDS
from llm_pretrain.__main__ import main as run_command

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
"""Nine to the ninth values, in nine lines."""
MERGE_BOMB = "a: &a {k: 1}\n" + "".join(
    f"{name}: &{name} {{!!merge <<: [{', '.join([f'*{before}'] * 9)}]}}\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)

WRONG_FILES: dict[str, tuple[str | bytes, str]] = {
    "typo.yaml": ("training: {max_step: 5}", "training.max_step: no such setting; did you mean"),
    "digits.yaml": (f"run: {{seed: {'9' * 5000}}}", "digits.yaml: not a valid YAML file: ValueError: "),
    "infinite.yaml": ("optimizer: {learning_rate: 1e999}", "optimizer.learning_rate: expected a finite"),
    "system.yaml": ("run: !!python/object/apply:os.system [touch PWNED]", "could not determine a constr"),
    "bomb.yaml": (BOMB, "bomb.yaml:2: not a valid YAML file: an alias"),
    "merge.yaml": (MERGE_BOMB, "merge.yaml:2: not a valid YAML file: an alias"),
    "itself.yaml": ("run: &r {name: *r}", "itself.yaml:1: not a valid YAML file: an alias"),
    "deep.yaml": ("[" * 20_000, "deep.yaml: not a valid YAML file: RecursionError"),
    "binary.yaml": (bytes(range(256)), "binary.yaml: cannot be read: not UTF-8 text"),
    "upward.yaml": ("run: {name: ../../x}", "run.name: expected at most 128 letters"),
    "source.yaml": (
        "data: {sources: [{store: a, name: ../x}, {store: b, name: /x}]}",
        "data.sources[1].name: expected 1 to 64 letters",
    ),
}  # fmt: skip
SPECIAL = {
    "folder.yaml": "folder.yaml: cannot be read: Is a directory",
    "fifo.yaml": "fifo.yaml: cannot be read: no plain file",
    "giant.yaml": "giant.yaml: cannot be read: larger than 256 KiB",
    "/dev/zero": "/dev/zero: cannot be read: no plain file",
}


@pytest.fixture(scope="module")
def wrong_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wrong")
    for name, (content, _) in WRONG_FILES.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (folder / "folder.yaml").mkdir()
    os.mkfifo(folder / "fifo.yaml")
    with (folder / "giant.yaml").open("wb") as file:
        file.truncate(1 << 30)
    return folder


SAID = {name: words for name, (_, words) in WRONG_FILES.items()} | SPECIAL


@pytest.mark.parametrize("name", SAID)
def test_each_wrong_file(
    wrong_files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
):
    monkeypatch.chdir(tmp_path)
    assert train("--config", str(wrong_files / name)) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if SAID[name] in line]
    assert line.startswith("error: ")
    assert list(tmp_path.iterdir()) == []


COMMAND_LINES: dict[str, list[str]] = {
    "chaos": [],
    "doctor": [],
    "estimate": [],
    "ladder": ["--input", "nowhere", "--budget", "1h"],
    "parity": [],
    "simulate": ["--world-size", "2", "--gpu", "h100"],
}
"""What each command needs beside `--config`."""


def commands_with_config() -> list[str]:
    """Every command that takes `--config`."""
    found = []
    for name in COMMANDS:
        parser = argparse.ArgumentParser()
        import_module(f"llm_pretrain.commands.{name}").add_arguments(parser)
        if "--config" in parser._option_string_actions:
            found.append(name)
    return found


REFUSED = [
    *((command, "--config", "typo.yaml") for command in commands_with_config()),
    *(("doctor", "--accelerate_config", name) for name in ("bomb.yaml", "fifo.yaml", "giant.yaml")),
]


@pytest.mark.parametrize(("command", "option", "name"), REFUSED)
def test_a_command_refuses_a_wrong_file(
    command: str,
    option: str,
    name: str,
    wrong_files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    assert run_command([command, *COMMAND_LINES[command], option, str(wrong_files / name)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"llm-pretrain {command}: error: ")
    assert name in error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []
