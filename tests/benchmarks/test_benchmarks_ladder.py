"""A ladder's prediction is held against runs of its plan."""

from __future__ import annotations

import re

import pytest

from benchmarks import __main__ as program
from llm_pretrain.forecast import budget, family, planning
from llm_pretrain.runs.rows import read_metrics


@pytest.mark.slow
def test_a_ladders_prediction_is_held_against_a_run_of_each_seed(plain_store, tmp_path, monkeypatch, capsys):
    for name, value in (("MIN_TOKENS", 1), ("MIN_STEPS", 10), ("MAX_EPOCHS", 1000.0)):
        monkeypatch.setattr(budget, name, value)
    monkeypatch.setattr(planning, "MAX_EPOCHS", 1000.0)
    monkeypatch.setattr(family, "MIN_HEADS", 1)
    base = tmp_path / "base.yaml"
    base.write_text(
        "model: {hidden_size: 64, intermediate_size: 96, num_hidden_layers: 1, num_attention_heads: 8}\n"
        "training: {sequence_length: 32, micro_batch_size: 8, global_batch_size: 8, precision: fp32}\n"
    )
    words = ["ladder", "--store", str(plain_store), "--budget", "4e9", "--times", "2", "--seeds", "2"]
    words += ["--folder", str(tmp_path / "kept"), "--", "--config", str(base)]
    for attempt in range(2):
        assert program.main(words) == 0
        output = capsys.readouterr().out
        folders = [tmp_path / "kept" / f"seed-{seed}" for seed in range(2)]
        losses = [read_metrics(folder / "metrics.jsonl")[-1]["eval/loss"] for folder in folders]
        assert losses[0] != losses[1]
        assert f": {losses[0]:.4f}, {losses[1]:.4f}; " in output
        assert re.search(r"runs inside the interval: [012] of 2", output)
        assert ("continuing" in output) == (attempt > 0)
        attempts = [(folder / "attempts.jsonl").read_text().splitlines() for folder in folders]
        assert list(map(len, attempts)) == [1, 1], "a finished run is not started again"
