"""Damaged files of a run and of other programs: commands that read them succeed or say what is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fuzzing import fuzzed
from support.launching import ROOT, train_tiny
from support.mutating import damaged_bytes, damaged_json, damaged_lines, dumped, linked_copy, put

from llm_pretrain.__main__ import main
from llm_pretrain.config.yaml_text import read_yaml

ACCELERATE = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))


def command_or_refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A command that warns, succeeds, or says what is wrong in lines of its own."""
    capsys.readouterr()
    code = main(arguments)
    error = capsys.readouterr().err
    assert code in (0, 1, 2, 65, 74, 78), error
    assert "Traceback" not in error
    assert bool(error) == (code > 1) or arguments[0] == "verify"  # which prints what it found
    assert all(line.startswith(f"llm-pretrain {arguments[0]}: ") for line in error.splitlines()), error


@pytest.mark.fuzz
def test_a_launch_file_of_accelerate_is_looked_through_or_refused(tmp_path, capsys):
    trees = [read_yaml(file.read_text()) for file in ACCELERATE]
    config = str(ROOT / "configs" / "tiny-dense.yaml")
    contents = st.sampled_from(trees).flatmap(damaged_json).map(dumped)
    contents |= st.sampled_from([file.read_bytes() for file in ACCELERATE]).flatmap(damaged_bytes)

    @given(content=contents)
    @fuzzed(8)
    def check(content: bytes) -> None:
        (tmp_path / "theirs.yaml").write_bytes(content)
        command_or_refusal(
            ["doctor", "--config", config, "--accelerate_config", str(tmp_path / "theirs.yaml")], capsys
        )

    check()


FILES = ("metrics.jsonl", "attempts.jsonl", "samples.jsonl", "status.json", "config.yaml")
FILES += ("weights/best/best.json",)
OPTIONS = (
    *("--training.max_steps", "4", "--schedule.warmup_steps", "0", "--checkpoint.save_steps", "2"),
    *("--evaluation.eval_steps", "2", "--evaluation.max_batches", "1", "--logging.logging_steps", "1"),
    *("--evaluation.sample_prompts", "[a]", "--evaluation.sample_tokens", "2", "--model.hidden_size", "32"),
)


@pytest.fixture(scope="module")
def run(plain_store, tmp_path_factory) -> Path:
    """A run with every file that a run can have."""
    folder = train_tiny(plain_store, tmp_path_factory.mktemp("fuzzed") / "run", *OPTIONS).folder
    assert all((folder / name).is_file() for name in FILES)
    return folder


def damaged(run: Path, name: str) -> st.SearchStrategy[bytes]:
    content = (run / name).read_bytes()
    if name.endswith(".jsonl"):
        return damaged_lines(content)
    if name.endswith(".json"):
        return damaged_json(json.loads(content)).map(dumped) | damaged_bytes(content)
    return damaged_bytes(content)


COMMANDS = {
    "report": lambda run: ["report", str(run)],
    "top": lambda run: ["top", "--once", str(run)],
    "verify": lambda run: ["verify", str(run), "--samples", "1"],
}


@pytest.mark.fuzz
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "command", ["top", *(pytest.param(name, marks=pytest.mark.slow) for name in ("report", "verify"))]
)
def test_a_command_reads_or_refuses(command, name, run, tmp_path, capsys):
    copy = linked_copy(run, tmp_path / "run")

    @given(content=damaged(run, name))
    @fuzzed({"report": 3, "top": 12, "verify": 2}[command], per_cent=100 if command == "top" else 10)
    def check(content: bytes) -> None:
        put(copy / name, content)
        command_or_refusal(COMMANDS[command](copy), capsys)

    check()


@pytest.mark.slow
@pytest.mark.fuzz
@pytest.mark.parametrize("name", FILES)
def test_a_run_resumes(name, run, plain_store, tmp_path):
    """Checkpoints alone decide where a run resumes, not its rows or its status."""

    @given(content=damaged(run, name))
    @fuzzed(1, per_cent=2)
    def check(content: bytes) -> None:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(run, tmp_path / "run")
        put(tmp_path / "run" / name, content)
        more = ("--training.max_steps", "5", "--logging.report", "true")
        train_tiny(plain_store, tmp_path / "run", *OPTIONS, *more)
        status: dict[str, Any] = json.loads((tmp_path / "run" / "status.json").read_text())
        assert (status["state"], status["step"]) == ("finished", 5)

    check()
