"""A ladder's table and its use of compute, from files as its runs write them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from support.presets import preset

from llm_pretrain.errors import ConfigError, DataError
from llm_pretrain.forecast.family import Sizes
from llm_pretrain.forecast.ladder_runs import LadderRun, ladder_runs, run_config, run_folder
from llm_pretrain.forecast.measurements import (
    diverged_sizes,
    flops_per_second,
    measured_points,
    read_ladder,
    read_progress,
)
from llm_pretrain.forecast.points import Ladder, Rung, Training, write_points
from llm_pretrain.model.sizes import count_parameters, flops_per_token


@pytest.fixture
def ladder(tmp_path) -> Ladder:
    """Three sizes of a mixture of experts, without any run."""
    branches = {size: (first, 2 * first, 3 * first) for size, first in ((32, 40), (64, 20), (96, 12))}
    rungs = tuple(Rung(size, each) for size, each in branches.items())
    return Ladder(tmp_path, preset("tiny-moe"), "a" * 64, 5000, rungs, "1e12", 1)


def write_rows(folder: Path, rows: list[dict[str, Any]], *, state: str = "finished") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "status.json").write_text(json.dumps({"state": state, "step": rows[-1]["step"]}))


def finish(ladder: Ladder, run: LadderRun, loss: float | None = 5.0) -> None:
    """Evaluations at every branch step and at the run's end."""
    first = next(rung for rung in ladder.rungs if rung.hidden_size == run.hidden_size).branches[0]
    steps = [run.end] if run.begin else [0, first // 2, *range(first, run.end + 1, first)]
    rows = [{"step": step, "time": 1.0 + step, "eval/loss": loss, "perf/step_seconds": 0.5} for step in steps]
    write_rows(run_folder(ladder, run), rows)


def test_the_table_has_every_evaluation_from_the_first_branch_on(ladder):
    for run in ladder_runs(ladder.rungs):
        finish(ladder, run)
    ladder.write()
    write_points(ladder.folder, measured_points(ladder))
    found = read_ladder(ladder.folder)
    assert dataclasses.replace(found, points=()) == ladder
    assert len(found.points) == 3 * (3 + 3)
    assert min(point.tokens for point in found.points) == 12 * ladder.base.training.tokens_per_step
    first, last = found.points[0], found.points[-1]
    assert (first.hidden_size, first.decayed, last.hidden_size, last.decayed) == (32, False, 96, True)
    for point in found.points:
        config = run_config(ladder, LadderRun(point.hidden_size, 0, ladder.rungs[0].branches[-1]))
        model = config.model
        assert point.parameters == count_parameters(model).active
        assert point.flops == flops_per_token(model, 64) * point.tokens
    assert last.tokens == ladder.rungs[-1].steps[-1] * ladder.base.training.tokens_per_step
    largest = Sizes(ladder.base).of(96).step_flops
    assert flops_per_second(ladder) == pytest.approx(largest / 0.5)
    for run in ladder_runs(ladder.rungs):
        file = run_folder(ladder, run) / "metrics.jsonl"
        file.write_text(file.read_text().replace('"perf/step_seconds": 0.5', '"perf/step_seconds": 0.7'))
    assert tuple(measured_points(ladder)) == found.points, "no time is in the table"


@pytest.mark.parametrize("state", ["diverged", "finished"])
def test_a_size_that_diverges_is_left_out(ladder, state):
    runs = ladder_runs(ladder.rungs)
    for run in runs:
        finish(ladder, run)
    row = {"step": runs[-1].end, "time": 1.0, "eval/loss": None if state == "finished" else 4.0}
    write_rows(run_folder(ladder, runs[-1]), [row], state=state)
    assert diverged_sizes(ladder) == [96]
    assert {point.hidden_size for point in measured_points(ladder)} == {32, 64}
    assert read_progress(run_folder(ladder, runs[-1])).has_ended(runs[-1].end)


@pytest.mark.parametrize("step", [None, "80", 79, 20])
def test_a_run_has_ended_only_at_its_last_step_with_its_evaluation(ladder, step):
    run = LadderRun(64, 0, 80)
    folder = run_folder(ladder, run)
    assert not read_progress(folder).has_ended(80)
    finish(ladder, dataclasses.replace(run, end=20) if step == 20 else run)
    assert read_progress(folder).has_ended(20 if step == 20 else 80)
    (folder / "status.json").write_text(json.dumps({"state": "finished", "step": step}))
    assert not read_progress(folder).has_ended(80)


def test_a_run_is_the_member_at_the_bases_rates_with_its_own_schedule(ladder):
    stable, decay = (run_config(ladder, run) for run in (LadderRun(32, 0, 160), LadderRun(32, 40, 50)))
    assert stable.optimizer.learning_rate == ladder.base.optimizer.learning_rate
    assert stable.optimizer.base_hidden_size == 64
    assert (stable.schedule.name, stable.training.max_steps) == ("constant", 160)
    assert stable.checkpoint.save_steps == 40
    assert (decay.schedule.name, decay.schedule.decay_steps, decay.training.max_steps) == ("wsd", 10, 50)
    assert decay.checkpoint.resume.endswith("runs/h32/checkpoints/step-00000040")
    assert decay.schedule.warmup_steps == stable.schedule.warmup_steps == 4
    schedule = dataclasses.replace(ladder.base.schedule, warmup_steps=20)
    long = dataclasses.replace(ladder, base=dataclasses.replace(ladder.base, schedule=schedule))
    assert long.rungs[0].steps[0] == 80
    for run in (LadderRun(32, 0, 120), LadderRun(32, 120, 240)):
        assert run_config(long, run).schedule.warmup_steps == 8, "a tenth of the shortest run"


def test_what_is_no_ladder_is_named(ladder):
    with pytest.raises(ConfigError, match=r"expected a ladder's folder, with ladder\.json"):
        read_ladder(ladder.folder)
    ladder.write()
    file = ladder.folder / "points.jsonl"
    file.write_text('{"hidden_size": 3}\n')
    with pytest.raises(DataError, match=r"points\.jsonl:1: parameters: expected an integer, found nothing"):
        read_ladder(ladder.folder)
    plan = ladder.folder / "ladder.json"
    plan.write_text(plan.read_text().replace('"rungs"', '"rings"'))
    with pytest.raises(DataError, match=r"ladder\.json: rings: no such entry"):
        read_ladder(ladder.folder)


DAMAGE: dict[str, tuple[str, object]] = {
    "a budget that is no text": ("budget", 5),
    "a base of another time": ("base", {"model": {"hidden_sizes": 3}}),
    "a size of another family": ("rungs", [{"hidden_size": 33, "branches": [1]}]),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_plan_is_named_with_its_file(ladder, name):
    ladder.write()
    file = ladder.folder / "ladder.json"
    key, value = DAMAGE[name]
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(DataError, match=r"ladder\.json: .*expected"):
        read_ladder(ladder.folder)


@pytest.mark.parametrize(("key", "value"), [("tokens", 0), ("loss", float("nan"))])
def test_a_point_that_cannot_be_is_named_with_its_line(ladder, key, value):
    ladder.write()
    others = {"loss": 6.0, "bits_per_byte": None, "decayed": True}
    size = Sizes(ladder.base).of(32)
    first, second = (
        dataclasses.asdict(Training.of(size, steps, ladder.unique_tokens)) | others for steps in (1, 2)
    )
    file = ladder.folder / "points.jsonl"
    file.write_text(json.dumps(first) + "\n")
    assert len(read_ladder(ladder.folder).points) == 1
    file.write_text(json.dumps(first) + "\n" + json.dumps(second | {key: value}) + "\n")
    with pytest.raises(DataError, match=r"points\.jsonl:2: .*expected"):
        read_ladder(ladder.folder)
