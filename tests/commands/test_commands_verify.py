"""`verify` passes what training wrote, and each of its checks fails for one deliberate damage."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.corpora import make_store
from support.forked_replay import rewrite_checkpoint, rewrite_rows
from support.launching import train_tiny

import train_pretrain
from llm_pretrain.__main__ import main
from llm_pretrain.audit import checkpoint_checks as checkpoint_checks
from llm_pretrain.data.sample_order import SampleOrder

SHORT = (
    *("--training.sequence_length", "32", "--evaluation.max_batches", "1", "--schedule.warmup_steps", "2"),
    *("--model.hidden_size", "32"),
)


def verify(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, dict]]:
    capsys.readouterr()
    code = main(["verify", str(folder), "--json", *options])
    printed = json.loads(capsys.readouterr().out)
    assert (code == 0) == printed["ok"]
    return code, {check["name"]: check for check in printed["checks"]}


def results(outcomes: dict[str, dict], result: str) -> set[str]:
    return {name for name, check in outcomes.items() if check["result"] == result}


@pytest.fixture(scope="module")
def whole(masked_store, tmp_path_factory) -> Path:
    """Twelve steps, a row for each, saved after 5, 10 and 12; the first checkpoint is pruned."""
    folder = tmp_path_factory.mktemp("verify") / "run"
    every = ("--training.max_steps", "12", "--checkpoint.save_steps", "5", "--evaluation.eval_steps", "6")
    digest = ("--logging.parameters_sha256", "true")
    return train_tiny(masked_store, folder, *SHORT, *every, *digest).folder


@pytest.fixture
def run(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def test_a_whole_run_passes_every_check(whole, capsys):
    code, outcomes = verify(whole, capsys)
    assert code == 0
    assert results(outcomes, "ok") == set(outcomes)
    assert "12 of 12 rows, 12 steps" in outcomes["samples"]["looked_at"]
    assert "bit for bit" in outcomes["weights step-00000012"]["looked_at"]
    assert "each the checkpoint's" in outcomes["weights best"]["looked_at"]
    assert main(["verify", str(whole), "--samples", "3"]) == 0
    printed = capsys.readouterr().out
    assert "3 of 12 rows, 3 steps assembled again (evenly chosen" in printed
    assert f"{len(outcomes)} ok, 0 failed, 0 skipped" in printed.splitlines()[-1]


# --- one damage each ---------------------------------------------------------------------------------


def rewrite_row(run: Path, step: int, change: Callable[[dict], object]) -> None:
    rewrite_rows(run, lambda row: change(row) if row["step"] == step and "train/loss" in row else None)


def rewrite_json(file: Path, change: Callable[[dict], None]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


Damage = Callable[[Path], object]
LAST, TENTH = "checkpoints/step-00000012", "checkpoints/step-00000010"
NORM = "model.norm.weight"


def row(step: int, change: dict | Callable[[dict], object]) -> Damage:
    function = change if callable(change) else lambda content: content.update(change)
    return lambda run: rewrite_row(run, step, function)


def json_file(name: str, changes: dict) -> Damage:
    return lambda run: rewrite_json(run / name, lambda content: content.update(changes))


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    return lambda run: rewrite_checkpoint(run, 12, change)


def setting(old: str, new: str) -> Damage:
    def replace_setting(run: Path) -> None:
        text = (run / "config.yaml").read_text()
        assert text.count(old) == 1
        (run / "config.yaml").write_text(text.replace(old, new))

    return replace_setting


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)


def other_digest(content: dict) -> None:
    digest = content["data/batch_sha256"]
    content["data/batch_sha256"] = digest[:-1] + "0123456789abcdef"[(int(digest[-1], 16) + 1) % 16]


def without_row(step: int) -> Damage:
    def remove(run: Path) -> None:
        file = run / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(line for line in lines if json.loads(line)["step"] != step))

    return remove


def nan_in(content: dict[str, torch.Tensor], name: str) -> None:
    content[name].view(-1)[3] = math.nan


def nan_weights(run: Path) -> None:
    file = run / "weights" / "best" / "model.safetensors"
    content = load_file(file)
    nan_in(content, NORM)
    save_file(content, file, metadata={"format": "pt"})


def half_a_line(run: Path) -> None:
    file = run / "metrics.jsonl"
    lines = file.read_bytes().split(b"\n")
    lines[4] = lines[4][:50]
    file.write_bytes(b"\n".join(lines))


def other_value_without_digest(run: Path) -> None:
    rewrite_checkpoint(run, 12, lambda each: each[NORM].add_(0.1))
    rewrite_row(run, 12, lambda content: content.pop("train/parameters_sha256"))


def shard(run: Path) -> Path:
    return next((run / TENTH).glob("*.safetensors"))


TENTH_CHECK, LAST_CHECK = {"checkpoint step-00000010"}, {"checkpoint step-00000012"}
DAMAGES: dict[str, tuple[Damage, set[str], str]] = {
    "a flipped bit": (lambda run: flip_a_bit(shard(run)), TENTH_CHECK, "SHA-256"),
    "a tensor less": (tensors(lambda each: each.pop(NORM)), LAST_CHECK, f"{NORM}: expected shape [32]"),
    "one value of a checkpoint": (
        tensors(lambda each: each[NORM].add_(0.1)), LAST_CHECK, "as train/parameters_sha256 of step 12"
    ),
    "one value of a checkpoint, without a digest in its row": (
        other_value_without_digest, {"weights step-00000012", "weights best"}, NORM
    ),
    "another digest of the parameters": (
        row(10, {"train/parameters_sha256": "0" * 64}), TENTH_CHECK, "as train/parameters_sha256 of step 10"
    ),
    "another config.json": (
        json_file("weights/step-00000010/config.json", {"rope_theta": 5.0}),
        {"weights step-00000010"},
        "rope_theta",
    ),
    "another run's checkpoints": (
        json_file(".llm_pretrain.json", {"id": "0"}), TENTH_CHECK | LAST_CHECK, "found another run's"
    ),
    "NaN in weights": (nan_weights, {"weights best"}, f"{NORM}: expected finite values"),
    "another best loss": (
        json_file("weights/best/best.json", {"eval/loss": 1.0}), {"weights best"}, "eval/loss"
    ),
    "another sample hash": (row(7, other_digest), {"samples"}, "step 7"),
    "a step missing": (without_row(7), {"rows"}, "step 7"),
    "the last step missing": (without_row(12), {"rows", "weights best"}, "step 12"),
    "loss tokens off": (row(7, {"train/loss_tokens": 5}), {"samples"}, "step 7"),
    "a checkpoint's tokens off": (row(10, {"train/tokens": 5}), {"samples", *TENTH_CHECK}, "step 10"),
    "tokens that are no number": (row(7, {"train/tokens": "many"}), {"samples"}, "step 7"),
    "half a line": (half_a_line, {"rows"}, "metrics.jsonl:5"),
    "another order of samples": (
        setting("packing: best_fit\n", "packing: concat\n"),
        {"data", "samples", *TENTH_CHECK, *LAST_CHECK},
        "data.packing",
    ),
    "a step beyond all": (row(12, {"step": 1 << 62}), {"rows"}, "expected steps up to training.max_steps 12"),
    "no attempts": (lambda run: (run / "attempts.jsonl").unlink(), {"rows"}, "attempts.jsonl"),
    "no configuration": (
        lambda run: (run / "config.yaml").write_text("model: [what"),
        {"config.yaml"},
        "config.yaml",
    ),
    "no checkpoint": (
        lambda run: shutil.rmtree(run / LAST), {"status"}, "checkpoint: expected step-00000012"
    ),
    "another step": (json_file("status.json", {"step": 11}), {"status"}, "step"),
    "no status": (lambda run: (run / "status.json").write_text("{"), {"status.json"}, "JSON"),
}  # fmt: skip


def state(name: str, exit_code: int | None, **more: Any) -> Damage:
    """As a run that was asked to stop, is killed or trains leaves its status."""
    return json_file("status.json", {"state": name, "exit_code": exit_code, **more})


PREEMPTED = state("preempted", 75)


def before_its_first_step(*written: str) -> Damage:
    def stop(run: Path) -> None:
        state("preempted", 75, step=0, checkpoint=None)(run)
        for name in ("checkpoints", "weights"):
            shutil.rmtree(run / name)
        (run / "metrics.jsonl").write_text("")
        for name in {"config.yaml", "attempts.jsonl", "metrics.jsonl"}.difference(written):
            (run / name).unlink()

    return stop


def where_another_begins_it(run: Path) -> None:
    """It has written its status alone, and its checkpoint is another run's."""
    status = json.loads((run / "status.json").read_text())
    shutil.move(run, run.with_name("other"))
    run.mkdir()
    status |= {"state": "preempted", "exit_code": 75, "checkpoint": str(run.with_name("other") / LAST)}
    (run / "status.json").write_text(json.dumps(status))


