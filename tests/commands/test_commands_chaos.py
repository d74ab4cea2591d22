"""`chaos` kills at each place under each launcher, finds every violation, and rejects wrong input."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.finished_runs import FinishedRun
from support.launching import ROOT
from support.run_folders import attempt_row, training_row

from llm_pretrain.audit import chaos as kills
from llm_pretrain.audit.chaos import ChaosPlan, ChaosResult, Outcome, make_plan, result_content, run_chaos
from llm_pretrain.audit.comparison import Difference, exact_differences
from llm_pretrain.audit.run_checks import FolderState, check_committed, check_end, check_start, scan_folder
from llm_pretrain.checkpoints.manifest import file_digest, read_manifest, write_manifest
from llm_pretrain.commands import chaos
from llm_pretrain.config.tree import Config
from llm_pretrain.launch.jobs import LaunchContext, Machine
from llm_pretrain.launch.options import write_result
from llm_pretrain.runs.monitor import RunMonitor, temporary_folders

SHA = "data/batch_sha256"
TINY = str(ROOT / "configs" / "tiny-dense.yaml")


def rows(steps: int, **changed: Any) -> dict[int, dict[str, Any]]:
    made = {step: training_row(step) | {SHA: str(step)} for step in range(1, steps + 1)}
    for name, value in changed.items():
        made[3][f"train/{name}"] = value
    return made


def first_difference(*rows: dict[int, dict[str, Any]], **options: Any) -> Difference | None:
    return next(exact_differences(*rows, **options), None)


CHANGED: dict[str, tuple[dict[int, dict[str, Any]], str]] = {
    "a bit": (rows(6, loss=math.nextafter(rows(6)[3]["train/loss"], 9)), "train/loss"),
    "a row less": ({step: row for step, row in rows(6).items() if step != 3}, "row"),
    "a column less": (
        rows(6) | {3: {k: v for k, v in rows(6)[3].items() if k != "train/tokens"}},
        "train/tokens",
    ),
    "an input before a result": (rows(6, loss=9.0) | {3: rows(6, loss=9.0)[3] | {SHA: "4"}}, SHA),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_row_is_found(name):
    found, key = CHANGED[name]
    for steps in (None, 6):
        violation = first_difference(rows(6), found, steps=steps)
        assert violation is not None
        assert (violation.step, violation.key) == (3, key)
        assert "step 3" in violation.text


def test_rows_may_differ_in_times_and_speeds_and_end_earlier():
    other = rows(6)
    for row in other.values():
        row["time"], row["perf/step_seconds"] = 1.0, 2.0
    assert first_difference(rows(6), other, steps=6) is None
    assert first_difference(rows(6), rows(4)) is None, "so far"
    assert first_difference(rows(6) | {0: {"step": 0, "eval/loss": 9.0}}, {}) is None, "died before any row"
    other = rows(6)
    other[3]["eval/loss"] = 1.5
    assert first_difference(other, rows(6)) is not None
    assert first_difference(other, rows(6), owed=3) is None, "postponed by a signal"


def write_rows(folder: Path, name: str, made: list[dict[str, Any]]) -> None:
    folder.mkdir(exist_ok=True)
    with (folder / f"{name}.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in made)


@pytest.mark.parametrize(
    ("start", "steps", "text"),
    [
        (4, [5, 6], None),
        (4, [], None),
        (None, [], None),  # died before it knew
        (0, [1, 2], "began at step 1, expected 5 after the checkpoint of step 4"),
        (0, [], "began at step 1, expected 5"),  # it had not written a row yet
        (2, [3, 4], "began at step 3, expected 5"),  # an older checkpoint
        (4, [5, 7], "wrote step 7 where step 6 was due"),
    ],
)
def test_an_attempt_begins_after_the_newest_checkpoint_and_skips_no_step(start, steps, text, tmp_path):
    """Also where a start from zero repeats the right rows."""
    folder = tmp_path / "run"
    write_rows(folder, "metrics", [training_row(step) for step in range(1, 6)])
    write_rows(folder, "attempts", [attempt_row(0, 0.0)])
    (folder / "checkpoints" / "step-00000004").mkdir(parents=True)
    before = scan_folder(folder)
    assert before == FolderState(checkpoint=4, rows=5, starts=1)
    if start == 4:  # a postponed evaluation is no step
        write_rows(folder, "metrics", [{"step": 4, "time": 1.0, "eval/loss": 2.0}])
    write_rows(folder, "metrics", [training_row(step) for step in steps])
    write_rows(folder, "attempts", [] if start is None else [attempt_row(start, 9.0)])
    violation = check_start(folder, before)
    assert (violation is None) == (text is None), violation
    if violation is not None:
        assert text is not None
        assert violation.text.startswith(text)


@pytest.fixture
def killed(trained_run, tmp_path) -> Path:
    """A copy of the trained run, under an id and a launcher of its own."""
    folder = Path(shutil.copytree(trained_run.folder, tmp_path / "killed", symlinks=True))
    for path in (folder / "checkpoints").iterdir():
        content = read_manifest(path)
        run = replace(content.run, run_id="another", launcher="accelerate", wandb_id="another")
        write_manifest(path, replace(content, run=run))
    return folder


def test_equal_ends_are_equal(trained_run, killed):
    assert check_end(trained_run.folder, killed, 4) is None
    assert check_committed(killed) is None


Damage = Callable[[Path], object]
MIDDLE, LAST = "checkpoints/step-00000002", "checkpoints/step-00000004"
WEIGHTS = "weights/step-00000004"


def flip_a_bit(run: Path, name: str) -> None:
    (file,) = (run / name).glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def cut_weights(run: Path) -> None:
    (file,) = (run / WEIGHTS).glob("*.safetensors")
    os.truncate(file, 40)


def with_its_digest(run: Path) -> None:
    """One bit of a tensor, for which the manifest vouches."""
    flip_a_bit(run, LAST)
    content = read_manifest(run / LAST)
    (name,) = content.files
    write_manifest(run / LAST, replace(content, files={name: file_digest(run / LAST / name)}))


def another_step(run: Path) -> None:
    content = read_manifest(run / MIDDLE)
    write_manifest(run / MIDDLE, replace(content, run=replace(content.run, step=1)))


def running(run: Path) -> None:
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps(status | {"state": "running", "exit_code": None}))


DAMAGES: dict[str, tuple[Damage, bool, str]] = {
    "a tensor in one bit": (with_its_digest, True, "bit for bit"),
    "a checkpoint in one bit": (lambda run: flip_a_bit(run, MIDDLE), False, f"{MIDDLE} is damaged"),
    "another step": (another_step, False, f"{MIDDLE} is damaged"),
    "other weights": (
        lambda run: flip_a_bit(run, WEIGHTS), True, ".safetensors: expected the reference's bytes"
    ),
    "cut weights": (cut_weights, False, f"{WEIGHTS} is damaged"),
    "no config.json": (lambda run: (run / WEIGHTS / "config.json").unlink(), True, "config.json differs"),
    "another status": (running, True, "expected finished, 0, step 4, found running"),
    "a temporary checkpoint": (
        lambda run: (run / "checkpoints" / ".step-00000004.tmp-0123abcd").mkdir(), True, "is left over"
    ),
}  # fmt: skip
"""What is done to the killed run, whether its ends are compared with the reference, and what is said."""


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damage_is_named(name, trained_run, killed):
    damage, compared, text = DAMAGES[name]
    damage(killed)
    violation = check_end(trained_run.folder, killed, 4) if compared else check_committed(killed)
    assert violation is not None
    assert text in violation.text, violation.text
    if name == "a tensor in one bit":
        assert violation.key in read_manifest(killed / LAST).tensors
        assert check_committed(killed) is None
    assert len(temporary_folders(killed)) == (name == "a temporary checkpoint")


def test_a_monitor_sees_rows_and_saves_of_its_own_attempt_only(tmp_path):
    folder = tmp_path / "run"
    (folder / "checkpoints" / ".step-00000004.tmp-aa").mkdir(parents=True)
    write_rows(folder, "metrics", [training_row(step) for step in (1, 2)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "trai')
    monitor = RunMonitor(folder)
    monitor.update()
    assert (monitor.last_step, monitor.step_being_saved()) == (None, None)
    whole = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)[:2]
    (folder / "metrics.jsonl").write_text("".join(whole))  # as the next attempt cuts a torn row
    monitor.update()
    write_rows(folder, "metrics", [{"step": 2, "time": 0.0, "eval/loss": 1.0}, training_row(3)])
    (folder / "weights" / ".step-00000008.tmp-bb").mkdir(parents=True)
    monitor.update()
    assert (monitor.last_step, monitor.step_being_saved()) == (3, 8)
    assert monitor.temporary_folders() == ["weights/.step-00000008.tmp-bb"]


def plan_of(folder: Path, places: list[str], **more: Any) -> ChaosPlan:
    fields: dict[str, Any] = {
        "config": Config(), "paths": ["torchrun"], "world_size": 1, "steps": 4, "save_steps": 2,
        "kill": "all", "places": places, "options": [], "scripts": folder, "output": folder, "threads": 1,
        "notes": [],
    }  # fmt: skip
    return ChaosPlan(**fields | more)


Fabricated = Callable[[Path, FinishedRun], Outcome]
"""What an attempt leaves in the run's folder, by the rows of a finished run, and how it ends."""


