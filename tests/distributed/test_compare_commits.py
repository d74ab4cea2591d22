"""What `tests/compare_commits.py` takes for a difference of two runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import compare_commits
import pytest
import torch
from compare_commits import compare_runs, same_tensor
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.finished_runs import FinishedRun

MIDWAY, STEPS = 2, 4


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MIDWAY", MIDWAY), ("STEPS", STEPS)):
        monkeypatch.setattr(compare_commits, name, value)


@pytest.fixture
def run(finished_run: Callable[[str], FinishedRun]) -> Path:
    return finished_run("mixture").folder


def change_row(run: Path, step: int = 1) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    row = next(each for each in lines if each["step"] == step)
    row["train/grad_norm"] *= 1 + 2**-50
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def change_tensor(run: Path) -> None:
    """A number of the last checkpoint becomes the next larger one."""
    file = next((run / "checkpoints" / f"step-{STEPS:08d}").glob("*.safetensors"))
    with safe_open(file, "pt") as content:
        metadata = content.metadata()
    tensors = load_file(file)
    name = next(name for name, tensor in sorted(tensors.items()) if tensor.is_floating_point())
    tensors[name].view(-1)[0] = tensors[name].view(-1)[0].nextafter(torch.tensor(9.0))
    save_file(tensors, file, metadata)


def change_weights(run: Path) -> None:
    file = run / "weights" / "best" / "config.json"
    file.write_text(file.read_text() + "\n")


def change_time(run: Path) -> None:
    text = (run / "metrics.jsonl").read_text()
    assert '"perf/step_seconds": ' in text
    (run / "metrics.jsonl").write_text(text.replace('"perf/step_seconds": ', '"perf/step_seconds": 1'))


def cut_rows(run: Path) -> None:
    """As if the run had not trained its first steps, or had continued."""
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["step"] > MIDWAY]
    (run / "metrics.jsonl").write_text("".join(kept))


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (change_time, ""),
        (change_row, "step 1 train/grad_norm: "),
        (change_tensor, f"step {STEPS}: the checkpoint's tensor "),
        (change_weights, "weights/best/config.json: "),
        (cut_rows, "step 0: a row is missing"),
    ],
)
def test_the_first_difference_is_named(
    run: Path, tmp_path: Path, change: Callable[[Path], None], difference: str
):
    other = shutil.copytree(run, tmp_path / "other")
    change(other)
    found = compare_runs(run, other)
    assert found is None if not difference else (found or "").startswith(difference)


def test_signs_of_zeros_are_bits():
    assert same_tensor(torch.tensor([0.0, torch.nan]), torch.tensor([0.0, torch.nan]))
    assert not same_tensor(torch.tensor([0.0]), torch.tensor([-0.0]))