def without_its_last_rows(run: Path) -> None:
    PREEMPTED(run)
    rows = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(rows[:9]))
    (run / "weights/best/best.json").unlink()


def running_without_rows(run: Path) -> None:
    state("running", None)(run)
    (run / "metrics.jsonl").unlink()


def first_attempt(section: str, changes: dict[str, Any]) -> Damage:
    def change(run: Path) -> None:
        row = json.loads((run / "attempts.jsonl").read_text())
        row["config"][section] |= changes
        (run / "attempts.jsonl").write_text(json.dumps(row) + "\n")

    return change


GONE = "runs/gone/checkpoints/step-00000005"
RECORDED_GONE = first_attempt("checkpoint", {"resume": GONE})
STATES: dict[str, tuple[Damage, set[str]]] = {
    "preempted after its twelfth step of many": (PREEMPTED, set()),
    "preempted, and its last rows are missing": (without_its_last_rows, {"rows", "weights best"}),
    "stopped before anything was written": (before_its_first_step(), set()),
    "stopped before its first step": (
        before_its_first_step("config.yaml", "attempts.jsonl", "metrics.jsonl"), set()
    ),
    "stopped where another run's checkpoint begins it": (where_another_begins_it, set()),
    "running, without rows": (running_without_rows, {"rows"}),
    "the checkpoint that it began from is gone": (
        lambda run: (setting("resume: auto", f"resume: {GONE}")(run), RECORDED_GONE(run)), set()
    ),
    "an attempt's settings cannot be, and are not on record": (
        first_attempt("logging", {"logging_steps": "often"}), set()
    ),
}  # fmt: skip
"""State of a run -> what is done to it, and the checks that fail."""


