"""Spikes: what is one, what follows it, and that a resumed run judges as one that nobody stopped.

Whole runs here are of one process; `tests/faults/test_faults_divergence.py` has two, killed for real.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.launching import Finished, assert_same_tensors, checkpoint_tensors, train
from support.once import once
from support.poisoning import POISONED, poisoned_store, spike_options

from llm_pretrain.__main__ import main
from llm_pretrain.checkpoints import folders
from llm_pretrain.checkpoints.manifest import RunFacts
from llm_pretrain.config.loading import from_dict, validate
from llm_pretrain.training import saving
from llm_pretrain.training.decision import Decision
from llm_pretrain.training.engine import DIGEST_WORDS
from llm_pretrain.training.progress import MIN_STEPS, NEW_LEVEL, WINDOW, Progress, SpikeDetector, upper_bound
from llm_pretrain.training.step import Step, StepSums

FIRST = POISONED[0]


def taught(steps: int, *, seed: int = 0, loss: float = 3.0, tokens: int = 64) -> SpikeDetector:
    """A history of steps whose loss and gradient norm scatter around 3 and 1."""
    history, generator = SpikeDetector(), random.Random(seed)
    for _ in range(steps):
        step = (loss + generator.gauss(0, 0.05), 1 + abs(generator.gauss(0, 0.1)), tokens)
        history.record(*step, None)
    return history


def test_a_bound_is_the_median_and_a_margin():
    values = [1.0, 2.0, 3.0, 4.0, 5.0]  # median 3, median absolute deviation 1
    assert upper_bound(values, 0.25) == pytest.approx(3 + 8 * 1.4826)
    assert upper_bound([3.0] * 5, 0.25) == 3.75
    assert upper_bound([3.0] * 5, 0.25, widening=2.0) == 4.5


def test_what_is_a_spike():
    detector = taught(WINDOW)
    assert detector.detect(3.1, 1.1, 64, "log") is None
    assert detector.detect(0.1, 0.01, 64, "log") is None, "below is no spike"
    for numbers, of in [((9.0, 1.0), "loss"), ((3.0, 50.0), "grad_norm"), ((9.0, 50.0), "loss+grad_norm")]:
        spike = detector.detect(*numbers, 64, "log")
        assert spike is not None
        assert (spike.kind, spike.skipped) == (of, None)
    assert detector.detect(4.5, 1.0, 64, "log"), "half as much again"
    assert detector.detect(4.5, 1.0, 4, "log") is None, "a mean over few tokens scatters more"


def test_nothing_is_a_spike_before_there_is_a_history():
    assert taught(MIN_STEPS - 1).detect(100.0, 100.0, 64, "skip") is None
    assert taught(MIN_STEPS).detect(100.0, 100.0, 64, "skip")


@pytest.mark.parametrize(("action", "skipped"), [("log", None), ("skip", "spike"), ("rollback", "rollback")])
def test_the_action_decides_what_follows(action: str, skipped: str | None):
    spike = taught(MIN_STEPS).detect(100.0, 1.0, 64, action)
    assert spike is not None
    assert spike.skipped == skipped


def test_a_spike_is_no_part_of_the_history():
    """It does not move the bounds, so the next one is seen as well."""
    history = taught(MIN_STEPS)
    for _ in range(3 * MIN_STEPS):
        spike = history.detect(100.0, 30.0, 64, "skip")
        assert spike is not None
        history.record(100.0, 30.0, 64, spike)


def test_a_new_level_that_is_only_logged_becomes_the_usual_one():
    history = taught(WINDOW)
    seen = 0
    for _ in range(NEW_LEVEL + MIN_STEPS + 4):
        spike = history.detect(9.0, 1.0, 64, "log")
        seen += spike is not None
        history.record(9.0, 1.0, 64, spike)
    assert seen == NEW_LEVEL
    kept = taught(WINDOW)
    for _ in range(2 * NEW_LEVEL):
        kept.record(9.0, 1.0, 64, kept.detect(9.0, 1.0, 64, "skip"))
    assert kept.detect(9.0, 1.0, 64, "skip"), "skipped steps teach nothing"


def test_json_brings_the_history_back_exactly():
    history = taught(WINDOW + 9)
    assert len(history.steps) == WINDOW
    extra = json.loads(json.dumps(Progress(1, spikes=history).extra()))
    facts = RunFacts(1, 0, "torchrun", "ddp", 1, 1, 0, None, {}, extra)
    assert Progress.resumed(facts, Path("step-00000001")).spikes == history


def decided(
    sums: list[float], grad_norm: float, is_scaled: bool = False, tree: dict[str, Any] | None = None
) -> Step:
    """A step of 10 loss tokens with these numbers, as is decided on it."""
    config = from_dict(tree or {})
    engine: Any = SimpleNamespace(
        device=torch.device("cpu"),
        scaler=torch.amp.GradScaler("cpu", enabled=is_scaled),
        reduce_sum=lambda tensor: tensor,
        model_and_optimizer=lambda: (None, None),
    )
    decide = Decision(config, engine, Progress())
    step = Step((), 10, [0] * DIGEST_WORDS, StepSums(config, engine.device), engine, decide)
    step.sums.vector = torch.tensor(sums, dtype=torch.float64)
    accepted = step.may_update(grad_norm)
    assert accepted is not bool(step.skipped)
    return step


def test_reasons_to_skip():
    fine = decided([20.0, 0, 0, 0], 1.0)
    assert (fine.skipped, fine.loss, fine.grad_norm) == (None, 2.0, 1.0)
    for norm in (math.nan, math.inf):
        assert decided([20.0, 0, 0, 0], norm).skipped == "nonfinite_gradient"
        assert decided([20.0, 0, 0, 0], norm, is_scaled=True).skipped == "overflow"
    for place in range(4):
        sums = [20.0, 0.0, 0.0, 0.0]
        sums[place] = math.inf
        lost = decided(sums, 1.0, is_scaled=True)
        assert (lost.skipped, lost.loss) == ("nonfinite_loss", None)


def test_steps_that_could_not_be_judged_teach_nothing():
    progress = Progress()
    for result in (decided([math.nan, 0, 0, 0], 1.0), decided([1.0, 0, 0, 0], math.inf)):
        progress.update(result)
    empty = decided([20.0, 0, 0, 0], 1.0)
    empty.skipped, empty.loss = "no_loss_tokens", None
    progress.update(empty)
    assert progress.spikes == SpikeDetector()
    assert progress.skipped_in_a_row == 3
    progress.update(decided([20.0, 0, 0, 0], 1.0))
    assert progress.spikes.steps == [(2.0, 1.0, 10)]


def test_retention_keeps_the_checkpoint_to_go_back_to(tmp_path: Path):
    for step in (4, 8, 9, 10, 11, 12):
        (tmp_path / folders.folder_name(step)).mkdir()
    folders.prune(tmp_path, newest=11, keep_last=2, period=4)
    assert list(folders.committed_folders(tmp_path)) == [8, 10, 11, 12]
    folders.prune(tmp_path, newest=12, keep_last=2, period=4)
    assert list(folders.committed_folders(tmp_path)) == [11, 12]


@pytest.mark.parametrize("action", ["skip", "rollback"])
def test_what_cannot_be_done_is_refused_by_name(action: str):
    tree = {"data": {"sources": [{"store": "x"}]}, "training": {"spike_action": action}}
    assert validate(from_dict(tree)) == []
    (line,) = validate(from_dict(tree | {"distributed": {"strategy": "deepspeed"}}))
    assert line.startswith("training.spike_action: expected log with distributed.strategy deepspeed")
    lines = validate(from_dict(tree | {"checkpoint": {"save_steps": 0}}))
    assert [line.startswith("training.spike_action") for line in lines] == [True] * (action == "rollback")


# Whole runs


@pytest.fixture(scope="module")
def poison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose steps `POISONED` are garbage."""
    return once(tmp_path_factory, "poison", poisoned_store)


