"""A run writes a model card into its weights, with its own figures, and the same one after a resume."""

from __future__ import annotations

from pathlib import Path

from support.launching import Finished, run_options, train


def options(store: Path, folder: Path, *more: str) -> list[str]:
    return run_options(
        "tiny-dense",
        store,
        "training.sequence_length=32 training.global_batch_size=8 training.micro_batch_size=8 "
        "training.max_steps=4 schedule.name=constant evaluation.eval_steps=3 "
        "evaluation.max_batches=1 checkpoint.save_steps=2",
        *more,
        folder=folder,
    )


def card(run: Path, name: str) -> str:
    return (run / "weights" / name / "README.md").read_text("utf-8")


def test_a_run_writes_cards_with_its_own_figures(plain_store: Path, tmp_path: Path):
    run = tmp_path / "run"
    assert train(*options(plain_store, run)) == 0
    rows = Finished(0, "", run).rows
    before, last = card(run, "step-00000002"), card(run, "step-00000004")
    assert f"| loss | {rows[0]['eval/loss']:.4f} |" in before, "the evaluation at step 3 is not known yet"
    assert f"| loss | {rows[4]['eval/loss']:.4f} |" in last
    assert f"| Tokens trained on | {rows[2]['train/tokens']:,} |" in before
    assert f"| Tokens trained on | {rows[4]['train/tokens']:,} |" in last
    assert "the lowest evaluation loss so far" in card(run, "best")
    assert str(tmp_path) not in last
    assert str(plain_store.parent) not in last


def test_a_resumed_run_writes_the_card_of_one_that_was_never_stopped(plain_store: Path, tmp_path: Path):
    """The last evaluation is in the checkpoint: no evaluation follows between step 3 and step 5."""
    straight, halted = tmp_path / "straight", tmp_path / "halted"
    more = ("--evaluation.eval_steps", "5", "--run.name", "same")
    assert train(*options(plain_store, straight, *more, "--training.max_steps", "8")) == 0
    assert train(*options(plain_store, halted, *more, "--training.max_steps", "5")) == 0
    assert train(*options(plain_store, halted, *more, "--training.max_steps", "8")) == 0
    for name in ("step-00000006", "step-00000008"):
        assert card(halted, name) == card(straight, name)
