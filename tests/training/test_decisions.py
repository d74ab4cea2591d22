"""Steps are recorded the same when the decision on them stays on the device, as on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.launching import Finished, assert_same_tensors, checkpoint_tensors, run_options, train

import train_pretrain
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.training import decision, recorder
from llm_pretrain.training.recorder import MAX_PENDING

STEPS = 24
LOST, LARGE = {3, 4, 12}, {20}
"""Steps, counted from 0, whose loss is infinite, and whose loss is a spike."""


def options(store: Path, folder: Path, *more: str) -> list[str]:
    return run_options(
        "tiny-moe",
        store,
        f"model.hidden_size=32 training.sequence_length=32 training.max_steps={STEPS} "
        "schedule.name=constant training.global_batch_size=8 "
        "training.micro_batch_size=8 model.router_bias_update_rate=1e-3 "
        "logging.logging_steps=5 checkpoint.save_steps=9 evaluation.eval_steps=14 "
        "evaluation.max_batches=1",
        *more,
        folder=folder,
    )


@contextmanager
def spoilt(lost: set[int] = LOST, large: set[int] = LARGE) -> Iterator[None]:
    """Make some steps' losses infinite, and others' far too large."""
    forward = train_pretrain.TorchrunEngine.forward

    def spoil(self, batch):
        output = forward(self, batch)
        factor = float("inf") if batch.step in lost else 50.0 if batch.step in large else None
        if factor is None or not torch.is_grad_enabled():
            return output
        assert output.loss_sum is not None
        return output._replace(loss_sum=output.loss_sum * factor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_pretrain.TorchrunEngine, "forward", spoil)
        yield


@contextmanager
def deferred(max_pending: int = MAX_PENDING) -> Iterator[None]:
    """Leave decisions on the device although it is a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decision, "decides_on_device", lambda config, engine: True)
        patch.setattr(recorder, "MAX_PENDING", max_pending)
        yield


@pytest.fixture(scope="module")
def read(plain_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run whose numbers are read at every step."""
    folder = tmp_path_factory.mktemp("read") / "run"
    with spoilt():
        return Finished(train(*options(plain_store, folder)), "", folder)


def check_same(found: Finished, expected: Finished) -> None:
    assert (found.exit_code, expected.exit_code) == (0, 0)
    assert found.exact_rows() == expected.exact_rows()
    assert [row.get("train/spike") for row in found.rows.values()] == [
        row.get("train/spike") for row in expected.rows.values()
    ]
    for step in (18, STEPS):
        assert_same_tensors(checkpoint_tensors(found.folder, step), checkpoint_tensors(expected.folder, step))


@pytest.mark.parametrize("max_pending", [MAX_PENDING, 2])
def test_rows_parameters_and_checkpoints_are_the_same(
    read: Finished, plain_store: Path, tmp_path: Path, max_pending: int
):
    for name, steps in (("train/skipped", LOST), ("train/spike", LARGE)):
        assert {step for step, row in read.rows.items() if row.get(name)} == {each + 1 for each in steps}
    with spoilt(), deferred(max_pending):
        found = Finished(train(*options(plain_store, tmp_path / "run")), "", tmp_path / "run")
    check_same(found, read)
    assert found.raw_steps() == read.raw_steps(), "in the same order"


def test_divergence_is_noticed_at_the_same_step(
    plain_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    lines, rows = [], []
    for name, way in (("read", spoilt), ("deferred", deferred)):
        folder = tmp_path / name
        with spoilt(lost={1, 2, 3}, large=set()), way():
            more = ("--training.max_skipped_steps", "3", "--logging.logging_steps", "7")
            assert train(*options(plain_store, folder, *more)) == 70
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
        lines.append([line.replace(str(folder), "") for line in errors])
        rows.append(Finished(70, "", folder).exact_rows())
    assert lines[0] == lines[1]
    assert "the last is step 4" in lines[0][0]
    assert rows[0] == rows[1]


class Reads:
    """Counts the numbers with a fraction that the host takes from tensors; a model's own may be."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.steps: list[int] = []
        self._within = True
        for name in ("item", "tolist", "cpu", "numpy", "__float__", "__bool__", "__int__"):
            patch.setattr(torch.Tensor, name, self._noting(getattr(torch.Tensor, name)))
        forward = Decoder.forward

        def unwatched(model, *arguments, **named):
            self._within = False
            try:
                return forward(model, *arguments, **named)
            finally:
                self._within = True

        patch.setattr(Decoder, "forward", unwatched)
        self.step = 0

    def _noting(self, method):
        def noting(tensor, *arguments, **named):
            if self._within and (tensor.is_floating_point() or tensor.dtype == torch.bool):
                self.steps.append(self.step)
            return method(tensor, *arguments, **named)

        return noting


def test_between_rows_nothing_is_read(plain_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    steps = train_pretrain.TorchrunEngine.train_step
    reads = Reads(monkeypatch)

    def train_step(self, taken):
        reads.step = taken.micro_batches[0].step + 1
        steps(self, taken)

    monkeypatch.setattr(train_pretrain.TorchrunEngine, "train_step", train_step)
    no_pauses = ("--checkpoint.save_steps", "0", "--evaluation.eval_steps", "0", "--training.max_steps", "11")
    with deferred():
        assert train(*options(plain_store, tmp_path / "run", *no_pauses)) == 0
    read_at = {step for step in reads.steps if step} - {11}  # the end saves
    assert read_at == {5, 10}