def end(folder: Path, trained: FinishedRun) -> Outcome:
    """Trains to the end, from the beginning."""
    before = (folder / "metrics.jsonl").read_text() if folder.exists() else ""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(trained.folder, folder, symlinks=True)
    (folder / "metrics.jsonl").write_text(before + (folder / "metrics.jsonl").read_text())
    (folder / "attempts.jsonl").write_text((folder / "attempts.jsonl").read_text() * (1 + bool(before)))
    return Outcome(False, 4, None, "")


def died(steps: list[int], saving: int | None = None, failure: str = "") -> Fabricated:
    """Was killed after these rows, before any checkpoint was committed."""

    def dies(folder: Path, trained: FinishedRun) -> Outcome:
        rows = [trained.rows[step] for step in (0, *steps)]  # evaluated before it began
        write_rows(folder, "metrics", rows)
        write_rows(folder, "attempts", [attempt_row(0, 0.0)])
        return Outcome(True, steps[-1] if steps else None, saving, failure)

    return dies


def fails(folder: Path, trained: FinishedRun) -> Outcome:
    return Outcome(False, None, None, "ended by itself with exit code 1")


@pytest.fixture
def result_of(trained_run, monkeypatch) -> Callable[[ChaosPlan, list[Fabricated]], tuple[ChaosResult, str]]:
    """Result and output of fabricated attempts; the first is the uninterrupted run."""

    def run(plan: ChaosPlan, attempts: list[Fabricated]) -> tuple[ChaosResult, str]:
        waiting = list(attempts)
        monkeypatch.setattr(kills, "run_or_kill", lambda job, *_: waiting.pop(0)(job.folder, trained_run))
        result, said = ChaosResult(), list[str]()
        run_chaos(plan, LaunchContext(plan.scripts, Machine(0, 2), 1.0), result, say=said.append)
        assert not waiting
        write_result(plan.output / "chaos.json", result_content({}, result, plan))
        return result, "\n".join([*said, *result.summary])

    return run


