"""`llm-pretrain plan`: the configuration that it writes runs as it is; wrong budgets are named."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from filelock import FileLock
from support.corpora import make_store
from support.fork_server import python_path
from support.ladders import make_ladder
from support.launching import ROOT
from support.run_folders import make_run, training_row

from llm_pretrain.__main__ import main
from llm_pretrain.config.loading import load_config
from llm_pretrain.config.tree import Config
from llm_pretrain.forecast import budget, planning
from llm_pretrain.forecast.ladder_runs import with_store
from llm_pretrain.forecast.points import RUNS_FOLDER, Point
from llm_pretrain.forecast.scaling_law import Fit, fit_law
from llm_pretrain.hardware import GPU_GB
from llm_pretrain.model.sizes import flops_per_token
from llm_pretrain.runs.rows import read_metrics


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A ladder on a store that exists, in one folder with the store."""
    root = tmp_path_factory.mktemp("plan")
    store = make_store(root / "store", documents=400)
    ladder = make_ladder(root / "ladder")
    dataclasses.replace(ladder, base=with_store(ladder.base, store.path), store_hash=store.hash).write()
    for rung in ladder.rungs:  # whose steps the ladder's speed is taken from
        row = training_row(1) | {"perf/step_seconds": 1e-4 * rung.hidden_size}
        make_run(root / "ladder" / RUNS_FOLDER / f"h{rung.hidden_size}", [row])
    return root


def plan(folder: Path, *options: str) -> int:
    files = ["--ladder", str(folder / "ladder"), "--output", str(folder / "night.yaml")]
    return main(["plan", *files, *options])


@pytest.fixture(autouse=True)
def few_samples(monkeypatch) -> None:
    """Of laws; a plan has hundreds, which take seconds."""
    monkeypatch.setattr(planning, "fit_law", quick_fit)


def quick_fit(points: list[Point], samples: int) -> Fit:
    return _quick_fit(tuple(points))


@functools.cache
def _quick_fit(points: tuple[Point, ...]) -> Fit:
    return fit_law(list(points), samples=4)


@pytest.fixture
def long_evaluations(monkeypatch) -> None:
    """As of a validation split of 3 M tokens."""
    monkeypatch.setattr("llm_pretrain.forecast.ladder_training.evaluated_tokens", lambda _: 3_000_000)


@pytest.mark.usefixtures("long_evaluations")
def test_flops_become_a_configuration(folder, capsys, monkeypatch):
    """Evaluations are not paid; sizes of half and twice the parameters are shown beside the best."""
    memory = psutil.virtual_memory()._replace(total=10**6)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert plan(folder, "--flops", "3e14", "--world-size", "2") == 0
    text = capsys.readouterr().out
    (warning,) = [line for line in text.splitlines() if "a step is estimated" in line]
    assert "the machine has for each process 488.3 KiB" in warning
    assert text.startswith("plan for 3e+14 FLOPs on 2 processes here, by 12 points of 4 sizes")
    assert "in 90% of runs" in text
    (compute,) = re.findall(r"compute     (\S+) FLOPs", text)
    assert float(compute) == pytest.approx(3e14, rel=0.01)
    config = load_config(["--config", str(folder / "night.yaml")], world_size=2)
    assert config.evaluation.prediction[-1].step == config.training.max_steps
    assert f"loss        {config.evaluation.prediction[-1].loss:.4f}" in text
    assert f"{config.training.max_steps:,} steps" in text
    rows = re.findall(r"([* ]) hidden +\d+ +([\d,]+) parameters .* loss ([\d.]+)", text)
    counts = [int(count.replace(",", "")) for _, count, _ in rows]
    (best,) = [k for k, (mark, _, _) in enumerate(rows) if mark == "*"]
    assert counts == sorted(counts)
    assert min(float(loss) for _, _, loss in rows) == float(rows[best][2])
    for ratio in (0.5, 2.0):
        assert min(abs(count / counts[best] / ratio - 1) for count in counts) < 0.35


def test_a_time_of_gpus_becomes_a_configuration_for_them(folder, capsys, monkeypatch):
    """A GPU computes in bf16, whatever the ladder did, and its time pays for evaluations too."""
    monkeypatch.setitem(GPU_GB, "h100", 0.001)
    options = ["--time", "1m12s", "--gpu", "H100", "--world-size", "2"]
    assert plan(folder, *options) == 0
    text = capsys.readouterr().out
    assert "plan for 1m12s on 2 x h100" in text
    assert re.search(r"compute     \S+ FLOPs, (1m11s|1m12s)", text)
    assert "warning: the run computes in bf16, the ladder in fp32" in text
    assert "a GPU has 976.6 KiB: divide the model, `llm-pretrain simulate" in text
    config = load_config(["--config", str(folder / "night.yaml")], world_size=2)
    assert config.training.precision == "bf16"


def test_nothing_is_measured_beside_another_command(folder, capsys):
    with FileLock(folder / "ladder" / ".lock"):
        assert plan(folder, "--time", "20m", "--world-size", "1") == 73
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith("expected no other command that runs in it, found one; wait for its end")


