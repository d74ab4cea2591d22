"""The loop in one process: what a run leaves behind, what it skips, how it stops."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.finished_runs import FinishedRun
from support.launching import Finished, run_options, train
from torch import Tensor

import train_pretrain
from llm_pretrain.export.huggingface import load_pretrained
from llm_pretrain.hardware import usable_cores
from llm_pretrain.model.decoder import Decoder, DecoderOutput
from llm_pretrain.training import machine
from llm_pretrain.training.step import Step


def options(store: Path, folder: Path, *more: str) -> list[str]:
    return run_options(
        "tiny-moe",
        store,
        "model.hidden_size=32 training.sequence_length=32 training.max_steps=6 "
        "schedule.warmup_steps=2 evaluation.eval_steps=3 checkpoint.save_steps=2 "
        "training.global_batch_size=8 evaluation.max_batches=1",
        *more,
        folder=folder,
    )


def test_a_run_leaves_its_folder_as_documented(plain_store: Path, tmp_path: Path):
    folder = tmp_path / "run"
    assert train(*options(plain_store, folder)) == 0
    run = Finished(0, "", folder)
    assert sorted(run.rows) == [0, 1, 2, 3, 4, 5, 6]
    assert {step for step, row in run.rows.items() if "eval/loss" in row} == {0, 3, 6}
    documented = {
        "step", "train/loss", "train/aux_loss", "train/z_loss", "train/router_z_loss", "train/grad_norm",
        "train/learning_rate", "train/loss_tokens", "train/tokens", "train/loss_scale", "train/skipped",
        "data/batch_sha256", "perf/tokens_per_second", "perf/step_seconds", "perf/mfu", "perf/memory_bytes",
        "eval/loss", "eval/perplexity", "eval/bits_per_byte",
    }  # fmt: skip
    assert documented <= {key for row in run.rows.values() for key in row}
    steps = [run.rows[step] for step in range(1, 7)]
    assert [row["train/tokens"] for row in steps] == [*accumulate(row["train/loss_tokens"] for row in steps)]
    times = [row["time"] for row in run.rows.values()]
    assert times == sorted(times)
    assert run.attempts[0]["time"] <= times[0] <= time.time()
    assert run.status["state"] == "finished"
    assert run.status["exit_code"] == 0
    assert (run.status["step"], run.status["loss"]) == (6, run.rows[6]["train/loss"])
    assert run.status["pid"] == os.getpid()
    assert Path(run.status["checkpoint"]).name == "step-00000006"
    weights = ["best", "step-00000004", "step-00000006"]
    assert sorted(path.name for path in (folder / "weights").iterdir()) == weights
    assert train("--config", str(folder / "config.yaml")) == 0, "config.yaml can be passed back"
    assert run.raw_steps() == [0, 1, 2, 3, 4, 5, 6], "a finished run is left as it is"
    assert Finished(0, "", folder).status["loss"] == run.rows[6]["train/loss"]
    first, second = run.attempts
    assert (first["step"], second["step"]) == (0, 6)
    for attempt in run.attempts:
        assert (attempt["launcher"], attempt["world_size"]) == ("torchrun", 1)
        assert attempt["versions"]["torch"] == torch.__version__
        assert attempt["zlib_bits_per_byte"] > 0


def go_on(run: FinishedRun, *more: str) -> int:
    return train(*run.options, "--run.output_dir", str(run.folder), *more)


def test_a_start_says_what_the_machine_lacks(plain_store, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(machine, "multiplies_in_bf16", lambda: False)
    more = "--training.precision bf16 --training.max_steps 1 --schedule.warmup_steps 0 --data.num_workers 300"
    assert train(*options(plain_store, tmp_path / "run", *more.split())) == 0
    lines = capsys.readouterr().err.splitlines()
    assert any("bf16 is emulated here, where a matrix product takes " in line for line in lines)
    (line,) = [line for line in lines if "data.num_workers: 300 are more than a process's share" in line]
    assert line.endswith(f"it starts {usable_cores()}")


def test_a_batch_without_loss_tokens_is_skipped_without_a_forward_pass(
    plain_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    begin = Step.begin

    def without_loss_tokens(micro_batches, *others):
        if micro_batches[0].step == 2:
            micro_batches = [replace(batch, num_loss_tokens=0) for batch in micro_batches]
        return begin(micro_batches, *others)

    monkeypatch.setattr(Step, "begin", without_loss_tokens)
    forwards: list[int] = []
    forward = train_pretrain.TorchrunEngine.forward
    monkeypatch.setattr(
        train_pretrain.TorchrunEngine,
        "forward",
        lambda self, batch: forwards.append(batch.step) or forward(self, batch),
    )
    folder = tmp_path / "run"
    assert train(*options(plain_store, folder, "--evaluation.eval_steps", "0")) == 0
    row = Finished(0, "", folder).rows[3]
    assert row["train/skipped"] == "no_loss_tokens"
    assert row["train/loss"] is None
    assert row["train/loss_tokens"] == 0
    assert 2 not in forwards
    assert {0, 1, 3, 4, 5} <= set(forwards)


def poison(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """Make the loss of some steps infinite."""
    step_of_engine = train_pretrain.TorchrunEngine.forward

    def forward(self, batch) -> DecoderOutput:
        output = step_of_engine(self, batch)
        if batch.step in steps and torch.is_grad_enabled():
            return output._replace(loss_sum=output.loss_sum * float("inf"))
        return output

    monkeypatch.setattr(train_pretrain.TorchrunEngine, "forward", forward)


def test_a_gradient_that_is_not_finite_moves_nothing(
    plain_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    before: dict[int, list[Tensor]] = {}
    steps = train_pretrain.TorchrunEngine.train_step

    def train_step(self, taken):
        step = taken.micro_batches[0].step
        state = [p.detach().clone() for p in self.unwrapped_model.parameters()]
        moments = [value.clone() for each in self.optimizer.state.values() for value in each.values()]
        before[step] = [*state, *moments, *(b.clone() for b in self.unwrapped_model.buffers())]
        steps(self, taken)

    monkeypatch.setattr(train_pretrain.TorchrunEngine, "train_step", train_step)
    poison(monkeypatch, {3})
    folder = tmp_path / "run"
    assert train(*options(plain_store, folder, "--model.router_bias_update_rate", "1e-3")) == 0
    rows = Finished(0, "", folder).rows
    assert [rows[step]["train/skipped"] for step in range(1, 7)] == [None] * 3 + ["nonfinite_gradient"] + [
        None
    ] * 2
    assert rows[4]["train/loss"] is None
    assert rows[4]["train/grad_norm"] is None
    assert rows[4]["data/batch_sha256"] != rows[5]["data/batch_sha256"]
    assert all(torch.equal(a, b) for a, b in zip(before[3], before[4], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(before[4], before[5], strict=True))
    assert "NaN" not in (folder / "metrics.jsonl").read_text()
    assert "Infinity" not in (folder / "metrics.jsonl").read_text()


def test_the_model_is_given_back_unwrapped(finished_run: Callable[[str], FinishedRun]):
    weights = finished_run("mixture").folder / "weights" / "step-00000004"
    tensors = load_file(weights / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert not any(name.startswith(("module.", "_orig_mod.")) for name in tensors)
    assert isinstance(load_pretrained(weights), Decoder)


def test_a_changed_setting_is_reported_and_a_lower_end_is_refused(
    finished_run: Callable[[str], FinishedRun], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = finished_run("mixture").copy(tmp_path / "run")
    longer = ("--training.max_steps", "5", "--optimizer.learning_rate", "1e-3")
    assert go_on(run, *longer) == 0
    said = capsys.readouterr().err
    assert "optimizer.learning_rate: 0.003 -> 0.001" in said
    assert "training.max_steps: 4 -> 5" in said
    written = (run.folder / "config.yaml").read_text()
    assert go_on(run) == 2
    assert "training.max_steps: expected at least 5" in capsys.readouterr().err
    assert (run.folder / "config.yaml").read_text() == written
    assert go_on(run, *longer) == 0
    assert "nothing left to do" in capsys.readouterr().out


def test_fp16_overflow_halves_the_scale_and_skips(
    plain_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    poison(monkeypatch, {1})
    folder = tmp_path / "run"
    assert train(*options(plain_store, folder, "--training.precision", "fp16")) == 0
    rows = Finished(0, "", folder).rows
    assert rows[2]["train/skipped"] == "overflow"
    assert (rows[1]["train/loss_scale"], rows[2]["train/loss_scale"]) == (65536.0, 32768.0)
