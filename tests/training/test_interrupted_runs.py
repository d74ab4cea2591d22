"""A run that was stopped and killed ends as the run that nobody stopped, whatever it has switched on.

Stops are by a signal, after which a run saves, and by the end of the process, after which it goes on from an
older checkpoint. One process here; launched and killed runs are in tests/distributed and tests/faults.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.interrupting import newest_checkpoint
from support.launching import Finished, assert_same_tensors, checkpoint_tensors, run_options, train
from support.once import once
from support.poisoning import POISONED, poisoned_store, spike_options

import train_pretrain
from llm_pretrain.__main__ import main
from llm_pretrain.training import decision
from llm_pretrain.training.evaluation import Evaluator
from llm_pretrain.training.saving import CheckpointManager

SETTINGS = (
    "model.hidden_size=32 training.sequence_length=32 training.global_batch_size=8 "
    "training.micro_batch_size=8 training.max_steps=8 schedule.warmup_steps=2 checkpoint.save_steps=3 "
    "evaluation.eval_steps=4 evaluation.max_batches=1 run.name=same "
)
"""Saves at 3, 6 and 8, evaluations at 0, 4 and 8."""

MIXTURE = "[{step: 3, weights: [0.25, 0.75]}]"
LOST = (2, 5)
"""Steps, counted from 1, whose loss is made infinite."""

Patch = pytest.MonkeyPatch


class KilledError(Exception):
    """Stands for the end of the process: nothing runs after it but what reports it."""


class Stop(NamedTuple):
    """In a step (before anything is written of it), in an evaluation, or after all work of one."""

    moment: str
    step: int
    is_kill: bool = False


STOPS = (Stop("step", 5), Stop("step", 7, True))
SPIKE = POISONED[0]
IN_SPIKES = (Stop("step", SPIKE - 1), Stop("step", SPIKE, True), Stop("step", SPIKE + 2, True))
"""After a periodic save and before the spike, then in it and after it."""


class Case(NamedTuple):
    run: str
    stops: tuple[Stop, ...] = STOPS


CASES = {
    "muon and averaged weights": Case("muon"),
    "an optimizer by its path": Case("lion"),
    "sources whose weights change": Case("mixture"),
    "decisions on the device": Case("deferred"),
    "killed after the last evaluation": Case("evaluated", (Stop("evaluated", 8, True),)),
    "stopped in the last evaluation": Case("evaluated", (Stop("evaluation", 8),)),
    "stopped between evaluation and save": Case("evaluated"),
    "out of patience": Case("patient", (*STOPS, Stop("evaluated", 8, True))),
    "spikes that are skipped": Case("skip", IN_SPIKES),
    "spikes that are rolled back": Case("rollback", IN_SPIKES),
}
QUICK = {
    "sources whose weights change",
    "decisions on the device",
    "killed after the last evaluation",
    "out of patience",
    "stopped between evaluation and save",
}

CHANGES = {
    "muon": "optimizer.name=muon optimizer.ema_decay=0.5",
    "lion": "optimizer.name=support.lion.Lion",
    "mixture": "",
    "deferred": "logging.logging_steps=3 model.router_bias_update_rate=1e-3",
    "evaluated": "",
    "patient": "evaluation.patience=1 training.max_steps=12",
}

WORSE = {0: 0.5, 4: 1.0, 8: 1.5}
"""What these two find at their evaluations; the one before the first step is never the best."""


class Runs:
    """Options by the name of a run, and the run of that name that nobody stopped."""

    def __init__(self, store: Path, other: Path, poison: Path, folder: Path):
        self.store, self.other, self.poison, self.folder = store, other, poison, folder

    def train(self, name: str, folder: Path) -> Finished:
        with pytest.MonkeyPatch.context() as patch:
            if name == "deferred":
                defer(patch)
            if name in ("evaluated", "patient"):
                worsen(patch)
            return Finished(train(*self.options(name, folder)), "", folder)

    def options(self, name: str, folder: Path) -> list[str]:
        if name in ("skip", "rollback"):
            return spike_options(self.poison, folder, name)
        more: tuple[str, ...] = ()
        if name == "mixture":
            sources = f"[{{store: {self.store}, name: one}}, {{store: {self.other}, name: two}}]"
            more = ("--data.sources", sources, "--data.weight_changes", MIXTURE)
        preset = "tiny-dense" if name in ("evaluated", "patient") else "tiny-moe"
        return run_options(preset, self.store, SETTINGS + CHANGES[name], *more, folder=folder)

    def straight(self, name: str) -> Finished:
        if (self.folder / name).exists():
            return Finished(0, "", self.folder / name)
        return self.train(name, self.folder / name)


@pytest.fixture(scope="module")
def runs(plain_store: Path, masked_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    poison = once(tmp_path_factory, "poison", poisoned_store)
    return Runs(plain_store, masked_store, poison, tmp_path_factory.mktemp("straight"))


def defer(patch: Patch) -> None:
    """Losses that are infinite, and decisions that stay on the device as on a GPU."""
    forward = train_pretrain.TorchrunEngine.forward

    def spoil(self: Any, batch: Any) -> Any:
        output = forward(self, batch)
        is_lost = batch.step + 1 in LOST and torch.is_grad_enabled()
        return output._replace(loss_sum=output.loss_sum * float("inf")) if is_lost else output

    patch.setattr(train_pretrain.TorchrunEngine, "forward", spoil)
    patch.setattr(decision, "decides_on_device", lambda config, engine: True)


def worsen(patch: Patch) -> None:
    keep_best = CheckpointManager.keep_best
    patch.setattr(CheckpointManager, "keep_best", lambda self, at, loss: keep_best(self, at, WORSE[at.step]))


@contextmanager
def stopping(stop: Stop) -> Iterator[None]:
    def end() -> None:
        if stop.is_kill:
            raise KilledError
        os.kill(os.getpid(), signal.SIGTERM)

    step, evaluate = train_pretrain.TorchrunEngine.train_step, Evaluator.__call__
    keep_best, seen = CheckpointManager.keep_best, [0]

    def train_step(self: Any, taken: Any) -> None:
        step(self, taken)
        seen[0] = taken.micro_batches[0].step + 1
        if stop == Stop("step", seen[0], stop.is_kill):
            end()

    def evaluation(self: Any, model: Any, show: Any) -> Any:
        if stop == Stop("evaluation", seen[0], stop.is_kill):
            end()
        return evaluate(self, model, show)

    def evaluated(self: Any, progress: Any, loss: float) -> None:
        keep_best(self, progress, loss)
        if stop == Stop("evaluated", progress.step, stop.is_kill):
            end()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_pretrain.TorchrunEngine, "train_step", train_step)
        patch.setattr(Evaluator, "__call__", evaluation)
        patch.setattr(CheckpointManager, "keep_best", evaluated)
        yield


def interrupted(runs: Runs, case: Case, folder: Path) -> Finished:
    for stop in case.stops:
        with stopping(stop):
            if stop.is_kill:
                with pytest.raises(KilledError):
                    runs.train(case.run, folder)
            else:
                assert runs.train(case.run, folder).exit_code == 75
    return runs.train(case.run, folder)


def weights(run: Finished) -> dict[str, bytes]:
    """Every file of the exported weights, model cards and the best weights' loss among them."""
    folder = run.folder / "weights"
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check(run: Finished, straight: Finished) -> None:
    assert (run.exit_code, straight.exit_code) == (0, 0)
    assert run.exact_rows() == straight.exact_rows()
    last = newest_checkpoint(straight.folder)
    assert_same_tensors(checkpoint_tensors(run.folder, last), checkpoint_tensors(straight.folder, last))
    assert weights(run) == weights(straight)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.slow] * (name not in QUICK))
        for name, case in CASES.items()
    ],
)
def test_a_stopped_and_killed_run_ends_as_the_other(case: Case, runs: Runs, tmp_path: Path):
    check(interrupted(runs, case, tmp_path / "run"), runs.straight(case.run))


