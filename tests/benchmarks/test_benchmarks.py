"""The benchmarks start, are written down, and judge figures. These are never asserted: machines differ."""

from __future__ import annotations

import argparse
import math
import re
from importlib import import_module

import pytest

from benchmarks import layouts, slow_link
from benchmarks.__main__ import BENCHMARKS, quick_options
from benchmarks.measuring import ROOT, Interval, goal, interleaved
from benchmarks.startup import measured_parts
from llm_pretrain.launch.jobs import Machine

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


@pytest.mark.parametrize(("count", "rank"), [(8, 1), (9, 2), (12, 3), (15, 4), (20, 6), (30, 10), (100, 40)])
def test_ranks_are_those_of_the_sign_test(count, rank):
    # the table of the binomial distribution, e.g. Conover, Practical Nonparametric Statistics, A3
    values = [float(value) for value in range(1, count + 1)]
    found = Interval.of(values)
    assert (found.low, found.high) == (rank, count + 1 - rank)


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
    assert found.text() == "1.000 (of 6: no interval)"
    assert goal("step", found, at_most=1.1) == "goal: step at most 1.1: undecided, it takes 7 pairs"


def test_sides_take_turns_in_alternating_order():
    order: list[str] = []
    ticks = iter(range(1000))
    sides = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    times = interleaved(sides, pairs=3, warmup=1, clock=lambda: float(next(ticks)))
    assert "".join(order) in ("baabbaab", "abbaabba")
    assert times == {"a": [1.0] * 3, "b": [1.0] * 3}