def run(store: Path, folder: Path, action: str, *more: str) -> Finished:
    """A run in this process, to its end or until it stops."""
    options = spike_options(store, folder, action, "--model.hidden_size", "32", *more)
    return Finished(train(*options), "", folder)


def digests(run: Finished) -> dict[int, str]:
    return {step: row["train/parameters_sha256"] for step, row in run.rows.items()}


@pytest.fixture(scope="module")
def whole(poison: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    """A run with each action that nobody stopped."""
    base = tmp_path_factory.mktemp("whole")
    return {action: run(poison, base / action, action) for action in ("log", "skip", "rollback")}


def test_what_each_action_does(whole: dict[str, Finished]):
    log, skip, back = (whole[action] for action in ("log", "skip", "rollback"))
    assert log.rows[FIRST]["train/spike"] in ("loss", "loss+grad_norm")
    assert {row["train/skipped"] for row in log.rows.values()} == {None}
    for finished, reason in ((skip, "spike"), (back, "rollback")):
        spikes = {step for step, row in finished.rows.items() if "train/spike" in row}
        assert set(POISONED) <= spikes
        assert {step for step, row in finished.rows.items() if row["train/skipped"]} == spikes
        assert {finished.rows[step]["train/skipped"] for step in spikes} == {reason}
        assert spikes != set(finished.rows), "healthy steps are not skipped"
        row = finished.rows[FIRST]
        assert math.isfinite(row["train/loss"] + row["train/grad_norm"])
        assert row["train/loss"] == log.rows[FIRST]["train/loss"]
        assert digests(finished)[FIRST - 1] == digests(log)[FIRST - 1]
    assert digests(skip)[FIRST] == digests(skip)[FIRST - 1]
    assert digests(back)[FIRST] == digests(back)[FIRST // 4 * 4]
    assert digests(log)[FIRST] != digests(log)[FIRST - 1]


@pytest.mark.slow
def test_a_logged_spike_has_a_row_and_changes_nothing(
    poison: Path,
    tmp_path: Path,
    whole: dict[str, Finished],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    sparse = run(poison, tmp_path / "run", "log", "--logging.logging_steps", "10")
    spikes = {step for step, row in whole["log"].rows.items() if "train/spike" in row}
    assert set(sparse.rows) == {10, 20} | spikes
    assert f"warning: step {FIRST}, only logged: spike in " in capsys.readouterr().err
    last = max(whole["log"].rows)
    monkeypatch.setattr(SpikeDetector, "detect", lambda *_: None)
    silent = run(poison, tmp_path / "silent", "log")
    assert all("train/spike" not in row for row in silent.rows.values())
    assert digests(silent) == digests(whole["log"])
    assert_same_tensors(checkpoint_tensors(silent.folder, last), checkpoint_tensors(sparse.folder, last))


def test_rollback_without_a_checkpoint_is_a_skip(
    poison: Path,
    tmp_path: Path,
    whole: dict[str, Finished],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    phases: list[tuple[str, bool]] = []
    monkeypatch.setattr(saving, "heartbeat", lambda phase, *, files: phases.append((phase, files)))
    alone = run(poison, tmp_path / "run", "rollback", "--checkpoint.save_steps", "100")
    spikes = [step for step, row in alone.rows.items() if row.get("train/skipped") == "spike"]
    phases = [each for each in phases if each[0].startswith("rolling back")]
    assert phases == [(f"rolling back at step {step}", True) for step in spikes]
    assert "rollback acts as skip: no periodic checkpoint has been written yet" in capsys.readouterr().err
    assert alone.exact_rows() == whole["skip"].exact_rows()


def test_spikes_in_a_row_end_the_run_as_diverged(poison: Path, tmp_path: Path):
    ended = run(poison, tmp_path / "run", "skip", "--training.max_skipped_steps", "2")
    assert ended.status["state"] == "diverged"
    assert ended.status["exit_code"] == ended.exit_code == 70
    assert max(ended.rows) == FIRST + 1


@pytest.mark.parametrize("action", ["log", "skip", "rollback"])
def test_verify_understands_such_a_run(
    action: str, whole: dict[str, Finished], capsys: pytest.CaptureFixture[str]
):
    assert main(["verify", str(whole[action].folder)]) == 0, capsys.readouterr().out
