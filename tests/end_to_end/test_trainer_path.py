"""transformers' Trainer, from our weights on our samples, trains what we train; where not, by how much.

The same 32 sequences a step on every layout. The bound is what fp32 leaves: docs/trainer.md has the
measurements, and how far our own runs are apart when their weights start one rounding apart.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support.finished_runs import FinishedRun
from support.launching import ROOT, environment, train

from benchmarks.trainer_witness import (
    CELLS,
    differences,
    load_script,
    options,
    relative,
    run,
)
from llm_pretrain.config.loading import load_config
from llm_pretrain.optim.schedule import learning_rate

SCRIPT = "examples/train_pretrain_trainer.py"
BOUND = 1e-5
"""Relative, over all steps, for losses and gradient norms; some 2e-7 is what is measured."""
DENSE = ("--schedule.warmup_steps", "0")
"""Trainer's own cosine; the mixture of experts warms up, for which it has no schedule like ours."""
NO_BALANCE = ("--model.router_aux_loss_coef", "0")


@pytest.fixture(autouse=True)
def libraries_may_warn() -> Iterator[None]:
    """What transformers and accelerate say of themselves is not ours to mend."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        yield


@pytest.fixture(scope="module")
def script() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        return load_script()


def ours(folder: Path, *arguments: str) -> Path:
    """A run by train_pretrain.py on one process, in this one."""
    assert train(*arguments, "--training.micro_batch_size", "8", "--run.output_dir", str(folder)) == 0
    return folder


def theirs(script: ModuleType, folder: Path, *arguments: str) -> Path:
    """The same by Trainer."""
    assert script.main([*arguments, "--run.output_dir", str(folder)]) == 0
    return folder


def assert_same_training(left: Path, right: Path) -> None:
    """The same samples, rates and tokens; losses and gradient norms but for rounding."""
    found = differences(left, right)
    assert found["data/batch_sha256"] == found["train/loss_tokens"] == 0, found
    assert found["train/learning_rate"] < 1e-12, found
    assert found["train/loss"] < BOUND, found
    assert found["train/grad_norm"] < BOUND, found


@pytest.fixture(scope="module")
def dense(masked_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our run of the dense model on ragged masks, one process."""
    folder = tmp_path_factory.mktemp("trainer") / "dense"
    return ours(folder, *options("tiny-dense.yaml", masked_store, *DENSE))


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("processes", [1, 2])
def test_trainer_trains_what_we_train(
    dense: Path, masked_store: Path, script: ModuleType, tmp_path: Path, processes: int, steps: int
):
    size = ("--training.micro_batch_size", str(CELLS[processes, steps]))
    arguments = [*options("tiny-dense.yaml", masked_store, *DENSE, *size)]
    folder = tmp_path / "run"
    if processes == 1:
        theirs(script, folder, *arguments)
    else:
        words = [*arguments, "--run.output_dir", str(folder)]
        run(ROOT / SCRIPT, processes, words, variables=environment())
    assert_same_training(dense, folder)
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["launcher"]) == ("finished", 0, "trainer")
    assert status["world_size"] == processes


@pytest.mark.slow
def test_experts_without_balance_loss(masked_store: Path, script: ModuleType, tmp_path: Path):
    chosen = options("tiny-moe.yaml", masked_store, *NO_BALANCE, "--training.max_steps", "20")
    left = ours(tmp_path / "ours", *chosen)
    size = ("--training.micro_batch_size", str(CELLS[1, 4]))
    assert_same_training(left, theirs(script, tmp_path / "theirs", *chosen, *size))


@pytest.mark.parametrize(
    ("name", "lowest"),
    [("cosine", 0.0), ("cosine", 1e-4), ("linear", 1e-4), ("constant", 0.0), ("wsd", 1e-4)],
)
def test_its_own_schedules_are_ours(script: ModuleType, name: str, lowest: float):
    from transformers import get_scheduler

    config = load_config(
        [
            *("--schedule.name", name, "--schedule.min_learning_rate", str(lowest)),
            *("--training.max_steps", "30", "--data.sources", "[{store: nowhere}]"),
        ]
    )
    kind, arguments = script.own_schedule(config)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=config.optimizer.learning_rate)
    scheduler = get_scheduler(kind, optimizer, 0, 30, arguments)
    for step in range(30):
        rate = learning_rate(config, step)
        assert relative(rate, float(scheduler.get_last_lr()[0])) < 1e-12, step
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize(
    "changes",
    [
        ("--schedule.warmup_steps", "2"),
        ("--schedule.decay_steps", "9"),
        ("--schedule.name", "linear", "--schedule.decay_steps", "9"),
    ],
)
def test_a_schedule_that_it_lacks_is_ours(script: ModuleType, changes: tuple[str, ...]):
    config = load_config(["--data.sources", "[{store: nowhere}]", "--training.max_steps", "30", *changes])
    assert script.own_schedule(config) is None


REFUSED = {
    "distributed.strategy": ("tiny-dense.yaml", "fsdp"),
    "model.attention_dropout": ("tiny-dense.yaml", "0.1"),
    "training.precision": ("tiny-dense.yaml", "fp16"),
    "optimizer.name": ("tiny-dense.yaml", "muon"),
    "optimizer.ema_decay": ("tiny-dense.yaml", "0.9"),
    "model.n_shared_experts": ("tiny-moe.yaml", "1"),
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_it_cannot_follow_is_one_line(
    script: ModuleType,
    plain_store: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    field: str,
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    preset, value = REFUSED[field]
    chosen = options(preset, plain_store, f"--{field}", value, "--run.output_dir", str(tmp_path / "run"))
    with pytest.raises(SystemExit) as exit_:
        script.main(chosen)
    assert exit_.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert field in lines[0]
    assert not (tmp_path / "run").exists()


def test_a_folder_with_a_run_is_left_alone(
    script: ModuleType, finished_run: Callable[[str], FinishedRun], capsys: pytest.CaptureFixture[str]
):
    finished = finished_run("dense")
    before = (finished.folder / "metrics.jsonl").read_bytes()
    with pytest.raises(SystemExit) as exit_:
        script.main([*finished.options, "--run.output_dir", str(finished.folder)])
    assert exit_.value.code == 73
    assert "new run folder" in capsys.readouterr().err
    assert (finished.folder / "metrics.jsonl").read_bytes() == before
