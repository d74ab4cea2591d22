"""`parity` rejects what cannot work before it starts anything."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from support.launching import ROOT

from llm_pretrain.__main__ import main
from llm_pretrain.commands import _launching, parity
from llm_pretrain.commands._launching import (
    Machine,
)
from llm_pretrain.commands._parity_plan import (
    Interruption,
    choose_save_steps,
    make_plan,
    parse_interruptions,
)
from llm_pretrain.errors import ConfigError

TINY = str(ROOT / "configs" / "tiny-dense.yaml")


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("something was launched")

    monkeypatch.setattr(_launching.subprocess, "Popen", started)
    monkeypatch.setattr(parity, "this_machine", lambda: Machine(gpus=0, cores=2))


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["--paths", "torchrun,slurm"], 2, "--paths: expected some of torchrun, accelerate, t"),
        (["--paths", "trainer"], 2, "--paths: expected torchrun or accelerate among them"),
        (["--steps", "0"], 2, "--steps: expected 1 or more, found 0"),
        (["--world-size", "0"], 2, "--world-size: expected whole numbers from 1 on"),
        (["--world_size", "1,x"], 2, "found 'x'"),
        (["--world-size", "64"], 2, "--world-size: expected at most 2, the cores of this machine, found 64"),
        (["--accumulation", "5"], 2, "training.global_batch_size 24, found 1 * 5 = 5"),
        (["--precision", "fp8"], 2, "--precision: expected some of fp32, bf16, fp16, found 'fp8'"),
        (["--training.micro_batch_size", "5"], 2, "training.global_batch_size"),
        (["--training.micro_batch_size", "24"], 2, "found 2 * 24 = 48; 2, 3, 4, 6 or 12 would"),
        (["--training.max_steps", "0"], 2, "training.max_steps: expected more than 0"),
        (["--scripts", "/nowhere"], 2, "--scripts /nowhere: expected train_pretrain.py, train_pretr"),
        (["--paths", "torchrun", "--world-size", "1"], 2, "expected two or more runs of one precision"),
        (["--paths", "torchrun", "--world-size", "1", "--precision", "fp32,bf16"], 2, "to compare, found"),
        (["--world-size", "1", "--precision", "fp16"], 2, "silently train in fp32"),
        (["--timeout", "0"], 2, "--timeout: expected more than 0 seconds"),
        (["--data.sources", "[{store: /nowhere}]"], 65, "/nowhere"),
        (["--interrupt", "torchrun@2"], 2, "--interrupt: expected PATH@PROCESSES:STEP"),
        (["--interrupt", "trainer@1:5"], 2, "--interrupt: expected PATH@PROCESSES:STEP"),
        (["--interrupt", "torchrun@1:9,torchrun@1:5"], 2, "expected ascending steps from 2 on"),
        (["--interrupt", "torchrun@2:5", "--world-size", "1", "--accumulation", "1"], 2, "found 2 * 24 = 48"),
        (["--interrupt", "torchrun@6:5"], 2, "expected at most 2, the cores"),
        (["--interrupt", "torchrun@1:17", "--steps", "17"], 2, "--steps: expected more than 17"),
        (["--interrupt", "accelerate@1:5", "--precision", "fp16"], 2, "silently train in fp32"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_line_before_anything_is_launched(
    words: list[str],
    code: int,
    expected: str,
    plain_store: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    output = tmp_path / "output"
    sources = ["--data.sources", f"[{{store: {plain_store}}}]"]
    assert main(["parity", "--config", TINY, "--output", str(output), *sources, *words]) == code
    printed = capsys.readouterr()
    assert expected in printed.err
    assert len(printed.err.strip().splitlines()) == (2 if words == ["--accumulation", "5"] else 1)
    assert "Traceback" not in printed.err
    assert not output.exists()


@pytest.mark.usefixtures("nothing_starts")
def test_the_trainer_path_s_script_may_be_missing(
    plain_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for name in ("train_pretrain.py", "train_pretrain_accelerate.py"):
        (tmp_path / name).touch()
    words = ["--paths", "torchrun,trainer", "--scripts", str(tmp_path), "--output", str(tmp_path / "out")]
    sources = ["--data.sources", f"[{{store: {plain_store}}}]"]
    assert main(["parity", "--config", TINY, *sources, *words]) == 2
    assert "expected examples/train_pretrain_trainer.py there, found none" in capsys.readouterr().err


def test_a_rollback_is_compared_as_a_skip(plain_store: Path, tmp_path: Path):
    """The compared runs save nothing, so that there is no checkpoint to go back to."""
    parser = argparse.ArgumentParser()
    parity.add_arguments(parser)
    words = ["--data.sources", f"[{{store: {plain_store}}}]", "--output", str(tmp_path / "out")]
    arguments = parser.parse_args(["--config", TINY, *words, "--training.spike_action", "rollback"])
    plan = make_plan(arguments, Machine(0, 2))
    assert (plan.config.training.spike_action, plan.config.checkpoint.save_steps) == ("skip", 0)


def test_interruptions_are_read_and_come_after_a_checkpoint():
    first, second = parse_interruptions("torchrun@2:17, accelerate@1:31")
    assert (first.path, first.world_size, first.step) == ("torchrun", 2, 17)
    assert (second.path, second.world_size, second.step) == ("accelerate", 1, 31)
    at_17, at_2 = [first, second], [Interruption("torchrun", 1, 2)]
    assert [choose_save_steps(configured, at_17) for configured in (10, 500, 0, 17)] == [10, 5, 5, 5]
    assert choose_save_steps(500, at_2) == 1
    with pytest.raises(ConfigError, match="from 2 on"):
        parse_interruptions("torchrun@1:1")
