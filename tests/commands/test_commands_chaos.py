"""`chaos` kills at each place under each launcher, finds every violation, and rejects wrong input."""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.launching import ROOT, Finished
from support.run_folders import attempt_row, training_row

from llm_pretrain.__main__ import main
from llm_pretrain.audit import chaos as kills
from llm_pretrain.audit.chaos import ChaosPlan, ChaosResult, Outcome, make_plan, result_content, run_chaos
from llm_pretrain.audit.comparison import Difference, exact_differences
from llm_pretrain.audit.run_checks import (
    FolderState,
    check_committed,
    check_end,
    check_start,
    scan_folder,
)
from llm_pretrain.checkpoints.manifest import file_digest, read_manifest, write_manifest
from llm_pretrain.commands import chaos
from llm_pretrain.config.tree import Config
from llm_pretrain.launch import jobs as _launching
from llm_pretrain.launch.jobs import LaunchContext, Machine
from llm_pretrain.launch.options import write_result
from llm_pretrain.runs.monitor import RunMonitor, temporary_folders

TINY = str(ROOT / "configs" / "tiny-dense.yaml")


def rows(steps: int, **changed: Any) -> dict[int, dict[str, Any]]:
    made = {step: training_row(step) for step in range(1, steps + 1)}
    for name, value in changed.items():
        made[3][f"train/{name}"] = value
    return made


def first_difference(*rows: dict[int, dict[str, Any]], **options: Any) -> Difference | None:
    return next(exact_differences(*rows, **options), None)


def test_rows_may_differ_in_times_and_speeds_only():
    other = rows(6)
    for row in other.values():
        row["time"], row["perf/step_seconds"] = 1.0, 2.0
    assert first_difference(rows(6), other, steps=6) is None
    assert first_difference(rows(6), rows(4)) is None, "so far"
    assert first_difference(rows(6) | {0: {"step": 0, "eval/loss": 9.0}}, {}) is None, "died before any row"


@pytest.mark.parametrize(
    ("found", "key"),
    [
        (rows(6, loss=math.nextafter(rows(6)[3]["train/loss"], 9)), "train/loss"),
        (rows(6, skipped="overflow"), "train/skipped"),
        (rows(6, more=1), "train/more"),
        ({step: row for step, row in rows(6).items() if step != 3}, "row"),
        (rows(6) | {3: {k: v for k, v in rows(6)[3].items() if k != "train/tokens"}}, "train/tokens"),
    ],
)
def test_one_changed_bit_or_a_missing_step_is_found(found: dict[int, dict[str, Any]], key: str):
    for steps in (None, 6):
        violation = first_difference(rows(6), found, steps=steps)
        assert violation is not None
        assert (violation.step, violation.key) == (3, key)
        assert "step 3" in violation.text


def test_a_different_input_is_reported_before_a_different_result():
    found = rows(6, loss=9.0)
    for made in (reference := rows(6), found):
        for step, row in made.items():
            row["data/batch_sha256"] = str(step)
    found[3]["data/batch_sha256"] = "4"
    violation = first_difference(reference, found)
    assert violation is not None
    assert violation.key == "data/batch_sha256"


def test_the_end_needs_every_row_and_zero_is_not_minus_zero():
    short = first_difference(rows(6), rows(5), steps=6)
    assert short is not None
    assert (short.step, short.key) == (6, "row")
    assert first_difference(rows(6, loss=0.0), rows(6, loss=-0.0)) is not None


def test_an_evaluation_postponed_by_a_signal_may_be_missing():
    reference = rows(6)
    reference[3]["eval/loss"] = 1.5
    assert first_difference(reference, rows(6)) is not None
    assert first_difference(reference, rows(6), owed=3) is None


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
        (4, [5, 5], "wrote step 5 where step 6 was due"),
        (4, [6], "began at step 6, expected 5"),
    ],
)
def test_an_attempt_begins_after_the_newest_checkpoint_and_skips_no_step(
    start: int | None, steps: list[int], text: str | None, tmp_path: Path
):
    """Also where a start from zero repeats the right rows."""
    folder = tmp_path / "run"
    write_rows(folder, "metrics", [training_row(step) for step in range(1, 6)])
    write_rows(folder, "attempts", [attempt_row(0, 0.0)])
    (folder / "checkpoints" / "step-00000004").mkdir(parents=True)
    before = scan_folder(folder)
    assert before == FolderState(checkpoint=4, rows=5, starts=1)
    write_rows(folder, "metrics", [training_row(step) for step in steps])
    write_rows(folder, "attempts", [] if start is None else [attempt_row(start, 9.0)])
    violation = check_start(folder, before)
    assert (violation is None) == (text is None), violation
    if violation is not None:
        assert text is not None
        assert violation.text.startswith(text)


