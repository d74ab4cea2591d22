"""`replay` finds what was not trained, names it, and plans a run's steps as they were launched."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.corruption_plan import gradient
from support.forked_replay import CONTEXT, content_of, copy_of, rewrite_checkpoint, rewrite_rows, run_replay
from support.launching import train_tiny

from llm_pretrain.__main__ import main
from llm_pretrain.audit.comparison import tensor_difference
from llm_pretrain.audit.replay import verdict_of
from llm_pretrain.audit.segment_comparison import SegmentResult, compare_segment, inexact_because
from llm_pretrain.audit.segments import ReplayPlan, make_plan
from llm_pretrain.checkpoints.manifest import read_manifest, write_manifest
from llm_pretrain.commands import replay
from llm_pretrain.commands.replay import render
from llm_pretrain.errors import ConfigError
from llm_pretrain.launch.jobs import Machine
from llm_pretrain.runs.rows import rows_of
from llm_pretrain.training.step import Step
from train_pretrain import TorchrunEngine

STEPS = (
    *("--model.hidden_size", "32", "--training.max_steps", "12", "--schedule.warmup_steps", "2"),
    *("--checkpoint.save_steps", "4"),
)
OPTIONS = (
    *(*STEPS, "--checkpoint.keep_last", "9"),
    *("--evaluation.eval_steps", "6", "--evaluation.max_batches", "1"),
)
PREDICTED = json.dumps([{"step": step, "loss": 2.0, "low": 1.0, "high": 3.0 + step} for step in (3, 12)])
CHECKED = (
    *STEPS,
    *("--checkpoint.keep_last", "2", "--training.check_every", "2", "--logging.logging_steps", "5"),
    *("--evaluation.eval_steps", "6", "--evaluation.max_batches", "1", "--evaluation.prediction", PREDICTED),
)
GATE = "model.layers.0.self_attn.q_proj.weight"
MOMENT = f"optimizer.state.{GATE}.exp_avg"


@pytest.fixture(scope="module")
def honest(plain_store, tmp_path_factory) -> Path:
    """Twelve steps with checkpoints after 4, 8 and 12."""
    return train_tiny(plain_store, tmp_path_factory.mktemp("honest") / "run", *OPTIONS).folder


@pytest.fixture
def run(honest, tmp_path) -> Path:
    return copy_of(honest, tmp_path / "run")


def plan_of(run: Path, *options: str) -> ReplayPlan:
    parser = argparse.ArgumentParser()
    replay.add_arguments(parser)
    return make_plan(parser.parse_args([str(run), *options]), Machine(0, 2))


def spans_of(plan: ReplayPlan) -> list[tuple[int, int]]:
    return [(each.start, each.end) for each in plan.segments]


# --- what is planned ----------------------------------------------------------------------------------


def test_a_segments_steps_are_launched_as_they_were(run):
    plan = plan_of(run)
    assert [each.source and each.source.name for each in plan.segments] == [
        None, "step-00000004", "step-00000008",
    ]  # fmt: skip
    assert (plan.steps, plan.of, plan.seed) == (12, 3, None)
    leg = plan.segments[0].legs[0]
    assert (leg.path, leg.world_size, leg.config.distributed.cpu_threads) == ("torchrun", 1, 1)
    assert leg.config.training.max_steps == 12, "the schedule depends on it"


def deleted(step: int) -> Callable[[Path], object]:
    return lambda run: (run / "checkpoints" / f"step-{step:08d}").rename(run / "elsewhere")


CUTS: dict[str, tuple[Callable[[Path], object], list[tuple[int, int]]]] = {
    "whole": (lambda run: None, [(0, 4), (4, 8), (8, 12)]),
    "a checkpoint is deleted": (deleted(4), [(0, 8), (8, 12)]),
    "rows after the last checkpoint": (deleted(12), [(0, 4), (4, 8), (8, 12)]),
    "a damaged manifest ends a segment and begins none": (
        lambda run: (run / "checkpoints" / "step-00000008" / "manifest.json").write_text("{"),
        [(0, 4), (4, 8), (4, 12)],
    ),
}


@pytest.mark.parametrize("name", CUTS)
def test_a_run_is_cut_at_its_kept_checkpoints(name, run):
    change, spans = CUTS[name]
    change(run)
    plan = plan_of(run)
    assert spans_of(plan) == spans
    assert (plan.segments[-1].target is None) == (name == "rows after the last checkpoint")


def test_a_part_begins_at_the_checkpoint_before_it(run):
    deleted(4)(run)
    plan = plan_of(run, "--from", "5", "--to", "10")
    assert spans_of(plan) == [(0, 8), (8, 10)]
    assert plan.segments[-1].target is None, "no checkpoint of step 10: its rows alone"
    assert any("--from 5: from step 0" in note for note in plan.notes)


def test_a_sample_is_drawn_from_its_seed(run):
    plans = [plan_of(run, "--sample", "2", "--seed", str(seed)) for seed in (*range(8), 0)]
    assert all(len(plan.segments) == 2 and plan.of == 3 for plan in plans)
    assert spans_of(plans[0]) == spans_of(plans[-1])
    assert len({tuple(spans_of(plan)) for plan in plans}) > 1
    drawn = plan_of(run, "--sample", "9")
    assert len(drawn.segments) == 3
    assert any(f"--seed {drawn.seed}" in note for note in drawn.notes)


def add_attempt(run: Path, step: int, **changes: Any) -> None:
    """A second attempt on record that began after a step, of whose rows it wrote those after it."""
    file, metrics = run / "attempts.jsonl", run / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    size = sum(len(line.encode()) for line in lines if json.loads(line)["step"] <= step)
    row = json.loads(file.read_text().splitlines()[0])
    settings = changes.pop("settings", {})
    for section, values in settings.items():
        row["config"][section] |= values
    file.write_text(
        file.read_text() + json.dumps(row | {"step": step, "metrics_bytes": size, **changes}) + "\n"
    )


def test_each_step_is_launched_as_its_attempt_was(run):
    add_attempt(run, 6, launcher="accelerate", world_size=2)
    legs = plan_of(run).segments[1].legs
    assert [(leg.first, leg.last, leg.path, leg.world_size) for leg in legs] == [
        (5, 6, "torchrun", 1),
        (7, 8, "accelerate", 2),
    ]
    forced = plan_of(run, "--launcher", "torchrun", "--world-size", "1").segments[1].legs
    assert [(leg.first, leg.last) for leg in forced] == [(5, 8)], "equal attempts are one"
    add_attempt(run, 7, settings={"optimizer": {"learning_rate": 1e-3}})
    last = plan_of(run).segments[1].legs[-1]
    assert (last.first, last.config.optimizer.learning_rate, last.world_size) == (8, 1e-3, 1)


def test_a_beginning_that_is_not_there_is_not_replayed(run):
    file = run / "attempts.jsonl"
    row = json.loads(file.read_text())
    row["step"], row["config"]["checkpoint"]["resume"] = 2, "/gone/checkpoints/step-00000002"
    file.write_text(json.dumps(row) + "\n")
    first, second, _ = plan_of(run).segments
    assert (first.start, first.end, first.legs) == (2, 4, ())
    assert "another run's checkpoint" in first.missing
    assert second.legs


# --- what is compared ---------------------------------------------------------------------------------


def compare(run: Path, replayed: Path, number: int = 1, **environment: Any) -> SegmentResult:
    """The run's segment of this number against another run's folder as its replay."""
    plan = plan_of(run)
    segment = plan.segments[number]
    then = dict(segment.legs[0].attempt.environment)
    rows = {step: row for step, row in rows_of(replayed).items() if segment.start < step <= segment.end}
    return compare_segment(segment, rows, plan.rows(segment), replayed, [then | environment])


Change = Callable[[Path], object]


def rows_changed(change: Callable[[dict[str, Any]], object], step: int | None = None) -> Change:
    """Of a step, or all rows of training."""

    def is_meant(row: dict[str, Any]) -> bool:
        return "train/loss" in row and step in (None, row["step"])

    return lambda run: rewrite_rows(run, lambda row: change(row) if is_meant(row) else None)


def other_value(key: str) -> Change:
    def change(row: dict[str, Any]) -> None:
        row[key] = row[key] + 1 if isinstance(row[key], float | int) else "other"

    return rows_changed(change, 6)


def loss_times(factor: float, step: int | None = None) -> Change:
    return rows_changed(lambda row: row.update({"train/loss": row["train/loss"] * factor}), step)


def without_row(run: Path) -> None:
    file = run / "metrics.jsonl"
    rows = [line for line in file.read_text().splitlines(keepends=True) if json.loads(line)["step"] != 7]
    file.write_text("".join(rows))


def element(name: str) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[3] += 0.25

    return lambda run: rewrite_checkpoint(run, 8, change)


def manifest_numbers(run: Path) -> None:
    folder = run / "checkpoints" / "step-00000008"
    manifest = read_manifest(folder)
    name = next(iter(manifest.scalars))
    scalars = manifest.scalars | {name: manifest.scalars[name] | {"value": 99}}
    write_manifest(folder, replace(manifest, scalars=scalars, run=replace(manifest.run, tokens_seen=1)))


def cut_checkpoint(run: Path) -> None:
    (file,) = (run / "checkpoints" / "step-00000008").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])


COLUMNS = ("train/loss", "train/learning_rate", "eval/loss", "data/batch_sha256", "train/skipped", "moe/load")
EXACT = ("data/batch_sha256", "train/learning_rate", "train/tokens")
"""On other hardware too."""
NEARLY = 1 + 3e-7
OTHER_TIMES = rows_changed(lambda row: row.update({"time": 0.0, "perf/step_seconds": 9.0}))
Found = tuple[Change, bool, str, tuple[int, str] | None, str]
CHANGES: dict[str, Found] = {
    "times": (OTHER_TIMES, False, "identical", None, ""),
    **{f"{key} of a step": (other_value(key), False, "differs", (6, key), key) for key in COLUMNS},
    "a row is missing": (without_row, False, "differs", (7, "row"), "differ first at step 7"),
    **{
        f"an element of {name}": (
            *(element(name), False, "differs", None),
            f"{name}: 1 of 1,024 elements, at most 0.25 apart",
        )
        for name in (GATE, MOMENT)
    },
    "numbers of the manifest": (manifest_numbers, False, "differs", None, "tokens_seen"),
    "a damaged checkpoint": (cut_checkpoint, False, "differs", None, "is damaged"),
    "a loss by less than its bound": (loss_times(NEARLY), False, "differs", (5, "train/loss"), ""),
    "nothing, on other hardware": (OTHER_TIMES, True, "identical", None, ""),
    "a loss by less than its bound, on other hardware": (loss_times(NEARLY), True, "within bound", None, ""),
    "a loss by more, on other hardware": (loss_times(1 + 3e-5, 7), True, "differs", (7, "train/loss"), ""),
    **{f"{key}, on other hardware": (other_value(key), True, "differs", (6, key), "") for key in EXACT},
    "another checkpoint, on other hardware": (
        lambda run: rewrite_checkpoint(run, 8, lambda tensors: tensors[GATE].add_(1e-2)),
        *(True, "differs", (8, "parameters"), ""),
    ),
}
"""What changes -> how, whether the hardware is another, the verdict, the first difference, what is said."""


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_is_found_and_told_from_rounding(name, run, honest):
    change, is_elsewhere, verdict, first, said = CHANGES[name]
    change(run)
    result = compare(run, honest, **({"device": "another processor"} if is_elsewhere else {}))
    assert (result.verdict, result.rows) == (verdict, 4)
    assert (result.first and (result.first.step, result.first.key)) == first
    assert said in render([result])
    assert result.compared is None or result.compared > 50
    assert len(result.tensors) == name.startswith("an element")
    if verdict == "within bound":
        assert 0 < result.largest["train/loss"] < 1e-6
        assert "device was" in result.note


def test_the_sign_of_zero_and_a_nan_are_differences():
    zero = torch.zeros(2)
    assert not tensor_difference(zero, zero.clone())
    for other, apart in ((-0.0, "0"), (torch.nan, "inf")):
        found = tensor_difference(zero, torch.tensor([0.0, other]))
        assert found == f"1 of 2 elements, at most {apart} apart"


def test_an_evaluation_that_a_stop_signal_ended_is_not_missed(run, honest):
    """The next attempt would write it; the checkpoint says so. Without that, it is missing."""

    def without_evaluation(row: dict[str, Any]) -> None:
        for key in [key for key in row if key.startswith("eval/") and row["step"] == 12]:
            del row[key]

    rewrite_rows(run, without_evaluation)
    assert compare(run, honest, number=2).verdict == "differs"
    folder = run / "checkpoints" / "step-00000012"
    manifest = read_manifest(folder)
    extra = manifest.run.extra | {"evaluation_owed": True, "evaluation": {}, "evaluation_step": 6}
    write_manifest(folder, replace(manifest, run=replace(manifest.run, extra=extra)))
    assert compare(run, honest, number=2).verdict == "identical"


def test_a_checkpoint_deleted_meanwhile_is_not_compared(run, honest, tmp_path):
    """Neither identical nor a difference."""
    plan = plan_of(run)
    segment = plan.segments[1]
    (run / "checkpoints" / "step-00000008").rename(tmp_path / "elsewhere")
    rows = {step: row for step, row in rows_of(honest).items() if 4 < step <= 8}
    then = dict(segment.legs[0].attempt.environment)
    result = compare_segment(segment, rows, plan.rows(segment), honest, [then])
    assert (result.verdict, result.first) == ("not compared", None)
    assert "was deleted meanwhile" in result.note


def test_a_segment_with_a_rollback_is_not_replayed(run, tmp_path):
    rewrite_rows(run, lambda row: row.update({"train/skipped": "rollback"}) if row["step"] == 6 else None)
    plan = plan_of(run, "--output", str(tmp_path / "out"))
    result = replay.replay_segment(plan, plan.segments[1], CONTEXT)
    assert result.verdict == "not replayed"
    assert "step 6 was rolled back" in result.note


def test_why_bits_are_not_promised(run):
    leg = plan_of(run).segments[0].legs[0]
    same = dict(leg.attempt.environment)
    assert inexact_because(leg, same) == []
    assert inexact_because(replace(leg, path="accelerate"), same) == [], "both launchers have the same bits"
    assert inexact_because(leg, same | {"torch": "9"})
    assert inexact_because(leg, same | {"cpu_threads": "7"})
    assert inexact_because(replace(leg, world_size=2), same)
    sharded = replace(leg.config, distributed=replace(leg.config.distributed, strategy="fsdp"))
    assert inexact_because(replace(leg, config=sharded), same)
    on_gpu: dict[str, Any] = {**same, "cpu_capability": None}
    assert any("deterministic" in reason for reason in inexact_because(leg, on_gpu))


def test_less_than_asked_for_is_no_success(run):
    plan = plan_of(run)
    done = [SegmentResult("identical", segment=each) for each in plan.segments]
    assert verdict_of(plan, done) == "holds"
    assert (
        verdict_of(plan, [*done[:2], SegmentResult("not replayed", segment=plan.segments[2])]) == "not shown"
    )
    assert verdict_of(plan, done[:2]) == "not shown", "a signal ended the call"
    assert verdict_of(plan, [*done[:2], SegmentResult("differs", segment=plan.segments[2])]) == "violated"


def test_the_verdict_is_written_into_the_run_unless_it_is_not_to(run, tmp_path, monkeypatch):
    monkeypatch.setattr(
        replay, "replay_segment", lambda plan, each, context: SegmentResult("identical", segment=each)
    )
    before = content_of(run)
    call = ["replay", str(run), "--sample", "2", "--seed", "1", "--output"]
    assert main([*call, str(tmp_path / "1"), "--no-record"]) == 0
    assert content_of(run) == before
    assert main([*call, str(tmp_path / "2")]) == 0
    recorded = json.loads((run / "replays.jsonl").read_text())
    assert (recorded["verdict"], recorded["seed"], recorded["segments_of_run"]) == ("holds", 1, 3)


# --- what is found in whole calls ---------------------------------------------------------------------


def found(result: dict[str, Any]) -> list[tuple[str, int | None, str | None]]:
    return [
        (
            each["verdict"],
            *((first["step"], first["key"]) if (first := each["first_difference"]) else (None, None)),
        )
        for each in result["segments"]
    ]


def test_a_changed_row_and_a_changed_checkpoint_are_told_apart(run, tmp_path, capsys):
    """The checkpoint is found by the segment that ends in it and by the one that begins at it."""
    rewrite_rows(run, lambda row: row.update({"train/loss": 1.0}) if row["step"] == 3 else None)
    rewrite_checkpoint(run, 8, lambda tensors: tensors[GATE].mul_(1.5))
    before = content_of(run)
    code, result = run_replay(run, tmp_path / "out")
    after = content_of(run)
    (recorded,) = map(json.loads, after.pop("replays.jsonl").splitlines())
    status, ended = json.loads(after.pop("status.json")), json.loads(before.pop("status.json"))
    assert after == before, "the run's folder is only read, but for the verdict"
    lines = status.pop("replays")["differences"]
    assert status == ended
    assert lines[0] == "steps 1-4 differ, first at step 3: train/loss"
    assert lines[1].startswith(f"steps 5-8 differ, first at step 8: {GATE}")
    assert [each["verdict"] for each in recorded["segments"]] == ["differs"] * 3
    assert (recorded["verdict"], recorded["launchers"], recorded["world_sizes"], recorded["seed"]) == (
        "violated", ["torchrun"], [1], None,
    )  # fmt: skip
    assert (code, result["verdict"]) == (1, "violated")
    first, middle, last = found(result)
    assert (first, middle) == (("differs", 3, "train/loss"), ("differs", None, None))
    assert last[:2] == ("differs", 9)
    assert [each["other_rows"] for each in result["segments"]] == [[3], [], [9, 10, 11, 12]]
    assert [len(each["tensors"]) for each in result["segments"][:2]] == [0, 1]
    printed = capsys.readouterr().out
    assert "steps 1-4 differ first at step 3 train/loss" in printed
    assert "the run is NOT what its settings, data and seed give" in printed


@pytest.mark.slow
def test_steps_that_were_applied_twice_are_found(plain_store, tmp_path, monkeypatch):
    """With the numbers in the files that an honest run would have: `verify` has nothing to object to."""
    with monkeypatch.context() as patch:
        original = TorchrunEngine.train_step

        def train_step(self: Any, given: Any) -> None:
            original(self, given)
            if 5 <= given.decide.progress.step + 1 <= 8:
                original(self, Step.begin(given.micro_batches, self, given.decide))

        patch.setattr(TorchrunEngine, "train_step", train_step)
        run = train_tiny(plain_store, tmp_path / "run", *OPTIONS).folder
    code, result = run_replay(run, tmp_path / "out")
    assert code == 1
    first, middle, last = found(result)
    assert (first, middle) == (("identical", None, None), ("differs", 6, "train/loss"))
    assert last == ("identical", None, None), "trained as it says, from a state that is not"
    assert result["segments"][1]["tensors"], "the checkpoint after them is another"


@pytest.fixture(scope="module")
def checked(plain_store, tmp_path_factory) -> Path:
    """Rows of steps 5 and 10; a fault at step 8 went away when the step was computed again."""
    with pytest.MonkeyPatch.context() as patch:
        gradient(8, 1)(patch, TorchrunEngine)
        return train_tiny(plain_store, tmp_path_factory.mktemp("checked") / "run", *CHECKED).folder


def test_nothing_to_compare_is_not_identical(checked, tmp_path):
    """A step without row and checkpoint shows nothing; only it is trained, not the steps up to a row."""
    assert any("train/check" in row for row in rows_of(checked).values())
    code, result = run_replay(checked, tmp_path / "part", "--from", "8", "--to", "9", "--no-record")
    assert code
    (segment,) = result["segments"]
    assert (segment["verdict"], segment["rows"], segment["compared"]) == ("not compared", 0, None)
    replayed = tmp_path / "part" / "steps-9-9"
    assert not any("train/loss" in row for row in rows_of(replayed).values()), "it ended before step 10"
    with pytest.raises(ConfigError, match="outside of the run"):
        plan_of(checked, "--output", str(checked / "again"))


def test_a_run_with_a_fault_that_went_away_is_identical(checked, tmp_path, capsys):
    """At a step off the logging interval: `verify` names it, and no row is another."""
    (fault,) = json.loads((checked / "status.json").read_text())["faults"]
    assert (fault["step"], fault["transient"]) == (8, True)
    code, result = run_replay(checked, tmp_path / "whole", "--no-record")
    assert (code, result["verdict"]) == (0, "holds")
    assert {each["verdict"] for each in result["segments"]} == {"identical"}
    rows = rows_of(checked)
    assert [step for step, row in rows.items() if "train/loss" in row] == [5, 10]
    assert [rows[step]["eval/predicted_high"] for step in (6, 12)] == [9.0, 15.0], "replayed too"
    capsys.readouterr()
    main(["verify", str(checked), "--json"])
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [each["name"] for each in checks if each["result"] == "failed"] == ["computed twice"]
