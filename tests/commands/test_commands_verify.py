"""`verify` passes what training wrote, and each of its checks fails for one deliberate damage."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.corpora import make_store
from support.launching import train_tiny
from support.mutation import Edit, mutated

import train_pretrain
from llm_pretrain.__main__ import main
from llm_pretrain.checkpoints.manifest import file_digest, read_manifest, write_manifest
from llm_pretrain.commands._verification import checkpoints as checkpoint_checks
from llm_pretrain.data import sample_order

SHORT = ("--training.sequence_length", "32", "--evaluation.max_batches", "1", "--schedule.warmup_steps", "2")


def verify(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, dict]]:
    """Exit code, and the outcomes by name."""
    capsys.readouterr()
    code = main(["verify", str(folder), "--json", *options])
    printed = json.loads(capsys.readouterr().out)
    assert (code == 0) == printed["ok"]
    return code, {check["name"]: check for check in printed["checks"]}


def results(outcomes: dict[str, dict], result: str) -> set[str]:
    return {name for name, check in outcomes.items() if check["result"] == result}


@pytest.fixture(scope="module")
def whole(masked_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve steps, a row for each, saved after 5, 10 and 12; the first checkpoint is pruned."""
    folder = tmp_path_factory.mktemp("verify") / "run"
    every = ("--training.max_steps", "12", "--checkpoint.save_steps", "5", "--evaluation.eval_steps", "6")
    digest = ("--logging.parameters_sha256", "true")
    return train_tiny(masked_store, folder, *SHORT, *every, *digest).folder


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def test_a_whole_run_passes_every_check(whole: Path, capsys: pytest.CaptureFixture[str]):
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


def rewrite_row(run: Path, step: int, change: Callable[[dict], None]) -> None:
    file = run / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        if row["step"] == step and "train/loss" in row:
            change(row)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rewrite_json(file: Path, change: Callable[[dict], None]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def rewrite_tensors(run: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the last checkpoint's tensors and let its manifest vouch for the new file."""
    folder = run / "checkpoints" / "step-00000012"
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    described = {
        name: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        for name, tensor in tensors.items()
    }
    manifest = read_manifest(folder)
    write_manifest(folder, replace(manifest, tensors=described, files={file.name: file_digest(file)}))


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)


def next_up(row: dict) -> None:
    row["train/learning_rate"] = math.nextafter(row["train/learning_rate"], 1.0)


def other_digest(row: dict) -> None:
    row["data/batch_sha256"] = (
        row["data/batch_sha256"][:-1] + "0123456789abcdef"[(int(row["data/batch_sha256"][-1], 16) + 1) % 16]
    )


def without_row(run: Path, step: int) -> None:
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if json.loads(line)["step"] != step))


def nan_in(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name].view(-1)[3] = math.nan


def other_seed(run: Path) -> None:
    config = run / "config.yaml"
    text = config.read_text()
    assert text.count("packing: best_fit\n") == 1
    config.write_text(text.replace("packing: best_fit\n", "packing: concat\n"))


def nan_weights(run: Path) -> None:
    file = run / "weights" / "best" / "model.safetensors"
    tensors = load_file(file)
    nan_in(tensors, "model.norm.weight")
    save_file(tensors, file, metadata={"format": "pt"})


def half_a_line(run: Path) -> None:
    file = run / "metrics.jsonl"
    lines = file.read_bytes().split(b"\n")
    lines[4] = lines[4][:50]
    file.write_bytes(b"\n".join(lines))


LAST, TENTH = "checkpoints/step-00000012", "checkpoints/step-00000010"
NORM = "model.norm.weight"
MOMENT = "optimizer.state.model.layers.0.mlp.gate.weight.exp_avg"