@pytest.mark.parametrize("name", STATES)
def test_a_run_in_any_state_is_sound_if_its_rows_are_there(name, run, capsys):
    change, failed = STATES[name]
    change(run)
    _, outcomes = verify(run, capsys)
    assert results(outcomes, "failed") == failed
    if name == "preempted, and its last rows are missing":
        assert "none of step 9-12" in outcomes["rows"]["problems"][0]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damage_fails_its_checks_and_no_other(damage, run, capsys):
    put_in, expected, said = DAMAGES[damage]
    put_in(run)
    code, outcomes = verify(run, capsys)
    assert results(outcomes, "failed") == expected
    assert code == 74
    assert any(said in problem for name in expected for problem in outcomes[name]["problems"])


# --- runs of other kinds ------------------------------------------------------------------------------


def test_a_killed_run_that_fell_back_and_changed_its_settings(masked_store, tmp_path, monkeypatch, capsys):
    """Rows every 3 steps, a step skipped between them; rows of the first attempt after step 5 are lost."""
    forward = train_pretrain.TorchrunEngine.forward

    def poisoned(self, batch):
        output = forward(self, batch)
        if output.loss_sum is None or batch.step != 3 or not torch.is_grad_enabled():
            return output
        return output._replace(loss_sum=output.loss_sum * math.inf)

    monkeypatch.setattr(train_pretrain.TorchrunEngine, "forward", poisoned)
    every = ("--checkpoint.save_steps", "5", "--evaluation.eval_steps", "4", "--logging.logging_steps", "3")
    folder = tmp_path / "run"
    train_tiny(masked_store, folder, *SHORT, *every, "--training.max_steps", "10")
    # As a kill after step 10 leaves it, when only the checkpoint of step 5 was written.
    shutil.rmtree(folder / "checkpoints" / "step-00000010")
    shutil.rmtree(folder / "weights" / "step-00000010")
    rewrite_json(
        folder / "status.json",
        lambda content: content.update(
            state="running", exit_code=None, step=5, checkpoint=str(folder / "checkpoints" / "step-00000005")
        ),
    )
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1')  # the line that it was writing
    code, outcomes = verify(folder, capsys)
    assert (code, results(outcomes, "failed")) == (0, set())

    longer = ("--training.max_steps", "14", "--optimizer.learning_rate", "2e-3")
    done = train_tiny(masked_store, folder, *SHORT, *every, *longer, "--logging.logging_steps", "2")
    assert [row["step"] for row in done.attempts] == [0, 5]
    assert done.rows[4]["train/skipped"] == "nonfinite_gradient"
    code, outcomes = verify(folder, capsys)
    assert (code, results(outcomes, "failed")) == (0, set())
    # 3 and 4 (skipped) by the first attempt; 6, 8, 10, 12 and 14 by the second
    assert "7 rows by 2 attempts" in outcomes["rows"]["looked_at"]
    assert "7 of 7 rows, 14 steps" in outcomes["samples"]["looked_at"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for number, row in enumerate(lines):
        if "train/loss" not in row or row["step"] not in (4, 6):
            continue
        is_lost = any("train/loss" in later and later["step"] <= row["step"] for later in lines[number + 1 :])
        damaged = [dict(each) for each in lines]
        other_digest(damaged[number])
        (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in damaged))
        _, outcomes = verify(folder, capsys)
        assert results(outcomes, "failed") == (set() if is_lost else {"samples"}), row["step"]