def test_a_postponed_evaluation_is_not_a_step(tmp_path: Path):
    folder = tmp_path / "run"
    (folder / "checkpoints" / "step-00000004").mkdir(parents=True)
    made = [{"step": 4, "time": 1.0, "eval/loss": 2.0}, training_row(5)]
    write_rows(folder, "metrics", made)
    write_rows(folder, "attempts", [attempt_row(4, 0.0)])
    assert check_start(folder, FolderState(4, 0, 0)) is None


@pytest.fixture
def killed(trained_run: Finished, tmp_path: Path) -> Path:
    """A copy of the trained run, under an id and a launcher of its own."""
    folder = Path(shutil.copytree(trained_run.folder, tmp_path / "killed", symlinks=True))
    for path in (folder / "checkpoints").iterdir():
        content = read_manifest(path)
        run = replace(content.run, run_id="another", launcher="accelerate", wandb_id="another")
        write_manifest(path, replace(content, run=run))
    return folder


def assert_violated(reference: Path, folder: Path, text: str, *, sound: bool = True) -> None:
    end = check_end(reference, folder, 6)
    violation = end if sound else check_committed(folder)
    assert violation is not None
    assert text in violation.text, violation.text


def test_equal_ends_are_equal(trained_run: Finished, killed: Path):
    assert check_end(trained_run.folder, killed, 6) is None
    assert check_committed(killed) is None


def test_a_tensor_changed_in_one_bit_is_named(trained_run: Finished, killed: Path):
    """Even where the manifest has the digest of the changed file."""
    path = killed / "checkpoints" / "step-00000006"
    content = read_manifest(path)
    (name,) = content.files
    changed = bytearray((path / name).read_bytes())
    changed[-1] ^= 1
    (path / name).write_bytes(changed)
    write_manifest(path, replace(content, files={name: file_digest(path / name)}))
    assert check_committed(killed) is None
    violation = check_end(trained_run.folder, killed, 6)
    assert violation is not None
    assert violation.key in content.tensors
    assert "bit for bit" in violation.text


@pytest.mark.parametrize("what", ["flipped", "cut", "no manifest", "another step"])
def test_a_damaged_checkpoint_is_found(what: str, trained_run: Finished, killed: Path):
    path = killed / "checkpoints" / "step-00000004"
    content = read_manifest(path)
    (name,) = content.files
    data = bytearray((path / name).read_bytes())
    if what == "flipped":
        data[-9] ^= 16
    (path / name).write_bytes(data[:-1] if what == "cut" else data)
    if what == "no manifest":
        (path / "manifest.json").unlink()
    if what == "another step":
        write_manifest(path, replace(content, run=replace(content.run, step=3)))
    assert_violated(trained_run.folder, killed, f"{path} is damaged", sound=False)


def test_changed_weights_a_missing_file_and_another_status_are_found(trained_run: Finished, killed: Path):
    reference, weights = trained_run.folder, killed / "weights" / "step-00000006"
    file = weights / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert_violated(reference, killed, f"{file}: expected the reference's bytes")
    file.write_bytes(data[:40])
    assert_violated(reference, killed, f"{weights} is damaged", sound=False)
    (weights / "config.json").unlink()
    assert_violated(reference, killed, "config.json differs")
    status = json.loads((killed / "status.json").read_text())
    (killed / "status.json").write_text(json.dumps(status | {"state": "running", "exit_code": None}))
    assert_violated(reference, killed, "expected finished, 0, step 6, found running")


@pytest.mark.parametrize("parent", ["checkpoints", "weights"])
def test_a_temporary_folder_must_not_outlive_the_run(parent: str, trained_run: Finished, killed: Path):
    left = killed / parent / ".step-00000006.tmp-0123abcd"
    left.mkdir()
    assert temporary_folders(killed) == [f"{parent}/{left.name}"]
    assert_violated(trained_run.folder, killed, f"{left} is left over")


