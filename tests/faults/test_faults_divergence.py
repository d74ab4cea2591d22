"""Training that diverges: what is not finite moves no parameter and reaches no disk; spikes resume alike."""

from __future__ import annotations

import signal
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.divergence_plan import KINDS_OF, SPOILT_STEP
from support.interrupting import assert_exact, kill_at
from support.launching import assert_same_tensors, checkpoint_tensors, launch, run_options
from support.once import once
from support.poisoning import DATA_OPTIONS, POISONED, poisoned_store
from support.rank_cases import Outcome, run_ranks
from support.spoiling import REASON

LAUNCHERS = ("torchrun", "accelerate")
FIRST = POISONED[0]


@pytest.fixture(scope="module")
def ranks(masked_store: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    """What two connected processes did in each case of the plan."""

    def make(folder: Path) -> dict[str, list[Outcome]]:
        return run_ranks(masked_store, folder, plan="divergence_plan", world_size=2)

    return once(tmp_path_factory, "divergence", make)


def check_one_skip(outcomes: list[Outcome], reason: str) -> None:
    """All ranks skip the spoilt step and take the others; parameters are the same on all."""
    for outcome in outcomes:
        driven = outcome.driven
        assert outcome.error is None
        reasons: list[str | None] = [None] * 3
        reasons[SPOILT_STEP - 1] = reason
        assert driven.skipped == reasons
        assert driven.updates == [int(each is None) for each in reasons], "Adam's counter"
        hashes = driven.hashes
        assert hashes == outcomes[0].driven.hashes
        assert [a == b for a, b in pairwise(hashes)] == [True, False]
        for name, buffer in driven.buffers.items():
            assert torch.equal(buffer, outcomes[0].driven.buffers[name]), name


@pytest.mark.parametrize(
    ("launcher", "kind"), [(launcher, kind) for launcher, kinds in KINDS_OF.items() for kind in kinds]
)
def test_what_is_not_finite_on_one_rank_is_skipped_by_all(
    launcher: str, kind: str, ranks: dict[str, list[Outcome]]
):
    check_one_skip(ranks[f"{launcher} {kind}"], REASON[kind])


def test_a_verdict_by_a_ranks_own_loss_shows(ranks: dict[str, list[Outcome]]):
    with pytest.raises(AssertionError):
        check_one_skip(ranks["own loss"], "nonfinite_loss")


def assert_sound(folder: Path) -> None:
    """Every value in every checkpoint is finite."""
    paths = sorted((folder / "checkpoints").glob("step-*"))
    for path in paths:
        for name, tensor in checkpoint_tensors(folder, int(path.name.removeprefix("step-"))).items():
            assert tensor.isfinite().all(), f"{path.name}: {name}"


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "kind"), [("torchrun", "loss"), ("accelerate", "gradient")])
def test_too_many_such_steps_end_as_diverged(launcher: str, kind: str, options: list[str], tmp_path: Path):
    options = [*options, "--training.max_skipped_steps", "3"]
    before = [("support.spoiling:spoil_launch", [launcher, kind, 7])]
    run = launch(launcher, 2, tmp_path / "run", options, exit_code=None, before=before)
    assert run.exit_code != 0
    assert (run.status["state"], run.status["exit_code"]) == ("diverged", 70)
    assert {step: row["train/skipped"] for step, row in run.rows.items()} == {
        step: REASON[kind] if step >= 7 else None for step in range(1, 10)
    }
    assert "NaN" not in (run.folder / "metrics.jsonl").read_text()
    assert "Infinity" not in (run.folder / "metrics.jsonl").read_text()
    assert_sound(run.folder)


# Spikes


@pytest.fixture(scope="module")
def poison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(tmp_path_factory, "poison", poisoned_store)


def spiky(store: Path, action: str, *more: str) -> list[str]:
    """Options of a run whose data makes real spikes."""
    settings = f"training.spike_action={action} model.router_bias_update_rate=1e-3 model.hidden_dropout=0.1 "
    settings += "optimizer.learning_rate=3e-2 schedule.name=constant logging.logging_steps=1 "
    settings += "checkpoint.save_steps=4 evaluation.eval_steps=0"
    return run_options("tiny-moe", store, settings, *DATA_OPTIONS, *more)


@pytest.mark.slow
@pytest.mark.parametrize(("action", "saves"), [("log", "true"), ("skip", "false"), ("rollback", "true")])
def test_a_spike_is_met_again_with_the_same_bits(action: str, saves: str, poison: Path, tmp_path: Path):
    """Both launchers, whole; and stopped before the spike, killed at it and after what followed it."""
    options = spiky(poison, action, "--checkpoint.async_save", saves)
    whole = launch("torchrun", 2, tmp_path / "whole", options)
    reason = {"log": None, "skip": "spike", "rollback": "rollback"}[action]
    assert {whole.rows[step]["train/skipped"] for step in POISONED} == {reason}
    assert all("train/spike" in whole.rows[step] for step in POISONED)
    assert_exact(launch("accelerate", 2, tmp_path / "accelerate", options), whole)
    folder = tmp_path / "interrupted"
    kill_at("torchrun", folder, options, FIRST - 2, signal.SIGTERM)
    kill_at("accelerate", folder, options, FIRST, signal.SIGKILL)
    kill_at("torchrun", folder, options, FIRST + 3, signal.SIGKILL)
    assert_exact(launch("accelerate", 2, folder, options), whole)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_sharded_run_goes_back_too(launcher: str, poison: Path, tmp_path: Path):
    options = spiky(
        poison, "rollback", "--distributed.strategy", "fsdp", "--logging.parameters_sha256", "true"
    )
    whole = launch(launcher, 2, tmp_path / "whole", options)
    digest = {step: row["train/parameters_sha256"] for step, row in whole.rows.items()}
    assert whole.rows[FIRST]["train/skipped"] == "rollback"
    assert digest[FIRST] == digest[FIRST // 4 * 4]
    assert digest[FIRST] != digest[FIRST - 1]
    folder = tmp_path / "interrupted"
    kill_at(launcher, folder, options, FIRST + 3, signal.SIGKILL)
    again = launch(launcher, 2, folder, options)
    assert again.exact_rows() == whole.exact_rows()
    last = max(whole.rows)
    assert_same_tensors(checkpoint_tensors(folder, last), checkpoint_tensors(whole.folder, last))
