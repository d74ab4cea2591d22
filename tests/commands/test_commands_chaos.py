"""`chaos` draws and places its kills by its seed, finds every violation, and rejects wrong input."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.launching import ROOT, Finished
from support.run_folders import attempt_row, training_row

from llm_pretrain.__main__ import main
from llm_pretrain.checkpoints.manifest import file_digest, read_manifest, write_manifest
from llm_pretrain.commands import _chaos_attempts, _launching, chaos
from llm_pretrain.commands import _kill_schedule as planning
from llm_pretrain.commands._chaos_attempts import (
    Attempt,
    FolderState,
    FolderVerifier,
    check_end,
    check_rows,
    check_start,
    check_stop,
    check_temporary,
    measure_durations,
    scan_folder,
)
from llm_pretrain.commands._kill_schedule import (
    MAX_KILLS_WITHOUT_SAVE,
    ChaosPlan,
    Kill,
    Target,
    choose_target,
    draw_kills,
    parse_kinds,
    required_saves,
)
from llm_pretrain.commands._launch_options import write_result
from llm_pretrain.commands._launching import LaunchContext, Machine, RunMonitor, temporary_folders
from llm_pretrain.commands.chaos import Result, next_kill, result_content, run_chaos, summary
from llm_pretrain.config import Config
from llm_pretrain.errors import ConfigError

TINY = str(ROOT / "configs" / "tiny-dense.yaml")
KINDS = [("group", None), ("rank", None), ("launcher", None)]
ALL: dict[str, Any] = {
    "paths": ["torchrun", "accelerate"],
    "kinds": KINDS,
    "world_size": 2,
    "evaluates": True,
}


def test_the_same_seed_draws_the_same_kills_and_another_seed_others():
    first, again, other = (draw_kills(50, seed, in_save=10, **ALL) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize("seed", range(5))
def test_kinds_launchers_saves_and_checkpoints_have_their_shares(seed: int):
    kills = draw_kills(50, seed, in_save=10, **ALL)
    assert sorted(Counter(kill.kind for kill in kills).values()) == [16, 17, 17]
    assert [kill.path for kill in kills] == ["torchrun", "accelerate"] * 25
    assert Counter(kill.where for kill in kills)["save"] == 10
    assert {kill.where for kill in kills} == {"save", "step", "start-up", "evaluation"}
    assert {kill.rank for kill in kills if kill.kind == "rank"} == {0, 1}
    assert {kill.rank for kill in kills if kill.kind != "rank"} == {None}
    commits = [kill.commits for kill in kills]
    assert 25 <= sum(commits) <= 30
    idle = "".join("x" if each else " " for each in commits).split("x")
    assert max(map(len, idle)) <= MAX_KILLS_WITHOUT_SAVE
    assert not any(kill.commits for kill in kills if kill.where == "start-up")


def test_a_named_rank_is_the_one_that_is_killed():
    assert parse_kinds("group, rank:1,term", 2) == [("group", None), ("rank", 1), ("term", None)]
    named: dict[str, Any] = {**ALL, "kinds": [("rank", 1)]}
    kills = draw_kills(9, 0, in_save=0, **named)
    assert {(kill.kind, kill.rank) for kill in kills} == {("rank", 1)}


def kill(where: str, *, commits: bool = False, place: float = 0.0) -> Kill:
    return Kill(1, "torchrun", "group", None, where, commits, place, 0.0)


@pytest.mark.parametrize(
    ("drawn", "checkpoint", "later", "expected"),
    [
        (kill("start-up"), 4, 0, Target("start-up")),
        (kill("step", place=0.0), 4, 0, Target("step", 5)),
        (kill("step", place=0.99), 4, 0, Target("step", 7)),
        (kill("step", commits=True), 4, 3, Target("step", 9)),  # one new checkpoint, and no more
        (kill("step", commits=True, place=0.99), 4, 0, Target("step", 19)),  # no other wants any
        (kill("save"), 4, 0, Target("save", 8)),
        (kill("save", commits=True), 4, 3, Target("save", 12)),
        (kill("save"), 16, 0, Target("save", 20)),  # the last save, where there is no other
        (kill("save", commits=True), 12, 0, Target("save", 16)),
        (kill("evaluation", commits=True), 4, 3, Target("evaluation", 10)),
        (kill("evaluation"), 4, 0, Target("step", 5)),  # step 5's own row must come first
        (kill("step", commits=True), 16, 0, Target("step", 17)),  # none is left to commit
        (kill("save", commits=True), 19, 0, Target("start-up")),  # told to stop, it went on for too long
        (kill("step"), 20, 0, Target("start-up")),
    ],
)
def test_the_target_follows_from_where_the_attempt_begins(
    drawn: Kill, checkpoint: int, later: int, expected: Target
):
    aimed = choose_target(
        drawn, checkpoint=checkpoint, steps=20, save_steps=4, eval_steps=5, later_progress=later
    )  # fmt: skip
    assert aimed == expected


@pytest.mark.parametrize("seed", range(20))
def test_every_kill_has_a_target_before_the_run_ends(seed: int):
    """Even with the fewest saves, and attempts that commit as much as they can before the kill."""
    kills = draw_kills(30, seed, in_save=8, **ALL)
    save_steps = 3
    steps, checkpoint, committed = save_steps * required_saves(kills), 0, 0
    for number, each in enumerate(kills, start=1):
        later = sum(other.makes_progress for other in kills[number:])
        target = choose_target(
            each,
            checkpoint=checkpoint,
            steps=steps,
            save_steps=save_steps,
            eval_steps=4,
            later_progress=later,
        )
        assert 0 <= target.step < steps + (target.where == "save")
        reached = max(checkpoint, (target.step - (target.where != "step")) // save_steps * save_steps)
        if each.kind == "launcher" and target.where != "start-up":  # its workers save where they are
            reached = min(target.step + 1, steps)
        committed += reached > checkpoint
        checkpoint = reached
    assert committed >= 12


def rows(steps: int, **changed: Any) -> dict[int, dict[str, Any]]:
    made = {step: training_row(step) for step in range(1, steps + 1)}
    for name, value in changed.items():
        made[3][f"train/{name}"] = value
    return made


def test_rows_may_differ_in_times_and_speeds_only():
    other = rows(6)
    for row in other.values():
        row["time"], row["perf/step_seconds"] = 1.0, 2.0
    assert check_rows(rows(6), other, steps=6) is None
    assert check_rows(rows(6), rows(4)) is None, "so far"
    assert check_rows(rows(6) | {0: {"step": 0, "eval/loss": 9.0}}, {}) is None, "died before any row"


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
        violation = check_rows(rows(6), found, steps=steps)
        assert violation is not None
        assert (violation.step, violation.key) == (3, key)
        assert "step 3" in violation.text


def test_a_different_input_is_reported_before_a_different_result():
    found = rows(6, loss=9.0)
    for made in (reference := rows(6), found):
        for step, row in made.items():
            row["data/batch_sha256"] = str(step)
    found[3]["data/batch_sha256"] = "4"
    violation = check_rows(reference, found)
    assert violation is not None
    assert violation.key == "data/batch_sha256"


def test_the_end_needs_every_row_and_zero_is_not_minus_zero():
    short = check_rows(rows(6), rows(5), steps=6)
    assert short is not None
    assert (short.step, short.key) == (6, "row")
    assert check_rows(rows(6, loss=0.0), rows(6, loss=-0.0)) is not None


def test_an_evaluation_postponed_by_a_signal_may_be_missing():
    reference = rows(6)
    reference[3]["eval/loss"] = 1.5
    assert check_rows(reference, rows(6)) is not None
    assert check_rows(reference, rows(6), owed=3) is None


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
    assert (before.checkpoint, before.rows, before.starts) == (4, 5, 1)
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
    assert check_start(folder, FolderState(checkpoint=4)) is None


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
    end = check_end(reference, folder, 6, same_call=True)
    violation = end if sound else FolderVerifier().check(folder)
    assert violation is not None
    assert text in violation.text, violation.text


def test_equal_ends_are_equal(trained_run: Finished, killed: Path):
    assert check_end(trained_run.folder, killed, 6, same_call=True) is None
    assert FolderVerifier().check(killed) is None


def test_a_tensor_changed_in_one_bit_is_named(trained_run: Finished, killed: Path):
    """Even where the manifest has the digest of the changed file."""
    path = killed / "checkpoints" / "step-00000006"
    content = read_manifest(path)
    (name,) = content.files
    changed = bytearray((path / name).read_bytes())
    changed[-1] ^= 1
    (path / name).write_bytes(changed)
    write_manifest(path, replace(content, files={name: file_digest(path / name)}))
    assert FolderVerifier().check(killed) is None
    violation = check_end(trained_run.folder, killed, 6, same_call=True)
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


def test_a_checkpoint_damaged_after_its_verification_is_found_at_the_end(killed: Path):
    sound = FolderVerifier()
    assert sound.check(killed) is None
    path = killed / "checkpoints" / "step-00000006"
    (file,) = path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    assert sound.check(killed) is None, "known to be sound"
    assert sound.check(killed, again=True) is not None


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
def test_a_temporary_folder_must_not_outlive_a_save_or_the_run(
    parent: str, trained_run: Finished, killed: Path
):
    left = killed / parent / ".step-00000006.tmp-0123abcd"
    left.mkdir()
    assert temporary_folders(killed) == [f"{parent}/{left.name}"]
    assert_violated(trained_run.folder, killed, f"{left} is left over")
    before = scan_folder(killed)
    assert check_temporary(killed, before) is None, "nothing was saved since"
    (killed / parent / "step-00000008").mkdir()
    violation = check_temporary(killed, before)
    assert violation is not None
    assert "outlived a save" in violation.text
    left.rmdir()
    assert check_temporary(killed, before) is None


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


def test_durations_are_measured_from_the_times_of_rows():
    made, now = {}, 0.0
    for step in range(1, 13):
        now += 0.5 + 2.0 * (step % 4 == 1 and step > 1) + 1.0 * (step % 5 == 0 and step != 5)
        made[step] = training_row(step) | {"time": now}
    timing = measure_durations(made, save_steps=4, eval_steps=10)
    assert (timing.step, timing.save, timing.evaluation) == (0.5, 2.0, 1.0)
    assert timing.longest_gap == 2.5


def plan_of(folder: Path, kills: list[Kill], **more: Any) -> ChaosPlan:
    fields: dict[str, Any] = {
        "config": Config(), "paths": ["torchrun"], "world_size": 1, "steps": 6, "save_steps": 2,
        "eval_steps": 0, "kills": kills, "in_save": 0, "options": [], "scripts": folder, "output": folder,
        "threads": 1, "notes": [],
    }  # fmt: skip
    return ChaosPlan(**fields | more)


def result_of(
    folder: Path, attempts: list[Any], monkeypatch: pytest.MonkeyPatch, plan: ChaosPlan
) -> tuple[Result, str]:
    """Result and output of fabricated attempts: each is a function that writes into the run's folder."""
    waiting = list(attempts)

    def run_attempt(job: Any, *_: Any) -> Attempt:
        return waiting.pop(0)(job.folder)

    monkeypatch.setattr(_chaos_attempts, "run_attempt", run_attempt)
    result, said = Result(plan.reference or folder / "reference", folder / "killed"), list[str]()
    run_chaos(plan, LaunchContext(folder, Machine(0, 2), 1.0), result, say=said.append)
    write_result(folder / "chaos.json", result_content({}, result, plan))
    return result, "\n".join([*said, *summary(result, plan)])


