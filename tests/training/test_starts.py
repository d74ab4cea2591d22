"""`checkpoint.start_from`: a new run takes another run's state, and begins at step 0 with its own data."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
import torch
from support.launching import ROOT, Finished, checkpoint_tensors, run_options, train

from llm_pretrain.__main__ import main
from llm_pretrain.checkpoints.manifest import read_manifest, write_manifest
from llm_pretrain.config.loading import load_config
from llm_pretrain.optim.schedule import learning_rate
from llm_pretrain.training.saving import CheckpointManager

AVERAGE = ("--optimizer.ema_decay", "0.9")


def contents(folder: Path) -> dict[str, bytes]:
    """Every file and its bytes."""
    return {str(file): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def options(store: Path, folder: Path, *more: str, steps: int = 3) -> list[str]:
    settings = (
        "model.hidden_size=32 training.sequence_length=32 training.global_batch_size=8 "
        f"training.micro_batch_size=4 training.max_steps={steps} schedule.warmup_steps=1 "
        "logging.logging_steps=1 evaluation.eval_steps=0 checkpoint.save_steps=2"
    )
    return run_options("tiny-dense", store, settings, *more, folder=folder)


@pytest.fixture(scope="module")
def source(plain_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps with an average of the parameters, saved after two and after three."""
    folder = tmp_path_factory.mktemp("source") / "run"
    assert train(*options(plain_store, folder, *AVERAGE)) == 0
    return folder


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> dict:
    """The state at step 0: every tensor and scalar of a checkpoint that would be saved then."""
    found: dict = {}
    restore = CheckpointManager.restore

    def restored(self: CheckpointManager, resume) -> None:
        restore(self, resume)
        model, optimizer = self.engine.model_and_optimizer()
        staged = self.store.stage(model, optimizer, None, resume.run)
        found.update({piece.name: piece.tensor.clone() for piece in staged.pieces})
        found["scalars"] = staged.content.scalars

    monkeypatch.setattr(CheckpointManager, "restore", restored)
    return found


def started(store: Path, folder: Path, source: Path, *more: str) -> list[str]:
    own = ("--training.global_batch_size", "4", "--checkpoint.start_from", str(source))
    return options(store, folder, *own, *more, steps=4)


def test_a_run_takes_the_state_and_has_its_own_data_and_steps(
    source: Path, changed_store: Path, tmp_path: Path, taken: dict, capsys: pytest.CaptureFixture[str]
):
    before, folder = contents(source), tmp_path / "run"
    own = started(changed_store, folder, source, *AVERAGE, "--schedule.offset_steps", "3")
    assert train(*own) == 0
    assert contents(source) == before
    newest, tensors = source / "checkpoints" / "step-00000003", checkpoint_tensors(source, 3)
    assert taken.pop("scalars") == read_manifest(newest).scalars
    assert taken.keys() == tensors.keys()
    assert any(name.endswith(".ema") for name in tensors)
    assert all(torch.equal(tensor, taken[name]) for name, tensor in tensors.items())

    rows, first = Finished(0, "", folder).rows, Finished(0, "", folder).attempts[0]["step"]
    assert (first, list(rows)) == (0, [1, 2, 3, 4])
    assert [row["train/learning_rate"] for row in rows.values()] == [
        learning_rate(load_config(own), step) for step in range(4)
    ]
    manifest = read_manifest(folder / "checkpoints" / "step-00000002").run
    history = read_manifest(newest).run.extra["spikes"]["steps"]
    assert manifest.extra["spikes"]["steps"][:-2] == history
    digest = hashlib.sha256((newest / "manifest.json").read_bytes()).hexdigest()
    assert manifest.extra["started_from"] == {"path": str(newest.resolve()), "sha256": digest}
    own_steps = manifest.extra["spikes"]["steps"][-2:]
    assert manifest.tokens_seen == rows[2]["train/tokens"] == sum(tokens for _, _, tokens in own_steps)
    fresh = tmp_path / "fresh"
    assert train(*options(changed_store, fresh, "--training.global_batch_size", "4", steps=4)) == 0
    orders = [
        [row["data/batch_sha256"] for row in Finished(0, "", each).rows.values()] for each in (folder, fresh)
    ]
    assert orders[0] == orders[1]
    card = (folder / "weights" / "step-00000004" / "README.md").read_text()
    assert "It started from the weights `run`, was trained on the data above, and" in card