DAMAGES: dict[str, tuple[Callable[[Path], object], set[str], str]] = {
    "a flipped bit": (
        lambda run: flip_a_bit(next((run / TENTH).glob("*.safetensors"))),
        {"checkpoint step-00000010"},
        "SHA-256",
    ),
    "a cut file": (
        lambda run: os.truncate(next((run / TENTH).glob("*.safetensors")), 1000),
        {"checkpoint step-00000010"},
        "bytes",
    ),
    "a cut manifest": (
        lambda run: os.truncate(run / TENTH / "manifest.json", 300),
        {"checkpoint step-00000010"},
        "manifest.json",
    ),
    "NaN in a parameter": (
        lambda run: rewrite_tensors(run, lambda tensors: nan_in(tensors, NORM)),
        {"checkpoint step-00000012"},
        f"{NORM}: expected finite values",
    ),
    "infinity in a moment": (
        lambda run: rewrite_tensors(run, lambda tensors: tensors[MOMENT].fill_(math.inf)),
        {"checkpoint step-00000012"},
        f"{MOMENT}: expected finite values",
    ),
    "a tensor less": (
        lambda run: rewrite_tensors(run, lambda tensors: tensors.pop(MOMENT)),
        {"checkpoint step-00000012"},
        f"{MOMENT}: expected float32",
    ),
    "another shape": (
        lambda run: rewrite_tensors(run, lambda tensors: tensors.update({NORM: torch.ones(63)})),
        {"checkpoint step-00000012"},
        "found float32 [63]",
    ),
    "one value of a checkpoint": (
        lambda run: rewrite_tensors(run, lambda tensors: tensors[NORM].add_(0.1)),
        {"checkpoint step-00000012"},
        "as train/parameters_sha256 of step 12",
    ),
    "one value of a checkpoint, without a digest in its row": (
        lambda run: (
            rewrite_tensors(run, lambda tensors: tensors[NORM].add_(0.1)),
            rewrite_row(run, 12, lambda row: row.pop("train/parameters_sha256")),
        ),
        {"weights step-00000012", "weights best"},
        NORM,
    ),
    "another digest of the parameters": (
        lambda run: rewrite_row(run, 10, lambda row: row.update({"train/parameters_sha256": "0" * 64})),
        {"checkpoint step-00000010"},
        "as train/parameters_sha256 of step 10",
    ),
    "weights of another step": (
        lambda run: shutil.copy(
            run / "weights/step-00000010/model.safetensors", run / "weights/step-00000012"
        ),
        {"weights step-00000012"},
        "expected the checkpoint's values in bfloat16",
    ),
    "another config.json": (
        lambda run: rewrite_json(
            run / "weights/step-00000010/config.json", lambda content: content.update(rope_theta=5.0)
        ),
        {"weights step-00000010"},
        "rope_theta",
    ),
    "another tokenizer": (
        lambda run: flip_a_bit(run / "weights/step-00000010/tokenizer.json"),
        {"weights step-00000010"},
        "tokenizer.json",
    ),
    "NaN in weights": (nan_weights, {"weights best"}, f"{NORM}: expected finite values"),
    "another best loss": (
        lambda run: rewrite_json(
            run / "weights/best/best.json", lambda content: content.update({"eval/loss": 1.0})
        ),
        {"weights best"},
        "eval/loss",
    ),
    "a better evaluation than the best's": (
        lambda run: rewrite_row(run, 6, lambda row: row.update({"eval/loss": row["eval/loss"] / 2})),
        {"weights best"},
        "expected the lowest eval/loss, that of step 6",
    ),
    "a learning rate one bit off": (
        lambda run: rewrite_row(run, 7, next_up),
        {"learning rate"},
        "step 7",
    ),
    "another sample hash": (lambda run: rewrite_row(run, 7, other_digest), {"samples"}, "step 7"),
    "a step missing": (lambda run: without_row(run, 7), {"steps"}, "step 7"),
    "the last step missing": (lambda run: without_row(run, 12), {"steps", "weights best"}, "step 12"),
    "a sum of tokens off": (
        lambda run: rewrite_row(run, 7, lambda row: row.update({"train/tokens": row["train/tokens"] + 1})),
        {"tokens", "samples"},
        "step 7",
    ),
    "loss tokens off": (
        lambda run: rewrite_row(run, 7, lambda row: row.update({"train/loss_tokens": 5})),
        {"tokens", "samples"},
        "step 7",
    ),
    "a checkpoint's tokens off": (
        lambda run: rewrite_row(run, 10, lambda row: row.update({"train/tokens": row["train/tokens"] + 1})),
        {"tokens", "samples", "checkpoint step-00000010"},
        "step 10",
    ),
    "a loss that is no number": (
        lambda run: rewrite_row(run, 7, lambda row: row.update({"train/loss": math.nan})),
        {"finite rows"},
        "step 7",
    ),
    "a null without a skip": (
        lambda run: rewrite_row(run, 7, lambda row: row.update({"train/grad_norm": None})),
        {"finite rows"},
        "train/grad_norm",
    ),
    "a row of other types": (
        lambda run: rewrite_row(
            run, 7, lambda row: row.update({"train/tokens": "many", "train/learning_rate": []})
        ),
        {"learning rate", "tokens", "finite rows"},
        "step 7",
    ),
    "half a line": (half_a_line, {"rows"}, "metrics.jsonl:5"),
    "another order of samples": (
        other_seed,
        {"settings", "data", "samples", "checkpoint step-00000010", "checkpoint step-00000012"},
        "data.packing",
    ),
    "a setting that the run did not have": (
        lambda run: (run / "config.yaml").write_text(
            (run / "config.yaml").read_text().replace("weight_decay: 0.1", "weight_decay: 0.2")
        ),
        {"settings"},
        "expected optimizer.weight_decay 0.1",
    ),
    "a step beyond all": (
        lambda run: rewrite_row(run, 12, lambda row: row.update(step=1 << 62)),
        {"rows"},
        "expected steps up to training.max_steps 12",
    ),
    "a number that no float holds": (
        lambda run: rewrite_row(run, 6, lambda row: row.update({"eval/loss": 10**400})),
        {"finite rows"},
        "eval/loss",
    ),
    "a best step that is no number": (
        lambda run: rewrite_json(run / "weights/best/best.json", lambda content: content.update(step=[1])),
        {"weights best"},
        "expected a whole number of steps",
    ),
    "no processes": (
        lambda run: rewrite_json(run / "status.json", lambda content: content.update(world_size=0)),
        {"status"},
        "world_size: expected a number of processes",
    ),
    "no attempts": (lambda run: (run / "attempts.jsonl").unlink(), {"rows"}, "attempts.jsonl"),
    "no configuration": (
        lambda run: (run / "config.yaml").write_text("model: [what"),
        {"config.yaml"},
        "config.yaml",
    ),
    "contradicting settings": (
        lambda run: (run / "config.yaml").write_text(
            (run / "config.yaml").read_text().replace("num_attention_heads: 4", "num_attention_heads: 3")
        ),
        {"config.yaml"},
        "num_attention_heads",
    ),
    "no checkpoint": (
        lambda run: shutil.rmtree(run / "checkpoints/step-00000012"),
        {"status"},
        "checkpoint: expected step-00000012",
    ),
    "another end": (
        lambda run: rewrite_json(run / "status.json", lambda content: content.update(exit_code=70)),
        {"status"},
        "exit_code: expected 0",
    ),
    "another step": (
        lambda run: rewrite_json(run / "status.json", lambda content: content.update(step=11)),
        {"status"},
        "step",
    ),
    "no status": (lambda run: (run / "status.json").write_text("{"), {"status.json"}, "JSON"),
}