@pytest.mark.usefixtures("long_evaluations")
def test_a_time_here_is_that_of_measured_steps_and_of_evaluations(folder, capsys, monkeypatch):
    measured = list[Config]()

    def measure_steps(configs: Sequence[Config], *_: object) -> list[tuple[float, float]]:
        measured.extend(configs)
        return [(2e-4 * configs[0].model.hidden_size, 20.0)]  # twice what the ladder's runs took

    monkeypatch.setattr("llm_pretrain.forecast.ladder_training.measure_steps", measure_steps)
    assert plan(folder, "--time", "20m", "--world-size", "1") == 0
    assert re.search(r"compute     \S+ FLOPs, (19m5\ds|20m00s)\n", capsys.readouterr().out)
    config = load_config(["--config", str(folder / "night.yaml")], world_size=1)
    assert config.model.hidden_size <= measured[0].model.hidden_size
    rate = flops_per_step(measured[0]) / (2e-4 * measured[0].model.hidden_size)
    seconds = config.training.max_steps * flops_per_step(config) / rate
    evaluations = 11 * 1_000_000 * flops_per_step(config) / config.training.tokens_per_step / rate
    assert seconds + evaluations == pytest.approx(1200, rel=0.01)


def flops_per_step(config: Config) -> float:
    return flops_per_token(config.model, config.training.sequence_length) * config.training.tokens_per_step


def test_an_unfinished_ladder_is_used_and_named(folder, capsys):
    points = folder / "ladder" / "points.jsonl"
    whole = points.read_text()
    lines = whole.splitlines(keepends=True)
    decayed = [k for k, line in enumerate(lines) if json.loads(line)["decayed"]]
    try:
        points.write_text("".join(line for k, line in enumerate(lines) if k not in decayed[-2:]))
        assert plan(folder, "--flops", "3e14", "--world-size", "1") == 0
        assert "warning: hidden size 128: 2 of 3 decayed points are missing" in capsys.readouterr().out
        points.write_text("".join(line for k, line in enumerate(lines) if k not in decayed[6:]))
        assert plan(folder, "--flops", "3e14", "--world-size", "1") == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{folder / 'ladder'}: expected at least 7 points of 3 sizes for a fit, found 6 of 2" in line
    finally:
        points.write_text(whole)


@pytest.mark.slow
def test_the_configuration_runs_as_it_is(folder, tmp_path, capsys, monkeypatch):
    """Measured by steps of the planned run on two processes, then trained by the script."""
    monkeypatch.setattr(budget, "MIN_TOKENS", 1)  # in less time than that of real runs
    monkeypatch.setattr(budget, "MIN_STEPS", 1)
    assert plan(folder, "--time", "15s", "--world-size", "2") == 0
    assert "measuring steps of hidden size" in capsys.readouterr().out
    file, run = folder / "night.yaml", tmp_path / "run"
    config = load_config(["--config", str(file)], world_size=2)
    environment = os.environ | {"PYTHONPATH": python_path(ROOT), "OMP_NUM_THREADS": "1"}
    script = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "train_pretrain.py"]
    options = ["--config", str(file), "--run.output_dir", str(run)]
    subprocess.run([sys.executable, *script, *options], cwd=ROOT, env=environment, check=True)
    rows = read_metrics(run / "metrics.jsonl")
    assert rows[-1]["step"] == config.training.max_steps
    assert rows[-1]["eval/predicted_loss"] == config.evaluation.prediction[-1].loss
    assert rows[-1]["eval/predicted_low"] < rows[-1]["eval/predicted_loss"] < rows[-1]["eval/predicted_high"]


def test_a_file_of_another_is_not_replaced(folder, capsys):
    other = folder / "mine.yaml"
    other.write_text("run: {name: mine}\n")
    assert plan(folder, "--flops", "1e14", "--output", str(other)) == 73
    assert str(other) in capsys.readouterr().err
    assert other.read_text() == "run: {name: mine}\n"


WRONG: dict[str, tuple[Sequence[str], str]] = {
    "no end": (["--flops", "inf"], "--flops: expected a number above 0 up to 1e+27, found inf"),
    "too little": (["--flops", "1e6"], "expected a budget for"),
    "ranks": (["--flops", "1e14", "--world-size", "7"], "--world-size: expected a divisor of the ladder's"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_requests_take_one_line(folder, name, capsys):
    options, message = WRONG[name]
    assert plan(folder, *options) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize("is_there", [True, False])
def test_a_ladder_of_another_store_is_refused(folder, is_there, changed_store, tmp_path, capsys):
    store = str(changed_store) if is_there else "gone"
    text = (folder / "ladder" / "ladder.json").read_text()
    (tmp_path / "ladder.json").write_text(text.replace(str(folder / "store"), store))
    assert plan(folder, "--ladder", str(tmp_path), "--flops", "3e14", "--world-size", "1") == 65
    (line,) = capsys.readouterr().err.splitlines()
    assert f"error: {store}: expected the store" in line
    assert f"of the ladder in {tmp_path}, found {'' if is_there else 'none; run this where'}" in line