def test_a_monitor_sees_rows_and_saves_of_its_own_attempt_only(tmp_path: Path):
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
        "config": Config(), "paths": ["torchrun"], "world_size": 1, "steps": 6, "save_steps": 2,
        "kill": "all", "places": places, "options": [], "scripts": folder, "output": folder, "threads": 1,
        "notes": [],
    }  # fmt: skip
    return ChaosPlan(**fields | more)


Fabricated = Callable[[Path], Outcome]
"""What an attempt leaves in the run's folder, and how it ends."""


def result_of(
    plan: ChaosPlan, attempts: list[Fabricated], monkeypatch: pytest.MonkeyPatch
) -> tuple[ChaosResult, str]:
    """Result and output of fabricated attempts; the first is the uninterrupted run."""
    waiting = list(attempts)
    monkeypatch.setattr(kills, "run_or_kill", lambda job, *_: waiting.pop(0)(job.folder))
    result, said = ChaosResult(), list[str]()
    run_chaos(plan, LaunchContext(plan.scripts, Machine(0, 2), 1.0), result, say=said.append)
    assert not waiting
    write_result(plan.output / "chaos.json", result_content({}, result, plan))
    return result, "\n".join([*said, *result.summary])


@pytest.fixture
def end(trained_run: Finished) -> Fabricated:
    """Trains to the end, from the beginning."""

    def trains(folder: Path) -> Outcome:
        before = (folder / "metrics.jsonl").read_text() if folder.exists() else ""
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(trained_run.folder, folder, symlinks=True)
        (folder / "metrics.jsonl").write_text(before + (folder / "metrics.jsonl").read_text())
        (folder / "attempts.jsonl").write_text((folder / "attempts.jsonl").read_text() * (1 + bool(before)))
        return Outcome(False, 6, None, "")

    return trains


def died(trained: Finished, steps: list[int], saving: int | None = None, failure: str = "") -> Fabricated:
    """Was killed after these rows, before any checkpoint was committed."""

    def dies(folder: Path) -> Outcome:
        write_rows(
            folder, "metrics", [trained.rows[step] for step in (0, *steps)]
        )  # evaluated before it began
        write_rows(folder, "attempts", [attempt_row(0, 0.0)])
        return Outcome(True, steps[-1] if steps else None, saving, failure)

    return dies


