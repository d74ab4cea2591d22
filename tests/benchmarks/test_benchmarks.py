"""The benchmarks start, are written down, and judge figures. These are never asserted: machines differ."""

from __future__ import annotations

import argparse
import math
import random
import re
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import psutil
import pytest

from benchmarks import __main__ as program
from benchmarks import layouts, reporting, slow_link
from benchmarks.__main__ import BENCHMARKS, main, quick_options
from benchmarks.measuring import ROOT, Interval, Spread, goal, interleaved, ratio
from benchmarks.reporting import SkippedError
from benchmarks.startup import import_costs, measured_parts
from llm_pretrain.errors import ConfigError
from llm_pretrain.forecast import budget, family, planning
from llm_pretrain.launch.jobs import Machine
from llm_pretrain.runs.rows import read_metrics

RESULTS = (ROOT / "docs" / "benchmarks.md").read_text()


@pytest.mark.parametrize("name", BENCHMARKS)
def test_each_name_runs_with_default_options_and_is_documented(name):
    module = import_module(f"benchmarks.{name}")
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    parser.parse_args([])
    parser.parse_args(quick_options(name))
    assert callable(module.run)
    assert f"python -m benchmarks {name}" in RESULTS


def test_no_benchmark_is_left_out_of_the_list():
    runnable = {
        path.stem
        for path in Path(ROOT / "benchmarks").glob("*.py")
        if "def add_arguments(" in path.read_text()
    }
    assert runnable | {"gpu"} == set(BENCHMARKS)


def test_an_unknown_name_is_a_usage_error(capsys):
    assert main(["speed"]) == 2
    assert "startup" in capsys.readouterr().err


def test_without_namespaces_the_slow_link_is_skipped_with_one_line(monkeypatch, capsys):
    monkeypatch.setattr(slow_link, "why_not", lambda: "needs root on Linux: network namespaces")
    assert main(["slow_link"]) == 0
    (line,) = [each for each in capsys.readouterr().out.splitlines() if each.startswith("skipped")]
    assert line.startswith("skipped  slow_link: needs root on Linux: network namespaces; it makes two")


def test_what_travels_is_predicted_from_the_sizes_of_collectives(plain_store):
    found = {way: slow_link.predicted_bytes(way, plain_store) for way in slow_link.WAYS}
    parameters = found["ddp"] / 1.5
    assert found["hsdp"] == pytest.approx(parameters)
    assert 2.25 * parameters < found["fsdp"] < 3 * parameters
    trips = {way: slow_link.predicted_round_trips(way) for way in slow_link.WAYS}
    assert trips["hsdp"] < trips["fsdp"]


def test_each_published_layout_is_a_run_on_its_processes(plain_store, tmp_path):
    settings = ["--optimizer.learning_rate", "3e-3"]
    plan = layouts.plan_layouts(layouts.PUBLISHED, Machine(0, 2), plain_store, tmp_path, settings)
    assert plan.config.optimizer.learning_rate == 3e-3
    assert len(plan.variants) == 18
    for layout, variant in zip(layouts.PUBLISHED, plan.variants, strict=True):
        assert (variant.path, variant.mesh, variant.precision) == ("torchrun", layout.mesh, "fp32")
        named = [int(size) for size in re.findall(r"(?:fsdp|pp|cp|tp)(\d)", layout.name)]
        assert variant.world_size == layout.world_size == math.prod(named)
        copies = math.prod(map(int, re.findall(r"fsdp(\d)", layout.name)))
        assert copies * variant.accumulation * variant.micro_batch_size == 8


@pytest.mark.parametrize(
    ("gpus", "settings", "error", "said"),
    [
        (4, [], SkippedError, "needs 8 GPUs, found 4"),
        (0, ["--model.num_hidden_layers", "4"], ConfigError, r"1x1\+pp8 W=8 is left out"),
        (0, ["--training.global_batch_size", "12"], ConfigError, "to divide .* 12, found .* = 8"),
    ],
)
def test_a_layout_that_cannot_be_is_named(gpus, settings, error, said, plain_store, tmp_path):
    with pytest.raises(error, match=said):
        layouts.plan_layouts(layouts.PUBLISHED, Machine(gpus, 2), plain_store, tmp_path, settings)


