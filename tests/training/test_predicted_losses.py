"""`evaluation.prediction` beside a run's evaluations: in its rows, on the console, in replay and report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.forked_replay import run_replay
from support.launching import train_tiny
from support.pages import Page

from llm_pretrain.__main__ import main
from llm_pretrain.tracking import write_report

OPTIONS = (
    *("--training.max_steps", "12", "--schedule.warmup_steps", "2", "--checkpoint.save_steps", "4"),
    *("--checkpoint.keep_last", "9", "--evaluation.eval_steps", "2", "--evaluation.max_batches", "1"),
)
LEFT = {4: "above", 6: "above", 10: "below"}
"""Steps at which the prediction does not hold, and the side on which the loss is."""


def test_a_run_says_where_it_leaves_its_prediction_and_trains_the_same(
    plain_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    plain = train_tiny(plain_store, tmp_path / "plain", *OPTIONS)
    losses = {step: row["eval/loss"] for step, row in plain.rows.items() if "eval/loss" in row}
    expected = {
        step: loss + {"above": -1.0, "below": 1.0}.get(LEFT.get(step, ""), 0.0)
        for step, loss in losses.items()
        if step > 0
    }
    entries = [
        {"step": step, "loss": loss, "low": loss - 0.5, "high": loss + 0.5} for step, loss in expected.items()
    ]
    capsys.readouterr()
    prediction = ("--evaluation.prediction", json.dumps(entries))
    run = train_tiny(plain_store, tmp_path / "run", *OPTIONS, *prediction)
    lines = [line for line in "".join(capsys.readouterr()).splitlines() if "the predicted" in line]
    assert len(lines) == 2, "one for each time that it leaves, not for each evaluation outside"
    for line, step in zip(lines, (4, 10), strict=True):
        low, high = expected[step] - 0.5, expected[step] + 0.5
        told = f"step {step}: evaluation loss {losses[step]:.4f} is {LEFT[step]} the predicted"
        assert f"{told} {low:.4f} to {high:.4f}" in line

    for step, row in run.rows.items():
        names = {key for key in row if key.startswith("eval/predicted_")}
        if step in expected:
            assert names == {f"eval/predicted_{name}" for name in ("loss", "low", "high")}
            assert row["eval/predicted_loss"] == expected[step]
            assert row["eval/predicted_low"] == expected[step] - 0.5
            assert row["eval/predicted_high"] == expected[step] + 0.5
        else:
            assert not names, "before the first step of the prediction there is none"
    trained = {
        step: {key: value for key, value in row.items() if not key.startswith("eval/predicted_")}
        for step, row in run.exact_rows().items()
    }
    assert trained == plain.exact_rows()

    code, result = run_replay(run.folder, tmp_path / "replayed")
    assert (code, result["verdict"]) == (0, "holds")
    assert {each["verdict"] for each in result["segments"]} == {"identical"}
    assert main(["verify", str(run.folder)]) == 0

    page = Page(write_report([run.folder], tmp_path / "report.html"))
    (chart,) = [each for each in page.data["charts"]
                if each["id"] == "eval-loss"]  # fmt: skip
    labels = [curve["label"] for curve in chart["curves"]]
    assert labels == ["evaluation", "predicted", "", "predicted interval"]
    assert page.data["runs"][0]["evaluation"]["eval/predicted_loss"][-1] == pytest.approx(expected[12], 1e-5)