def preempted(run: Path) -> None:
    """The same run as one that was asked to stop after its twelfth step of many."""

    def asked_to_stop(content: dict) -> None:
        content.update(state="preempted", exit_code=75)

    rewrite_json(run / "status.json", asked_to_stop)


def test_the_rows_of_a_preempted_run_must_be_there_up_to_its_end(
    run: Path, capsys: pytest.CaptureFixture[str]
):
    preempted(run)
    assert results(verify(run, capsys)[1], "failed") == set()
    rows = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(rows[:9]))
    (run / "weights/best/best.json").unlink()
    _, outcomes = verify(run, capsys)
    assert "steps" in results(outcomes, "failed")
    assert "none of step 9-12" in outcomes["steps"]["problems"][0]


@pytest.mark.parametrize("state", ["preempted", "running", "failed"])
def test_a_run_with_checkpoints_has_rows(state: str, run: Path, capsys: pytest.CaptureFixture[str]):
    codes = {"preempted": 75, "running": None, "failed": 1}
    rewrite_json(run / "status.json", lambda content: content.update(state=state, exit_code=codes[state]))
    (run / "metrics.jsonl").unlink()
    assert results(verify(run, capsys)[1], "failed") == {"rows"}


def test_an_attempts_settings_that_cannot_be_are_not_on_record(run: Path, capsys: pytest.CaptureFixture[str]):
    row = json.loads((run / "attempts.jsonl").read_text())
    row["config"]["logging"]["logging_steps"] = 0
    (run / "attempts.jsonl").write_text(json.dumps(row) + "\n")
    _, outcomes = verify(run, capsys)
    assert results(outcomes, "failed") == set()
    assert outcomes["settings"]["result"] == "skipped"


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damage_fails_its_checks_and_no_other(damage: str, run: Path, capsys: pytest.CaptureFixture[str]):
    put_in, expected, said = DAMAGES[damage]
    put_in(run)
    code, outcomes = verify(run, capsys)
    assert results(outcomes, "failed") == expected
    assert code == 74
    assert any(said in problem for name in expected for problem in outcomes[name]["problems"])