def to_the_end(trained: Path) -> Any:
    def end(folder: Path) -> Attempt:
        before = (folder / "metrics.jsonl").read_text() if folder.exists() else ""
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(trained, folder, symlinks=True)
        (folder / "metrics.jsonl").write_text(before + (folder / "metrics.jsonl").read_text())
        (folder / "attempts.jsonl").write_text((folder / "attempts.jsonl").read_text() * (1 + bool(before)))
        return Attempt("torchrun", 0, 6)

    return end


def died(rows_of: Path, steps: list[int], **more: Any) -> Any:
    """An attempt killed after these rows, before any save."""

    def die(folder: Path) -> Attempt:
        made = {row["step"]: row for row in Finished(0, "", rows_of).rows.values()}
        write_rows(folder, "metrics", [made[step] for step in (0, *steps)])  # evaluated before it began
        write_rows(folder, "attempts", [attempt_row(0, 0.0)])
        return Attempt("torchrun", -9, steps[-1] if steps else None, killed=True, **more)

    return die


def test_a_run_that_ends_as_the_reference_holds(
    trained_run: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    end = to_the_end(trained_run.folder)
    attempts = [end, died(trained_run.folder, [1]), end]
    result, text = result_of(tmp_path, attempts, monkeypatch, plan_of(tmp_path, [kill("step")]))
    assert result.verdict == "holds", text
    assert "1 of 1 kills (1 group), 0 in a save, 0 after a new checkpoint" in text
    content = json.loads((tmp_path / "chaos.json").read_text())
    assert (content["verdict"], content["kills"], content["violation"]) == ("holds", 1, None)
    first, second = content["attempts"]
    assert (first["killed"], first["moment"], first["began_at"]) == (True, "after step 1", 1)
    assert (second["killed"], second["last_step"], second["checkpoint_after"]) == (False, 6, 6)


def test_a_violation_ends_the_call_and_reports_kill_attempt_step_and_key(
    trained_run: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def skips(folder: Path) -> Attempt:
        return died(trained_run.folder, [1, 2, 4])(folder)

    attempts = [to_the_end(trained_run.folder), skips]
    result, text = result_of(tmp_path, attempts, monkeypatch, plan_of(tmp_path, [kill("step")] * 3))
    assert result.verdict == "violated"
    assert "kill 1, attempt 1: wrote step 4 where step 3 was due" in text
    violation = json.loads((tmp_path / "chaos.json").read_text())["violation"]
    assert (violation["where"], violation["step"], violation["key"]) == ("kill 1, attempt 1", 3, "step")


def test_a_stop_signal_that_loses_steps_is_a_violation(
    trained_run: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As where a launcher kills workers during their save. The next attempt would be exact nevertheless."""
    attempts = [to_the_end(trained_run.folder), died(trained_run.folder, [1, 2, 3])]
    stop = replace(kill("step"), kind="term")
    result, _ = result_of(tmp_path, attempts, monkeypatch, plan_of(tmp_path, [stop]))
    assert result.violation is not None
    assert "a stop signal after step 3 left step 0 as the newest checkpoint" in result.violation[1].text


def test_the_status_after_a_stop_signal_is_checked(killed: Path):
    assert check_stop(killed, 6) is None  # the last step was done
    assert check_stop(killed, None) is None
    status = json.loads((killed / "status.json").read_text())
    for state, code, problem in (("preempted", 75, False), ("running", None, True), ("failed", 71, True)):
        (killed / "status.json").write_text(json.dumps(status | {"state": state, "exit_code": code}))
        assert (check_stop(killed, 6) is not None) == problem


def test_fewer_kills_than_asked_for_are_reported_as_not_shown(
    trained_run: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    end = to_the_end(trained_run.folder)
    plan = plan_of(tmp_path, [kill("save")], in_save=1)
    result, text = result_of(tmp_path, [end, died(trained_run.folder, [1]), end], monkeypatch, plan)
    assert result.verdict == "not shown"
    assert "0 kills fell into a save, 1 were asked for" in text
    shutil.rmtree(tmp_path / "killed")
    result, text = result_of(tmp_path, [end, end], monkeypatch, plan)
    assert "the run was done after 0 of 1 kills" in text


def test_a_missed_save_is_replaced_by_a_later_one(tmp_path: Path):
    plan = plan_of(tmp_path, [kill("save"), kill("step")], in_save=1)
    result = Result(tmp_path, tmp_path)
    for _ in range(2):  # the first kill is in a save as drawn; the second, since the first missed its save
        drawn = next_kill(plan, result)
        assert drawn is not None
        assert drawn.where == "save"
        result.attempts.append(Attempt("torchrun", killed=True))
    assert next_kill(plan, result) is None


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
        (["--kills", "0"], 2, "--kills: expected 1 or more, found 0"),
        (["--kinds", "group,flood"], 2, "--kinds: expected some of group, rank, launcher, term (rank:1"),
        (["--kinds", "group:1"], 2, "found 'group:1'"),
        (["--kinds", "rank:2"], 2, "--kinds: expected ranks below the world size 2, found 2"),
        (["--in-save", "11"], 2, "--in-save: expected 0 to --kills 10, found 11"),
        (["--paths", "trainer"], 2, "--paths: expected some of torchrun, accelerate, found 'trainer'"),
        (["--world-size", "1,2"], 2, "--world-size: expected one number"),
        (["--world-size", "64"], 2, "--world-size: expected at most 4 on this machine of 2 cores"),
        (["--steps", "0"], 2, "--steps: expected 1 or more, found 0"),
        (["--save-steps", "0"], 2, "--save-steps: expected 1 or more, found 0"),
        (["--save-steps", "1"], 2, "expected saves at least two steps apart"),
        (["--steps", "8"], 2, "--steps, --save-steps: expected saves at least two steps apart, and"),
        (["--timeout", "0"], 2, "--timeout: expected more than 0 seconds"),
        (["--training.precision", "fp16"], 2, "silently train in fp32"),
        (["--scripts", "/nowhere"], 2, "--scripts /nowhere: expected train_pretrain.py"),
        (
            ["--reference", "/nowhere"],
            2,
            "--reference /nowhere: expected the folder of a run, found no config",
        ),
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


def test_a_reference_must_have_this_calls_settings(trained_run: Finished):
    config = planning._config_of(trained_run.folder)
    planning.check_reference(trained_run.folder, config, 1)
    with pytest.raises(ConfigError, match="finished 6 steps on 2 processes, found finished at step 6 on 1"):
        planning.check_reference(trained_run.folder, config, 2)
    other = replace(config, optimizer=replace(config.optimizer, learning_rate=1.0))
    with pytest.raises(ConfigError, match=r"expected optimizer\.learning_rate 1\.0"):
        planning.check_reference(trained_run.folder, other, 1)


def test_warm_up_saves_and_evaluations_are_fitted_into_a_short_run(
    plain_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import argparse

    from llm_pretrain.commands import chaos

    parser = argparse.ArgumentParser()
    chaos.add_arguments(parser)

    def plan(*words: str) -> ChaosPlan:
        sources = ["--data.sources", f"[{{store: {plain_store}}}]", "--output", str(tmp_path / "out")]
        arguments = parser.parse_args(["--config", TINY, *sources, *words])
        return planning.make_plan(arguments, Machine(0, 2))

    made = plan("--kills", "50", "--schedule.warmup_steps", "900", "--training.max_steps", "9000")
    assert (made.save_steps, made.eval_steps, made.world_size) == (4, 5, 2)
    assert 4 * required_saves(made.kills) < made.steps < 8 * required_saves(made.kills)
    assert (made.config.training.max_steps, made.config.schedule.warmup_steps) == (made.steps,) * 2
    assert made.in_save == 12
    small = plan("--kills", "3", "--steps", "12")
    assert (small.steps, small.save_steps) == (12, 2)
    own = plan("--checkpoint.save_steps", "6", "--evaluation.eval_steps", "7", "--training.max_steps", "99")
    assert (own.save_steps, own.eval_steps) == (6, 7)


def test_a_reference_that_chaos_made_has_its_settings(
    trained_run: Finished, plain_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also where `chaos` evaluated it more often, and on less, than is configured."""
    import argparse

    from llm_pretrain.commands import chaos

    parser = argparse.ArgumentParser()
    chaos.add_arguments(parser)
    own = planning._config_of(trained_run.folder)
    own = replace(own, evaluation=replace(own.evaluation, eval_steps=3, max_batches=4))
    monkeypatch.setattr(planning, "_config_of", lambda reference: own)
    checked: list[Config] = []
    monkeypatch.setattr(planning, "check_reference", lambda reference, config, size: checked.append(config))
    words = ["--config", TINY, "--data.sources", f"[{{store: {plain_store}}}]", "--kills", "1", "--seed", "2"]
    words += ["--output", str(tmp_path / "out"), "--reference", str(trained_run.folder)]
    made = planning.make_plan(parser.parse_args(words), Machine(0, 2))
    (config,) = checked
    assert (made.eval_steps, config.evaluation.eval_steps, config.evaluation.max_batches) == (3, 3, 4)
    given = parser.parse_args([*words, "--evaluation.eval_steps", "5"])
    assert planning.make_plan(given, Machine(0, 2)).eval_steps == 5


def test_a_mistyped_setting_is_reported_with_a_similar_name(capsys: pytest.CaptureFixture[str]):
    assert main(["chaos", "--config", "configs/tiny-dense.yaml", "--training.max_stepz", "3"]) == 2
    assert "training.max_stepz: no such setting; did you mean training.max_steps?" in capsys.readouterr().err
