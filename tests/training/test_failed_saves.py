"""Training outlives a failed save; three in a row, the last one, and a row that cannot be written end it."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from support.launching import Finished, assert_same_tensors, checkpoint_tensors, run_options, train

from llm_pretrain.checkpoints import store
from llm_pretrain.checkpoints.store import CheckpointStore
from llm_pretrain.errors import CheckpointError
from llm_pretrain.runs import rows as metrics_file
from llm_pretrain.training import saving as checkpointing
from llm_pretrain.training.saving import CheckpointManager

MODES = pytest.mark.parametrize("mode", ["false", "true"], ids=["sync", "async"])


def options(store: Path, folder: Path, mode: str, *more: str) -> list[str]:
    return run_options(
        "tiny-moe",
        store,
        "training.sequence_length=32 training.global_batch_size=8 training.micro_batch_size=8 "
        "training.max_steps=10 evaluation.eval_steps=0 checkpoint.save_steps=2 "
        f"checkpoint.async_save={mode}",
        *more,
        folder=folder,
    )


def fail_steps(monkeypatch: pytest.MonkeyPatch, steps: Iterable[int]) -> None:
    """The disk is full whenever a checkpoint of one of these steps has been written but for its manifest."""
    original = store.write_manifest

    def full(folder: Path, content) -> None:
        if content.run.step in steps:
            raise OSError(errno.ENOSPC, "No space left on device", str(folder / "manifest.json"))
        original(folder, content)

    monkeypatch.setattr(store, "write_manifest", full)


def fail_weights(monkeypatch: pytest.MonkeyPatch, fails: Callable[[int, bool], bool]) -> None:
    """Weights cannot be written where `fails(step, best)` says so."""
    original = checkpointing.save_weights

    def full(folder: Path, step: int, *arguments, best_loss=None, **more):
        if fails(step, best_loss is not None):
            error = CheckpointError(
                f"{folder}: writing weights of step {step} failed: No space left on device"
            )
            error.shared = True
            raise error
        return original(folder, step, *arguments, best_loss=best_loss, **more)

    monkeypatch.setattr(checkpointing, "save_weights", full)


def saved_steps(folder: Path, kind: str = "checkpoints") -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / kind).glob("step-*"))


@pytest.fixture(scope="module")
def reference(plain_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("reference") / "run"
    assert train(*options(plain_store, folder, "false")) == 0
    return Finished(0, "", folder)


@MODES
def test_training_goes_on_after_failed_saves(plain_store, reference, tmp_path, monkeypatch, capsys, mode):
    """Two fail, one passes, two fail: never three in a row."""
    fail_steps(monkeypatch, (2, 4, 8))
    folder = tmp_path / "run"
    assert train(*options(plain_store, folder, mode)) == 0
    run = Finished(0, "", folder)
    assert run.exact_rows() == reference.exact_rows()
    assert saved_steps(folder) == [6, 10]
    assert_same_tensors(checkpoint_tensors(folder, 10), checkpoint_tensors(reference.folder, 10))
    assert run.status["checkpoint"].endswith("step-00000010")
    assert not list((folder / "checkpoints").glob(".step-*"))
    warnings = [line for line in capsys.readouterr().err.splitlines() if "not saved, step" in line]
    assert [line.partition(": /")[0] for line in warnings] == [
        f"warning: not saved, step {step}" for step in (2, 4, 8)
    ]
    for line, count in zip(warnings, (1, 2, 1), strict=True):
        assert str(folder / "checkpoints") in line
        assert "No space left on device" in line
        assert "bytes free" in line
        assert "a checkpoint of " in line
        assert f"failed saves in a row: {count} of 3" in line


@MODES
def test_three_failed_saves_in_a_row_end_the_run(plain_store, tmp_path, monkeypatch, capsys, mode):
    fail_steps(monkeypatch, (4, 6, 8))
    folder = tmp_path / "run"
    assert train(*options(plain_store, folder, mode, "--training.max_steps", "12")) == 74
    run = Finished(74, "", folder)
    assert (run.status["state"], run.status["exit_code"]) == ("failed", 74)
    assert run.status["checkpoint"].endswith("step-00000002")
    assert "failed saves in a row: 3 of 3" in run.status["reason"]
    assert saved_steps(folder) == [2]
    assert max(run.rows) == (8 if mode == "false" else 10)
    monkeypatch.undo()
    assert train(*options(plain_store, folder, mode, "--training.max_steps", "12")) == 0
    assert "Traceback" not in capsys.readouterr().err


@MODES
def test_the_last_save_must_not_fail(plain_store, tmp_path, monkeypatch, mode):
    fail_steps(monkeypatch, (10,))
    folder = tmp_path / "run"
    assert train(*options(plain_store, folder, mode)) == 74
    status = Finished(74, "", folder).status
    assert status["checkpoint"].endswith("step-00000008")
    assert "its last save must not fail" in status["reason"]
    monkeypatch.undo()
    assert train(*options(plain_store, folder, mode)) == 0
    assert saved_steps(folder) == [8, 10]


@MODES
def test_a_checkpoint_counts_though_its_weights_fail(plain_store, tmp_path, monkeypatch, capsys, mode):
    fail_weights(monkeypatch, lambda step, best: step in (4, 6))
    folder = tmp_path / "run"
    assert train(*options(plain_store, folder, mode, "--checkpoint.keep_last", "9")) == 0
    assert saved_steps(folder) == [2, 4, 6, 8, 10]
    assert saved_steps(folder, "weights") == [2, 8, 10]
    errors = capsys.readouterr().err
    assert errors.count("not saved, the weights of step") == 2
    assert "failed saves in a row: 2 of 3" in errors


@MODES
def test_a_store_that_is_replaced_gives_its_tokenizer_to_no_weights(plain_store, tmp_path, monkeypatch, mode):
    moved, folder, save = tmp_path / "store", tmp_path / "run", checkpointing.save_weights
    shutil.copytree(plain_store, moved)

    def replaced(parent: Path, step: int, *arguments, **more) -> Path:
        if step == 4:
            (moved / "tokenizer" / "tokenizer.json").write_text('{"another": "tokenizer"}')
        return save(parent, step, *arguments, **more)

    monkeypatch.setattr(checkpointing, "save_weights", replaced)
    assert train(*options(moved, folder, mode)) == 74
    assert saved_steps(folder, "weights") == [2]
    reason = Finished(74, "", folder).status["reason"]
    assert "tokenizer.json: expected the tokenizer that the run began with" in reason


@MODES
def test_best_weights_that_cannot_be_written_stop_nothing(plain_store, tmp_path, monkeypatch, capsys, mode):
    fail_weights(monkeypatch, lambda step, best: best and step < 6)
    folder = tmp_path / "run"
    more = ("--evaluation.eval_steps", "2", "--evaluation.max_batches", "1")
    assert train(*options(plain_store, folder, mode, *more)) == 0
    assert json.loads((folder / "weights" / "best" / "best.json").read_text())["step"] >= 6
    assert "No space left on device" in capsys.readouterr().err


@MODES
def test_what_is_not_finite_ends_the_run(plain_store, tmp_path, monkeypatch, mode):
    """Something broke the state between two steps: no checkpoint has it, and the run says which tensor."""
    original = CheckpointManager.save

    def poisoned(self, progress, **more):
        if progress.step == 6:
            model, _ = self.engine.model_and_optimizer()
            with torch.no_grad():
                model.model.norm.weight[3] = float("nan")
        original(self, progress, **more)

    monkeypatch.setattr(CheckpointManager, "save", poisoned)
    folder = tmp_path / "run"
    assert train(*options(plain_store, folder, mode)) == 70
    status = Finished(70, "", folder).status
    assert status["state"] == "diverged"
    assert status["checkpoint"].endswith("step-00000004")
    assert "model.norm.weight" in status["reason"]
    assert saved_steps(folder) == [2, 4]


@MODES
def test_a_row_that_cannot_be_written_ends_the_run(plain_store, tmp_path, monkeypatch, capsys, mode):
    original = metrics_file.MetricsWriter.append

    class FullFile:
        def __init__(self, file):
            self.file = file

        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

        def __getattr__(self, name):
            return getattr(self.file, name)

    def full(self, row):
        if row["step"] == 5:
            self._file = FullFile(self._file)
        original(self, row)

    monkeypatch.setattr(metrics_file.MetricsWriter, "append", full)
    folder = tmp_path / "run"
    assert train(*options(plain_store, folder, mode)) == 73
    status = Finished(73, "", folder).status
    assert (status["state"], status["exit_code"]) == ("failed", 73)
    assert status["checkpoint"].endswith("step-00000004")
    assert "metrics.jsonl: cannot write step 5: No space left on device" in status["reason"]
    monkeypatch.undo()
    assert train(*options(plain_store, folder, mode)) == 0
    assert sorted(Finished(0, "", folder).rows) == list(range(1, 11))


def test_an_error_in_the_loop_lets_the_save_in_the_background_commit(plain_store, tmp_path, monkeypatch):
    """The save of step 4 is held until the loop has failed at step 5."""
    import threading

    from llm_pretrain.training.trainer import Trainer

    failed, write, step = threading.Event(), CheckpointStore.write, Trainer._step

    def slow(self, staged, ranks=None):
        if staged.content.run.step == 4:
            assert failed.wait(60)
        return write(self, staged, ranks)

    def broken(self, micro_batches):
        if self.progress.step == 4:
            failed.set()
            raise torch.OutOfMemoryError("not enough")
        step(self, micro_batches)

    monkeypatch.setattr(CheckpointStore, "write", slow)
    monkeypatch.setattr(Trainer, "_step", broken)
    folder = tmp_path / "run"
    assert train(*options(plain_store, folder, "true")) == 71
    status = Finished(71, "", folder).status
    assert saved_steps(folder) == [2, 4]
    assert status["checkpoint"].endswith("step-00000004")


def test_one_save_is_in_flight_and_the_next_waits_for_it(plain_store, tmp_path, monkeypatch):
    import threading
    import time

    write, running, most = CheckpointStore.write, [], []

    def slow(self, staged, ranks=None):
        running.append(threading.current_thread())
        most.append(len(running))
        time.sleep(0.2)
        try:
            return write(self, staged, ranks)
        finally:
            running.remove(threading.current_thread())

    monkeypatch.setattr(CheckpointStore, "write", slow)
    folder = tmp_path / "run"
    assert train(*options(plain_store, folder, "true", "--checkpoint.save_steps", "1")) == 0
    assert most == [1] * 10
    assert saved_steps(folder) == [9, 10]