def test_a_card_has_the_figures_of_its_own_step(runs: Runs):
    run = runs.straight("evaluated")
    assert json.loads((run.folder / "weights/best/best.json").read_text())["step"] == 4
    for name, evaluated in (("step-00000006", 4), ("step-00000008", 8)):
        card, row = (run.folder / "weights" / name / "README.md").read_text("utf-8"), run.rows[int(name[5:])]
        assert f"| loss | {run.rows[evaluated]['eval/loss']:.4f} |" in card
        assert f"| Tokens trained on | {row['train/tokens']:,} |" in card
        assert str(run.folder.parent) not in card
        assert str(runs.store.parent) not in card
    best = (run.folder / "weights" / "best" / "README.md").read_text("utf-8")
    assert "the lowest evaluation loss so far" in best


def test_a_run_out_of_patience_is_finished_and_goes_on_with_more(runs: Runs, tmp_path: Path, capsys):
    """It ends on its schedule of 12 steps, as if nothing had happened at 8."""
    run = runs.straight("patient")
    assert run.exit_code == 0
    found = run.status
    assert (found["state"], found["step"]) == ("finished", 8)
    assert found["reason"] == "evaluation.patience 1: no lower eval/loss since step 4"
    capsys.readouterr()
    main(["verify", str(run.folder)])
    assert "ok       status                      finished, step 8" in capsys.readouterr().out
    folder = tmp_path / "run"
    shutil.copytree(run.folder, folder)
    again = runs.train("patient", folder)
    assert (again.exit_code, again.raw_steps()) == (0, run.raw_steps())
    later = {9: 1.5, 10: float("nan"), 11: 1.5, 12: 1.5}
    for patience, last in ((3, 10), (0, 12)):  # that of step 8 counts, although it was of other `eval_steps`
        more = f"evaluation.patience={patience} training.max_steps=12 evaluation.eval_steps=1"
        options = run_options("tiny-dense", runs.store, SETTINGS + more, folder=folder)
        with pytest.MonkeyPatch.context() as patch:
            for step, loss in later.items():
                patch.setitem(WORSE, step, loss)
            worsen(patch)
            assert train(*options) == 0
        assert max(again.rows) == last