def test_its_own_checkpoints_need_the_source_no_more(
    source: Path, changed_store: Path, plain_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    first, folder = Path(shutil.copytree(source, tmp_path / "first")), tmp_path / "run"
    assert train(*started(changed_store, folder, first, *AVERAGE)) == 0
    shutil.rmtree(first)
    longer = [*started(changed_store, folder, first, *AVERAGE), "--training.max_steps", "5"]
    status = (folder / "status.json").read_bytes()
    refused = [*longer, "--data.sources", f"[{{store: {plain_store}}}]"]
    capsys.readouterr()
    assert train(*refused) == 78
    assert "data.store.0 is" in capsys.readouterr().err
    assert (folder / "status.json").read_bytes() == status, "a finished run that was refused is finished"
    assert train(*longer) == 0
    printed = capsys.readouterr()
    assert f"resumed from {folder / 'checkpoints' / 'step-00000004'}" in printed.out
    rates = [learning_rate(load_config(each), 4) for each in (longer[:-2], longer)]
    assert f"learning rate of the next step: {rates[0]:.4g} -> {rates[1]:.4g}" in printed.err
    assert Finished(0, "", folder).raw_steps() == [1, 2, 3, 4, 5]
    extra = read_manifest(folder / "checkpoints" / "step-00000005").run.extra
    assert extra["started_from"]["path"].startswith(str(first))


@pytest.mark.parametrize("keeps", [True, False])
def test_an_average_that_one_of_both_keeps_is_not_taken(
    source: Path, plain_store: Path, changed_store: Path, tmp_path: Path, taken: dict, keeps: bool
):
    if keeps:
        assert train(*options(plain_store, tmp_path / "first")) == 0
        source = tmp_path / "first"
    folder = tmp_path / "run"
    assert train(*started(changed_store, folder, source, *(AVERAGE if keeps else ()))) == 0
    assert not [name for name in taken if name.endswith(".ema")]
    names = checkpoint_tensors(folder, 4)
    assert bool([name for name in names if name.endswith(".ema")]) == keeps
    groups = read_manifest(folder / "checkpoints" / "step-00000004").optimizer["groups"]
    assert all(("ema_decay" in group) == keeps for group in groups)


def test_a_damaged_checkpoint_is_passed_over(source: Path, changed_store: Path, tmp_path: Path, capsys):
    first = Path(shutil.copytree(source, tmp_path / "first"))
    (first / "checkpoints" / "step-00000003" / "manifest.json").write_text("{")
    assert train(*started(changed_store, tmp_path / "run", first, *AVERAGE)) == 0
    printed = capsys.readouterr()
    assert f"started from {first / 'checkpoints' / 'step-00000002'}" in printed.out
    assert "passed over for an older one" in printed.err


@pytest.mark.parametrize(
    ("more", "code", "named"),
    [
        (["--model.hidden_size", "64"], 78, "model.hidden_size is 32 in the checkpoint, 64 here"),
        (["--optimizer.name", "muon"], 78, "optimizer.name is adamw in the checkpoint, muon here"),
        (
            ["--checkpoint.start_from", "configs"],
            74,
            "expected a checkpoint with a manifest.json, found none",
        ),
        (
            ["--checkpoint.start_from", "no/such"],
            2,
            "checkpoint.start_from: expected a checkpoint's folder",
        ),
    ],
)
def test_what_a_run_cannot_start_from_is_named(
    source, changed_store, tmp_path, monkeypatch, capsys, more, code, named
):
    monkeypatch.chdir(ROOT)
    assert train(*started(changed_store, tmp_path / "run", source, *AVERAGE, *more)) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line


def test_verify_compares_the_start_with_the_source(source: Path, changed_store: Path, tmp_path: Path, capsys):
    first, folder = Path(shutil.copytree(source, tmp_path / "first")), tmp_path / "run"
    assert train(*started(changed_store, folder, first, *AVERAGE)) == 0
    assert main(["verify", str(folder)]) == 0
    assert f"started from {first.resolve()}" in capsys.readouterr().out
    newest = folder / "checkpoints" / "step-00000004"
    manifest = read_manifest(newest)
    manifest.run.extra["started_from"]["sha256"] = "0" * 64
    write_manifest(newest, manifest)
    assert main(["verify", str(folder)]) == 74
    assert "expected the manifest that the run started from, SHA-256 0000" in capsys.readouterr().out
    shutil.rmtree(first)
    assert main(["verify", str(folder)]) == 0
    assert f"its start from {first.resolve()}" in capsys.readouterr().out
