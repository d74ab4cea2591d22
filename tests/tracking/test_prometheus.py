"""The example that hands the figures of runs to Prometheus, scraped and as a file for the node exporter."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.launching import ROOT
from support.run_folders import attempt_row, make_run, training_row

LABELS = ("run", "state", "source", "layer")
SCRIPT = ROOT / "examples/prometheus_exporter.py"


@pytest.fixture
def runs(tmp_path) -> Path:
    evaluation = {"step": 2, "eval/loss": 2.75, "eval/source/code/loss": 2.5, "eval/source/prose/loss": None}
    rows = [training_row(1), training_row(2), evaluation]
    make_run(tmp_path / "runs/mixture", rows, attempts=[attempt_row(0, 0)], state="running", step=2)
    make_run(
        tmp_path / "runs/done", [training_row(7)], attempts=[attempt_row(0, 0)], state="finished", step=7
    )
    return tmp_path / "runs"


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Values by metric and labels that are not empty, as Prometheus reads them."""
    return {
        (sample.name, *filter(None, map(sample.labels.get, LABELS))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_scrape_has_the_newest_figures_of_every_run(runs):
    command = [sys.executable, SCRIPT, runs, runs / "later", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            address = process.stdout.readline().strip()  # type: ignore[union-attr]  # a pipe

            def scrape() -> dict[tuple[str, ...], float]:
                return samples(urllib.request.urlopen(address, timeout=60).read().decode())

            mixture, done, first = str(runs / "mixture"), str(runs / "done"), scrape()
            assert first["llm_pretrain_state", mixture, "running"] == 1
            assert first["llm_pretrain_state", done, "finished"] == 1
            assert (first["llm_pretrain_step", mixture], first["llm_pretrain_step", done]) == (2, 7)
            assert first["llm_pretrain_train_loss", mixture] == training_row(2)["train/loss"]
            assert first["llm_pretrain_eval_loss", mixture] == 2.75
            assert first["llm_pretrain_eval_source_loss", mixture, "code"] == 2.5
            assert ("llm_pretrain_eval_source_loss", mixture, "prose") not in first
            with (runs / "mixture/metrics.jsonl").open("a") as file:
                file.write(
                    json.dumps(training_row(3) | {"moe/layer_1/dead_experts": 4}) + '\n{"step": 4, "tra'
                )
            make_run(runs / "later", [training_row(1)], state="running")
            second = scrape()
            assert second["llm_pretrain_step", mixture] == 3
            assert second["llm_pretrain_moe_layer_dead_experts", mixture, "1"] == 4
            assert second["llm_pretrain_eval_loss", mixture] == 2.75
            assert second["llm_pretrain_step", str(runs / "later")] == 1
        finally:
            process.terminate()


def test_a_file_for_the_node_exporter_has_the_same(runs, tmp_path):
    file = tmp_path / "llm.prom"
    with subprocess.Popen([sys.executable, SCRIPT, runs / "done", "--textfile", file]) as process:
        try:
            while not file.exists() and process.poll() is None:
                time.sleep(0.05)
            found = samples(file.read_text())
        finally:
            process.terminate()
    assert found["llm_pretrain_step", str(runs / "done")] == 7
    assert all(re.fullmatch(r"llm_pretrain_[a-z_]+", name) for name, *_ in found)