def test_files_of_noise_are_named_and_raise_nothing(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Each file in turn cut in half, overwritten in its midst, emptied, replaced by another type of JSON."""
    generator = random.Random(0)
    names = ("config.yaml", "metrics.jsonl", "attempts.jsonl", "status.json")
    names += (f"{LAST}/manifest.json", "weights/best/best.json", "weights/best/model.safetensors")
    files = [*(run / name for name in names), *(run / LAST).glob("*.safetensors")]
    for file in files:
        before = file.read_bytes()
        middle = len(before) // 2
        noise = before[:middle] + generator.randbytes(16) + before[middle + 16 :]
        strange = (
            b'{"step": 1, "time": "x", "state": [], "eval/loss": {}, "train/tokens": {}}\n',
            b"[1]\n",
            b"",
        )
        for damaged in (noise, *strange) if len(before) < 50_000 else (before[:middle],):
            file.write_bytes(damaged)
            code, outcomes = verify(run, capsys, "--samples", "2")
            assert code == 74, (file, damaged[:40])
            assert results(outcomes, "failed")
        file.write_bytes(before)
    assert verify(run, capsys)[0] == 0


# --- runs of other kinds ------------------------------------------------------------------------------


def test_a_killed_run_that_fell_back_and_changed_its_settings(
    masked_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Rows every 3 steps, a step skipped between them, a kill, and on from the checkpoint of step 5."""
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
    # 3, 4 (skipped), 6 and 9 by the first attempt; 6, 8, 10, 12 and 14 by the second
    assert "9 rows of 2 attempts" in outcomes["steps"]["looked_at"]
    assert "9 of 9 rows" in outcomes["samples"]["looked_at"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for number, row in enumerate(lines):
        if "train/loss" not in row or row["step"] not in (4, 6, 9, 14):
            continue
        damaged = [dict(each) for each in lines]
        other_digest(damaged[number])
        (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in damaged))
        _, outcomes = verify(folder, capsys)
        assert results(outcomes, "failed") == {"samples"}, row["step"]


def test_a_run_that_goes_on_while_it_is_read(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    rewrite_json(run / "status.json", lambda content: content.update(state="running", exit_code=None))
    look = checkpoint_checks.find_damage

    def pruned(folder: Path, *arguments):
        if folder.name == "step-00000010":
            shutil.rmtree(folder)
        return look(folder, *arguments)

    monkeypatch.setattr(checkpoint_checks, "find_damage", pruned)
    code, outcomes = verify(run, capsys)
    assert (code, results(outcomes, "failed")) == (0, set())
    assert results(outcomes, "skipped") == {"checkpoint step-00000010"}
    assert "no sound checkpoint" in outcomes["weights step-00000010"]["reason"]


def test_a_run_from_another_runs_checkpoint(
    whole: Path, masked_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    resume = ("--checkpoint.resume", str(whole / TENTH), "--training.max_steps", "16")
    folder = train_tiny(
        masked_store, tmp_path / "run", *SHORT, *resume, "--logging.logging_steps", "3"
    ).folder
    code, outcomes = verify(folder, capsys)
    assert (code, results(outcomes, "failed")) == (0, set())
    assert "another run's" in outcomes["steps"]["reason"]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sources over several epochs of each, whose weights change at sample 1024."""
    place = tmp_path_factory.mktemp("mixture")
    stores = [make_store(place / name, documents=40, seed=k).path for k, name in enumerate(("a", "b"))]
    sources = f"[{{store: {stores[0]}, weight: 3}}, {{store: {stores[1]}, weight: 1}}]"
    options = ("--data.sources", sources, "--data.weight_changes", "[{step: 3, weights: [1, 2]}]")
    batch = ("--training.global_batch_size", "240", "--training.micro_batch_size", "48")
    every = ("--training.max_steps", "9", "--training.sequence_length", "16", "--evaluation.eval_steps", "0")
    return train_tiny(
        stores[0], place / "run", *options, *batch, *every, "--schedule.warmup_steps", "2"
    ).folder


def test_a_mixture_whose_weights_change_has_epochs_of_each_source(
    mixture: Path, capsys: pytest.CaptureFixture[str]
):
    code, outcomes = verify(mixture, capsys)
    assert (code, results(outcomes, "failed")) == (0, set())
    said = outcomes["epochs"]["looked_at"]
    assert "2160 samples" in said
    assert said.count("whole epochs") == 2
    assert said.count("each once") == 2


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("sequences[sources == k] = shuffled(", "sequences[sources == k] = 0 * shuffled("),
        ("first = segment.drawn[k] +", "first = 0 * segment.drawn[k] +"),
    ],
    ids=["one sequence again and again", "each segment starts anew"],
)
def test_an_order_that_repeats_samples_is_noticed(
    mixture: Path, old: str, new: str, capsys: pytest.CaptureFixture[str]
):
    assert sample_order.__file__
    with mutated(Edit("llm_pretrain/data/sample_order.py", old, new)):
        code, outcomes = verify(mixture, capsys)
    assert code == 74
    assert results(outcomes, "failed") == {"epochs", "samples"}


# --- usage --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "expected a run's folder or --packing"),
        (["run", "--packing", "store"], "not both"),
        (["nowhere"], "nowhere: expected a run's folder"),
        (["run", "--samples", "few"], "--samples"),
        (["run", "--sequences", "3"], "--sequences"),
        (["--packing", "store", "--sequences", "0"], "--sequences: expected 1 or more"),
        (["--packing", "store", "--seed", str(1 << 64)], "--seed: expected less than 2^62"),
        (["--packing", "store", "--sequence_length", "99999"], "at most model.max_position_embeddings"),
    ],
)
def test_usage_is_answered_in_a_line(options: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert main(["verify", *options]) == 2
    assert said in capsys.readouterr().err


def test_a_run_before_its_first_step(
    masked_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """What a run leaves that was stopped before it had trained: nothing to look at, nothing wrong."""
    monkeypatch.setattr(
        train_pretrain.TorchrunEngine, "train_step", lambda *_: (_ for _ in ()).throw(KeyError)
    )
    folder = tmp_path / "run"
    with pytest.raises(KeyError):
        train_tiny(masked_store, folder, *SHORT)
    code, outcomes = verify(folder, capsys)
    assert results(outcomes, "failed") == set(), outcomes
    assert code == 0
    assert {"checkpoints", "weights", "epochs", "samples", "steps"} <= results(outcomes, "skipped")