def test_a_run_that_ends_as_the_uninterrupted_one_holds(result_of, tmp_path):
    plan = plan_of(tmp_path, ["step", "start-up", "save"], paths=["torchrun", "accelerate"])
    result, text = result_of(plan, [end, died([1]), died([]), died([1, 2], saving=2), end])
    assert result.verdict == "holds", text
    assert "3/3     torchrun    save of step 2        1         -           ok" in text
    content = json.loads((tmp_path / "chaos.json").read_text())
    assert content["verdict"] == "holds"
    keys = ("path", "place", "began_at", "checkpoint")
    assert [tuple(each[key] for key in keys) for each in content["attempts"]] == [
        ("torchrun", "after step 1", 1, 0),
        ("accelerate", "start-up", 1, 0),
        ("torchrun", "save of step 2", 1, 0),
        ("accelerate", "to its end", 1, 4),
    ]


ENDS: list[tuple[str, list[Fabricated], str, str]] = [
    ("step", [end, died([1, 2, 4])], "violated", "attempt 1: wrote step 4 where step 3 was due"),
    ("step", [end, died([1], failure="process 7 is still there")], "violated", "1: process 7 is still there"),
    ("step", [fails], "violated", "the uninterrupted run: ended by itself with exit code 1"),
    ("start-up", [end, died([1]), end], "not shown", "kill 1 was to fall into: start-up"),
    ("step", [end, end], "not shown", "the run was done after 0 of 1 kills"),
]


@pytest.mark.parametrize(("place", "attempts", "verdict", "said"), ENDS, ids=[each[3] for each in ENDS])
def test_a_violation_and_less_than_asked_for_are_named(result_of, tmp_path, place, attempts, verdict, said):
    result, text = result_of(plan_of(tmp_path, [place]), attempts)
    assert result.verdict == verdict
    assert said in text
    if "was due" in said:
        (attempt,) = json.loads((tmp_path / "chaos.json").read_text())["attempts"]
        assert (attempt["violation"]["step"], attempt["violation"]["key"]) == (3, "step")


def plan_from(words: list[str], store: Path, folder: Path) -> ChaosPlan:
    parser = argparse.ArgumentParser()
    chaos.add_arguments(parser)
    own = ["--config", TINY, "--data.sources", f"[{{store: {store}}}]", "--output", str(folder / "out")]
    return make_plan(parser.parse_args([*own, *words]), Machine(0, 2))


def test_each_launcher_is_killed_once_at_each_place(plain_store, tmp_path):
    plan = plan_from([], plain_store, tmp_path)
    paths = [plan.paths[number % len(plan.paths)] for number in range(len(plan.places))]
    assert paths == ["torchrun", "accelerate"] * 3, "each continues the other's run"
    assert len(set(zip(plan.places, paths, strict=True))) == 6
    assert plan_from(["--paths", "accelerate"], plain_store, tmp_path).places == ["step", "start-up", "save"]


def test_warm_up_saves_and_evaluations_are_fitted_into_a_short_run(plain_store, tmp_path):
    def fitted(*words: str) -> tuple[int, int, int, int | None]:
        plan = plan_from(list(words), plain_store, tmp_path)
        evaluation = plan.config.evaluation
        assert plan.steps == plan.config.training.max_steps
        assert plan.config.schedule.warmup_steps <= plan.steps
        assert plan.save_steps == plan.config.checkpoint.save_steps
        return plan.steps, plan.save_steps, evaluation.eval_steps, evaluation.max_batches

    assert fitted("--schedule.warmup_steps", "900", "--training.max_steps", "9000") == (32, 4, 5, 4)
    assert fitted("--steps", "16") == (16, 2, 3, 4)
    own = ("--checkpoint.save_steps", "6", "--evaluation.eval_steps", "7", "--evaluation.max_batches", "1")
    assert fitted(*own) == (48, 6, 7, 1)