def test_what_a_run_writes_after_its_rows_were_read(whole, run, monkeypatch, capsys):
    """Rows, a checkpoint, and weights of steps 11 and 12 appear between reading the rows and checking."""
    rows = (whole / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(row for row in rows if json.loads(row)["step"] <= 10))
    rewrite_json(run / "status.json", lambda content: content.update(state="running", exit_code=None))
    for kind in ("checkpoints", "weights"):
        shutil.rmtree(run / kind / "step-00000012")
    check = checkpoint_checks.check_data

    def goes_on(*arguments):
        shutil.copytree(whole, run, dirs_exist_ok=True)
        check(*arguments)

    monkeypatch.setattr(checkpoint_checks, "check_data", goes_on)
    assert json.loads((run / "weights/best/best.json").read_text())["step"] == 12
    code, outcomes = verify(run, capsys)
    assert (code, results(outcomes, "failed")) == (0, set()), outcomes
    assert "bit for bit" in outcomes["weights step-00000012"]["looked_at"]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> Path:
    """Two sources over several epochs of each, whose weights change at sample 1024."""
    place = tmp_path_factory.mktemp("mixture")
    stores = [make_store(place / name, documents=40, seed=k).path for k, name in enumerate(("a", "b"))]
    sources = f"[{{store: {stores[0]}, weight: 3}}, {{store: {stores[1]}, weight: 1}}]"
    options = ("--data.sources", sources, "--data.weight_changes", "[{step: 3, weights: [1, 2]}]")
    batch = ("--training.global_batch_size", "240", "--training.micro_batch_size", "48")
    every = ("--training.max_steps", "9", "--training.sequence_length", "16", "--evaluation.eval_steps", "0")
    small = ("--schedule.warmup_steps", "2", "--model.hidden_size", "32")
    return train_tiny(stores[0], place / "run", *options, *batch, *every, *small).folder


def test_a_mixture_whose_weights_change_has_epochs_of_each_source(mixture, capsys):
    code, outcomes = verify(mixture, capsys)
    assert (code, results(outcomes, "failed")) == (0, set())
    said = outcomes["epochs"]["looked_at"]
    assert "2160 samples" in said
    assert said.count("whole epochs") == 2
    assert said.count("each once") == 2


def the_same_sequence_again(monkeypatch: pytest.MonkeyPatch) -> None:
    block = SampleOrder._compute_block

    def repeated(self, number):
        sources, sequences = block(self, number)
        return sources, 0 * sequences

    monkeypatch.setattr(SampleOrder, "_compute_block", repeated)


def each_segment_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    init = SampleOrder.__init__

    def restarted(self, *arguments, **options):
        init(self, *arguments, **options)
        self.segments = [replace(each, drawn=[0] * len(each.drawn)) for each in self.segments]

    monkeypatch.setattr(SampleOrder, "__init__", restarted)


@pytest.mark.parametrize("mistake", [the_same_sequence_again, each_segment_starts_anew])
def test_an_order_that_repeats_samples_is_detected(mixture, mistake, monkeypatch, capsys):
    mistake(monkeypatch)
    code, outcomes = verify(mixture, capsys)
    assert code == 74
    assert results(outcomes, "failed") == {"epochs", "samples"}