def test_a_run_that_ends_as_the_uninterrupted_one_holds(
    trained_run: Finished, end: Fabricated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plan = plan_of(tmp_path, ["step", "start-up", "save"], paths=["torchrun", "accelerate"])
    killed = [died(trained_run, [1]), died(trained_run, []), died(trained_run, [1, 2], saving=2)]
    result, text = result_of(plan, [end, *killed, end], monkeypatch)
    assert result.verdict == "holds", text
    assert "3/3     torchrun    save of step 2        1         -           ok" in text
    content = json.loads((tmp_path / "chaos.json").read_text())
    assert content["verdict"] == "holds"
    found = [
        (each["path"], each["place"], each["began_at"], each["checkpoint"]) for each in content["attempts"]
    ]
    assert found == [
        ("torchrun", "after step 1", 1, 0),
        ("accelerate", "start-up", 1, 0),
        ("torchrun", "save of step 2", 1, 0),
        ("accelerate", "to its end", 1, 6),
    ]


def test_a_violation_ends_the_call_and_names_attempt_step_and_key(
    trained_run: Finished, end: Fabricated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    result, text = result_of(
        plan_of(tmp_path, ["step"] * 3), [end, died(trained_run, [1, 2, 4])], monkeypatch
    )
    assert result.verdict == "violated"
    assert "attempt 1: wrote step 4 where step 3 was due" in text
    (attempt,) = json.loads((tmp_path / "chaos.json").read_text())["attempts"]
    assert (attempt["violation"]["step"], attempt["violation"]["key"]) == (3, "step")


def test_a_process_that_outlives_its_kill_and_a_failed_reference_are_violations(
    trained_run: Finished, end: Fabricated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lives = died(trained_run, [1], failure="process 7 was still there 60 s after the kill")
    result, text = result_of(plan_of(tmp_path / "a", ["step"]), [end, lives], monkeypatch)
    assert result.verdict == "violated"
    assert "attempt 1: process 7 was still there 60 s after the kill" in text
    (tmp_path / "b").mkdir()

    def fails(folder: Path) -> Outcome:
        return Outcome(False, None, None, "ended by itself with exit code 1")

    result, text = result_of(plan_of(tmp_path / "b", ["step"]), [fails], monkeypatch)
    assert result.verdict == "violated"
    assert "the uninterrupted run: ended by itself with exit code 1" in text


def test_less_than_asked_for_is_reported_as_not_shown(
    trained_run: Finished, end: Fabricated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    late = died(trained_run, [1])
    result, text = result_of(plan_of(tmp_path / "a", ["start-up"]), [end, late, end], monkeypatch)
    assert result.verdict == "not shown"
    assert "kill 1 was to fall into: start-up" in text
    result, text = result_of(plan_of(tmp_path / "b", ["step"]), [end, end], monkeypatch)
    assert result.verdict == "not shown"
    assert "the run was done after 0 of 1 kills" in text


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("something was launched")

    monkeypatch.setattr(_launching.subprocess, "Popen", started)
    monkeypatch.setattr(chaos, "this_machine", lambda: Machine(gpus=0, cores=2))


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["--paths", "trainer"], 2, "--paths: expected some of torchrun, accelerate, found 'trainer'"),
        (["--world-size", "1,2"], 2, "--world-size: expected one number"),
        (["--world-size", "64"], 2, "--world-size: expected at most 4 on this machine of 2 cores"),
        (["--steps", "0"], 2, "and 8 of them, one for each kill and two more, found --steps 0"),
        (["--steps", "15"], 2, "found --steps 15 with a save every 2; --steps 16 would do"),
        (
            ["--checkpoint.save_steps", "1"],
            2,
            "--checkpoint.save_steps: expected saves at least two steps apart",
        ),
        (["--training.precision", "fp16"], 2, "silently train in fp32"),
        (["--data.sources", "[{store: /nowhere}]"], 65, "/nowhere"),
    ],
)
def test_wrong_input_is_one_line_before_anything_is_launched(
    words: list[str],
    code: int,
    expected: str,
    plain_store: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    output = tmp_path / "output"
    sources = ["--data.sources", f"[{{store: {plain_store}}}]"]
    assert main(["chaos", "--config", TINY, "--output", str(output), *sources, *words]) == code
    printed = capsys.readouterr()
    assert expected in printed.err
    assert len(printed.err.strip().splitlines()) == 1
    assert "Traceback" not in printed.err
    assert not output.exists()


def plan_from(words: list[str], store: Path, folder: Path) -> ChaosPlan:
    parser = argparse.ArgumentParser()
    chaos.add_arguments(parser)
    own = ["--config", TINY, "--data.sources", f"[{{store: {store}}}]", "--output", str(folder / "out")]
    return make_plan(parser.parse_args([*own, *words]), Machine(0, 2))


def test_each_launcher_is_killed_once_at_each_place(plain_store: Path, tmp_path: Path):
    plan = plan_from([], plain_store, tmp_path)
    paths = [plan.paths[number % len(plan.paths)] for number in range(len(plan.places))]
    assert paths == ["torchrun", "accelerate"] * 3, "each continues the other's run"
    assert len(set(zip(plan.places, paths, strict=True))) == 6
    assert plan_from(["--paths", "accelerate"], plain_store, tmp_path).places == ["step", "start-up", "save"]


def test_warm_up_saves_and_evaluations_are_fitted_into_a_short_run(plain_store: Path, tmp_path: Path):
    def fitted(*words: str) -> tuple[int, int, int, int | None]:
        plan = plan_from(list(words), plain_store, tmp_path)
        evaluation = plan.config.evaluation
        assert plan.steps == plan.config.training.max_steps
        assert plan.config.schedule.warmup_steps <= plan.steps
        assert plan.save_steps == plan.config.checkpoint.save_steps
        return plan.steps, plan.save_steps, evaluation.eval_steps, evaluation.max_batches

    assert fitted("--schedule.warmup_steps", "900", "--training.max_steps", "9000") == (32, 4, 5, 4)
    assert fitted("--paths", "torchrun") == (20, 4, 5, 4)
    assert fitted("--steps", "16") == (16, 2, 3, 4)
    own = ("--checkpoint.save_steps", "6", "--evaluation.eval_steps", "7", "--evaluation.max_batches", "1")
    assert fitted(*own) == (48, 6, 7, 1)


def test_a_mistyped_setting_is_reported_with_a_similar_name(capsys: pytest.CaptureFixture[str]):
    assert main(["chaos", "--config", "configs/tiny-dense.yaml", "--training.max_stepz", "3"]) == 2
    assert "training.max_stepz: no such setting; did you mean training.max_steps?" in capsys.readouterr().err
