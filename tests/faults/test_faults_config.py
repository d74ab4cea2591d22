"""Whatever stands in a configuration: exit code 2, every problem in its line, and nothing written.

Both scripts, both launchers and every command that takes `--config`; folders that a process might write to
are empty before and after. CPU time is limited, far above what is needed.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import pytest
from support.launching import ACCELERATE_SCRIPT, ROOT, TORCHRUN_SCRIPT, environment, train
from support.measured import run_measured

from llm_pretrain.__main__ import COMMANDS
from llm_pretrain.__main__ import main as run_command

MEMORY_BYTES = 1 << 30
CPU_SECONDS = 120
"""Of one process: forty times what it takes, so that only a file without end is stopped by it."""


def limit_cpu_time() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))


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
    "deep.yaml": ("[" * 100_000, "deep.yaml: not a valid YAML file: RecursionError"),
    "wide.yaml": ("run: [" + "1," * 100_000 + "]", "wide.yaml:1: not a valid YAML file: more than 10000"),
    "binary.yaml": (bytes(range(256)), "binary.yaml: cannot be read: not UTF-8 text"),
    "upward.yaml": ("run: {name: ../../x}", "run.name: expected at most 128 letters"),
    "source.yaml": (
        "data: {sources: [{store: a, name: ../x}, {store: b, name: /x}]}",
        "data.sources[1].name: expected 1 to 64 letters",
    ),
}  # fmt: skip
CERTAIN = {"infinite", "upward", "source"}
"""Impossible values: said when every file could be read."""
SPECIAL = {
    "folder.yaml": "folder.yaml: cannot be read: Is a directory",
    "fifo.yaml": "fifo.yaml: cannot be read: no plain file",
    "giant.yaml": "giant.yaml: cannot be read: larger than 256 KiB",
    "/dev/zero": "/dev/zero: cannot be read: no plain file",
}


def write_wrong_files(folder: Path) -> dict[str, str]:
    """Path of every wrong file, and what its line must say."""
    expected = {}
    for name, (content, words) in WRONG_FILES.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        expected[str(folder / name)] = words
    (folder / "folder.yaml").mkdir()
    os.mkfifo(folder / "fifo.yaml")
    with (folder / "giant.yaml").open("wb") as file:
        file.truncate(1 << 30)
    return expected | {str(folder / name): words for name, words in SPECIAL.items()}


def tree(folder: Path) -> dict[str, str]:
    """Everything below a folder, with its size; what a launcher of torch keeps for itself left out."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if not re.match(r"tmp/(torchelastic_|pymp-|accelerate_)", name):
            found[name] = str(path.lstat().st_size) if not path.is_dir() else "folder"
    return found


def check(folder: Path, command: list[str], expected: list[tuple[str, ...]], *, exit_code: int = 2) -> None:
    """A process in empty folders: refused, each problem said once in its own line, nothing written."""
    for name in ("work", "home", "tmp"):
        (folder / name).mkdir()
    before = tree(folder)
    own = {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp")}
    kept = {key: value for key, value in environment().items() if not key.startswith(("XDG_", "HF_"))}
    with tempfile.TemporaryFile("w+") as output:
        refused = run_measured(
            command, cwd=folder / "work", env=kept | own, stdout=output, stderr=output,
            stdin=subprocess.DEVNULL, preexec_fn=limit_cpu_time,
        )  # fmt: skip
        output.seek(0)
        lines = output.read().splitlines()
    text = "\n".join(lines)
    assert refused.exit_code == exit_code, text[-3000:]
    assert refused.memory_bytes < MEMORY_BYTES
    assert tree(folder) == before
    for words in expected:  # the launcher's summary repeats them, indented
        own_lines = [line for line in lines if not line.startswith("  ")]
        found = [line for line in own_lines if all(word in line for word in words)]
        assert len(found) == 1, f"{words} in {len(found)} lines:\n{text[-6000:]}"
    for ours in ("llm_pretrain/", "train_pretrain"):
        assert f'File "{ROOT}/{ours}' not in text, "a traceback through our code"
    assert max(map(len, lines)) < 600


SCRIPTS = {"torchrun": TORCHRUN_SCRIPT, "accelerate": ACCELERATE_SCRIPT}


def path_of(name: str, wrong_files: dict[str, str]) -> str:
    (file,) = [file for file in wrong_files if Path(file).name == Path(name).name]
    return file


@pytest.fixture(scope="module")
def wrong_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_wrong_files(tmp_path_factory.mktemp("wrong"))


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_all_wrong_files_at_once(tmp_path: Path, wrong_files: dict[str, str], launcher: str):
    """Each is read and said, whatever the others are; what only follows from values is not certain then."""
    files = [word for file in wrong_files for word in ("--config", file)]
    said = [
        ("error: ", Path(file).name, words)
        for file, words in wrong_files.items()
        if Path(file).stem not in CERTAIN
    ]
    check(tmp_path, [sys.executable, str(SCRIPTS[launcher]), *files], said)


@pytest.mark.parametrize("name", [*WRONG_FILES, *SPECIAL])
def test_each_wrong_file(
    wrong_files: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
):
    """In this process, since each is seconds of imports otherwise."""
    file = path_of(name, wrong_files)
    monkeypatch.chdir(tmp_path)
    assert train("--config", file) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if wrong_files[file] in line]
    assert line.startswith("error: ")
    assert tree(tmp_path) == {}


COMMAND_LINES: dict[str, list[str]] = {
    "chaos": [],
    "doctor": [],
    "estimate": [],
    "ladder": ["--input", "nowhere", "--budget", "1h"],
    "parity": [],
    "simulate": ["--world-size", "2", "--gpu", "h100"],
    "prepare": ["--input", "stdlib", "--tokenizer", "nowhere", "--output", "store"],
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
    wrong_files: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    assert run_command([command, *COMMAND_LINES[command], option, path_of(name, wrong_files)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"llm-pretrain {command}: error: ")
    assert name in error
    assert "Traceback" not in error
    assert tree(tmp_path) == {}