@pytest.mark.slow
def test_an_interrupted_slow_link_leaves_nothing_behind(plain_store):
    """Ctrl-C amid training: no namespace, no device, no process."""
    if reason := slow_link.why_not():
        pytest.skip(reason)
    command = [sys.executable, "-m", "benchmarks", "slow_link", "--ways", "ddp", "--steps", "1000"]
    process = subprocess.Popen(
        [*command, "--store", str(plain_store)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # a suite in the background inherits that it is ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509
    )

    def trains_in_both(children: list[psutil.Process]) -> bool:
        return sum("--node_rank" in words for each in children if (words := words_of(each))) == 2

    deadline = time.monotonic() + 300
    while not trains_in_both(children := psutil.Process(process.pid).children(recursive=True)):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    (link,) = [words for each in children if "two_machines.py" in " ".join(words := words_of(each))]
    names = [word for word in link if word.startswith("machine")]
    assert all(name in namespaces() for name in names)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert b"KeyboardInterrupt" in output
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive
    assert not any(name in namespaces() for name in names)


def words_of(process: psutil.Process) -> list[str]:
    """The command of a process; none if it has gone."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def namespaces() -> list[str]:
    return [line.split()[0] for line in subprocess.check_output(["ip", "netns"], text=True).splitlines()]


def test_quick_stands_for_the_same_after_a_name(monkeypatch):
    ran: list[list[str]] = []
    monkeypatch.setattr(program, "_run", lambda name, options: ran.append([name, *options]) or 0)
    assert main(["startup", "--quick", "--pairs", "9"]) == 0
    assert ran == [["startup", *quick_options("startup"), "--pairs", "9"]]


def test_a_part_that_fails_keeps_no_other_from_running(monkeypatch):
    started: list[str] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        name = command[3]
        assert command[4:] == quick_options(name)
        started.append(name)
        return subprocess.CompletedProcess(command, int(name == "startup"))

    monkeypatch.setattr(subprocess, "run", run)
    assert main(["all", "--quick"]) == 1
    assert started == list(BENCHMARKS)


def test_a_spread_is_median_and_extremes():
    assert Spread.of([3.0, 1.0, 2.0, 10.0]) == Spread(2.5, 1.0, 10.0)
    assert Spread(2.5, 1.0, 10.0).text("ms", 1) == "2.5 ms (1.0 to 10.0)"


def test_import_costs_are_summed_by_package():
    trace = (
        "import time:       200 |        500 |   torch.nn.modules\nimport time:  100 | 100 | torch.nn\nnoise"
    )
    assert import_costs(trace)["torch.nn"] == pytest.approx(300e-6)


@pytest.mark.slow
def test_the_parts_of_a_start_are_those_of_the_loop(plain_store):
    """They are measured by names of the loop's own functions, which may move."""
    found = measured_parts("tiny-dense", plain_store, "--training.precision", "fp32")
    assert list(found["cpu"]) == [
        *("interpreter", "import torch", "other imports", "config", "data", "model", "optimizer"),
        *("first step", "the rest"),
    ]
    assert min(found["cpu"].values()) > 0
    assert found["after_imports"] > 0


def test_of_seven_values_the_interval_is_their_extremes():
    assert Interval.of([7.0, 1.0, 3.0, 2.0, 5.0, 4.0, 6.0]) == Interval(4.0, 1.0, 7.0, 7)


@pytest.mark.parametrize(("count", "rank"), [(8, 1), (9, 2), (12, 3), (15, 4), (20, 6), (30, 10), (100, 40)])
def test_ranks_are_those_of_the_sign_test(count, rank):
    # the table of the binomial distribution, e.g. Conover, Practical Nonparametric Statistics, A3
    values = [float(value) for value in range(1, count + 1)]
    found = Interval.of(values)
    assert (found.low, found.high) == (rank, count + 1 - rank)


@pytest.mark.parametrize("count", [7, 12, 20])
def test_the_interval_holds_the_median_of_a_skewed_distribution(count):
    drawn = random.Random(0)
    found = [Interval.of(drawn.expovariate(1.0) for _ in range(count)) for _ in range(2000)]
    share = sum(each.low <= math.log(2) <= each.high for each in found) / len(found)
    assert share >= 0.94


def test_a_goal_is_judged_by_the_worse_end():
    found = Interval(1.0, 0.9, 1.2, 9)
    assert found.meets(at_most=1.2)
    assert not found.meets(at_most=1.1)
    assert found.meets(at_least=0.9)
    assert not found.meets(at_least=0.95)
    assert goal("step", found, at_most=1.1) == "goal: step at most 1.1: MISSED by the worse end, 1.200"


def test_too_few_pairs_meet_no_goal():
    found = Interval.of([1.0] * 6)
    assert not found.meets(at_most=100.0)
    assert not found.meets(at_least=0.0)
    assert found.text() == "1.000 (of 6: no interval)"
    assert goal("step", found, at_most=1.1) == "goal: step at most 1.1: undecided, it takes 7 pairs"


def test_sides_take_turns_in_alternating_order():
    order: list[str] = []
    ticks = iter(range(1000))
    sides = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    times = interleaved(sides, pairs=3, warmup=1, clock=lambda: float(next(ticks)))
    assert "".join(order) in ("baabbaab", "abbaabba")
    assert times == {"a": [1.0] * 3, "b": [1.0] * 3}


def test_a_slow_spell_falls_on_both_sides_of_a_ratio():
    times = [1.0] * 5 + [9.0] * 5
    assert ratio([2 * each for each in times], times) == Interval(2.0, 2.0, 2.0, 10)


def test_a_part_ends_with_rows_of_one_form(capsys):
    reporting.begin("some_part --pairs 7")
    assert not reporting.report("step", Interval(1.0, 0.9, 1.2, 9), at_most=1.1)
    assert reporting.report("speed", Interval(5.0, 4.0, 6.0, 9), unit="GB/s", digits=1, at_least=3)
    reporting.end()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| s")]
    assert [row.count("|") for row in rows] == [7, 7]
    assert "| ≤ 1.1 | 1.000 (0.900 to 1.200): **missed** |" in rows[0]
    assert "| speed | ≥ 3 GB/s | 5.0 GB/s (4.0 to 6.0) | the same |" in rows[1]


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
