"""`llm-pretrain plan`: the configuration that it writes runs as it is; wrong budgets are named."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.corpora import make_store
from support.ladders import make_ladder

from llm_pretrain.__main__ import main
from llm_pretrain.config import load_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ladder on a store that exists, in one folder with the store."""
    root = tmp_path_factory.mktemp("plan")
    store = make_store(root / "store", documents=400).path
    ladder = make_ladder(root / "ladder")
    source = dataclasses.replace(ladder.base.data.sources[0], store=str(store))
    base = dataclasses.replace(ladder.base, data=dataclasses.replace(ladder.base.data, sources=[source]))
    dataclasses.replace(ladder, base=base).write_plan()
    return root


def plan(folder: Path, *options: str) -> int:
    files = ["--ladder", str(folder / "ladder"), "--output", str(folder / "night.yaml")]
    return main(["plan", *files, *options])


def test_flops_become_a_configuration(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert plan(folder, "--flops", "3e14", "--world-size", "2") == 0
    text = capsys.readouterr().out
    assert text.startswith("plan for 3e+14 FLOPs on 2 processes here, by 12 points of 4 sizes")
    assert "in nine of ten runs" in text
    assert text.count("\n* hidden") == 1
    config = load_config(["--config", str(folder / "night.yaml")], world_size=2)
    assert config.evaluation.prediction[-1].step == config.training.max_steps
    assert f"loss        {config.evaluation.prediction[-1].loss:.4f}" in text
    assert f"{config.training.max_steps:,} steps" in text


def test_money_becomes_a_configuration_for_gpus(folder: Path, capsys: pytest.CaptureFixture[str]):
    options = ["--cost", "1", "--gpu", "h100", "--world-size", "2", "--price", "2.5"]
    assert plan(folder, *options) == 0
    assert "plan for 12m00s, 1.00 on 2 x h100" in capsys.readouterr().out


def test_a_file_of_ours_is_replaced_and_no_other(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert plan(folder, "--flops", "1e14", "--world-size", "1") == 0
    assert plan(folder, "--flops", "2e14", "--world-size", "1") == 0
    other = folder / "mine.yaml"
    other.write_text("run: {name: mine}\n")
    assert main(["plan", "--ladder", str(folder / "ladder"), "--flops", "1e14", "--output", str(other)]) != 0
    assert str(other) in capsys.readouterr().err
    assert other.read_text() == "run: {name: mine}\n"


WRONG: dict[str, tuple[Sequence[str], str]] = {
    "no budget": ([], "expected one budget, --time, --flops or --cost, found none"),
    "two": (["--time", "1h", "--flops", "1e15"], "expected one budget, --time, --flops or --cost, found --t"),
    "money for nothing": (["--cost", "5"], "--cost: expected together with --gpu and --price"),
    "no GPU": (["--time", "1h", "--gpu", "abacus"], "--gpu: expected one of"),
    "no time": (["--time", "soon"], "--time: expected a time such as 20m"),
    "FLOPs as a time": (["--time", "1e18"], "--time: expected a time such as 20m or 8h, found '1e18'"),
    "too little": (["--flops", "1e6"], "expected a budget for"),
    "ranks": (["--flops", "1e14", "--world-size", "7"], "--world-size: expected a divisor of the ladder's"),
    "served": (["--flops", "1e14", "--serve-tokens", "-1"], "--serve-tokens: expected 0 or more, found -1"),
    "utilisation": (["--flops", "1e14", "--mfu", "2"], "--mfu: expected a share above 0"),
    "parameters": (["--flops", "1e14", "--max-parameters", "0"], "--max-parameters: expected more than 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_requests_take_one_line(folder: Path, name: str, capsys: pytest.CaptureFixture[str]):
    options, message = WRONG[name]
    assert plan(folder, *options) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_a_ladder_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "--ladder", str(tmp_path), "--flops", "1e14"]) == 2
    assert "expected a ladder's folder, with ladder.json, found none" in capsys.readouterr().err
