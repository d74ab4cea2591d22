"""Whose a run's folder is: a run writes into its own only, and replaces nothing that no run wrote."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.launching import Finished, run_options, train

from llm_pretrain.checkpoints import store
from llm_pretrain.checkpoints.manifest import _digest, newest_run_id
from llm_pretrain.errors import OutputError
from llm_pretrain.files import MARKER
from llm_pretrain.runs.folder import RunFolder
from llm_pretrain.training import saving as checkpointing
from llm_pretrain.training.saving import CheckpointManager


def options(store: Path, folder: Path, *more: str, steps: int = 2) -> list[str]:
    return run_options(
        "tiny-dense",
        store,
        "model.hidden_size=32 training.sequence_length=32 training.global_batch_size=4 "
        f"training.max_steps={steps} schedule.warmup_steps=0 logging.logging_steps=1 evaluation.eval_steps=0 "
        "checkpoint.save_steps=1",
        *more,
        folder=folder,
    )


def contents(folder: Path) -> dict[str, bytes]:
    """Every file by its relative name, without following links."""
    return {
        str(each.relative_to(folder)): each.read_bytes()
        for each in folder.rglob("*")
        if each.is_file() and not each.is_symlink()
    }


@pytest.fixture(scope="module")
def finished(plain_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert train(*options(plain_store, folder)) == 0
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of a finished run of two steps."""
    return copy_of(finished, tmp_path / "run")


def copy_of(source: Path, target: Path) -> Path:
    for name, content in contents(source).items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(content)
    return target


def replace_folder(folder: Path) -> dict[str, bytes]:
    """Move a live run's folder away; another run begins in its place. Returns the new folder's files."""
    folder.rename(folder.with_name("old"))
    other = RunFolder(folder)
    other.acquire(newest_run_id)
    (folder / "status.json").write_text("{}")
    (folder / "metrics.jsonl").write_text("")
    other.release()
    return contents(folder)


@pytest.mark.parametrize("moment", ["before the save", "before the commit", "before the weights"])
def test_a_run_writes_nothing_into_the_folder_of_another(
    plain_store: Path, tmp_path: Path, moment: str, monkeypatch, capsys
):
    folder, after = tmp_path / "run", {}

    def once() -> None:
        if not after:
            after.update(replace_folder(folder))

    save = CheckpointManager.save
    if moment == "before the save":
        monkeypatch.setattr(CheckpointManager, "save", lambda self, *a, **k: (once(), save(self, *a, **k))[1])
    elif moment == "before the commit":
        write_manifest = store.write_manifest
        monkeypatch.setattr(store, "write_manifest", lambda *a: (write_manifest(*a), once()))
    else:
        card_facts = checkpointing.card_facts
        monkeypatch.setattr(checkpointing, "card_facts", lambda *a, **k: (once(), card_facts(*a, **k))[1])
    assert train(*options(plain_store, folder, steps=3)) in (73, 74)
    assert "run" in capsys.readouterr().err
    assert after
    assert contents(folder) == after


def test_every_writer_checks_the_folder(tmp_path: Path):
    folder = RunFolder(tmp_path / "run")
    folder.check()  # without an id: nothing to compare
    identity = folder.acquire(newest_run_id)
    folder.check()
    assert json.loads((folder.path / MARKER).read_text())["id"] == identity
    folder.release()
    replace_folder(folder.path)
    with pytest.raises(OutputError, match="found another run: it was moved, deleted or replaced"):
        folder.check()
    (folder.path / MARKER).unlink()
    with pytest.raises(OutputError, match="found none"):
        folder.check()
    assert RunFolder(tmp_path / "old").acquire(newest_run_id) == identity


def sign(manifest: Path, **run: object) -> None:
    """Change facts of the run in a manifest, with the digest that belongs to them."""
    content = json.loads(manifest.read_text())
    content["run"] |= run
    del content["sha256"]
    manifest.write_text(json.dumps(content | {"sha256": _digest(content)}))


def test_the_checkpoint_of_another_run_is_not_resumed(plain_store: Path, run: Path, capsys):
    newest = run / "checkpoints" / "step-00000002"
    sign(newest / "manifest.json", run_id="0" * 32)
    assert train(*options(plain_store, run, steps=3)) == 74
    assert f"{newest}: expected a checkpoint of this folder's run, found another run's" in (
        capsys.readouterr().err
    )
    assert train(*options(plain_store, run, "--checkpoint.resume", str(newest), steps=3)) == 0


def test_going_back_beside_a_later_checkpoint_is_refused(plain_store: Path, run: Path, capsys):
    """The next start would continue from the later one, without what this one trained."""
    first, later = (run / "checkpoints" / f"step-{step:08d}" for step in (1, 2))
    assert train(*options(plain_store, run, "--checkpoint.resume", str(first), steps=3)) == 2
    assert "expected the run's newest checkpoint, step-00000002, or another run's, found step-00000001" in (
        capsys.readouterr().err
    )
    later.rename(run.parent / later.name)
    assert train(*options(plain_store, run, "--checkpoint.resume", str(first), steps=3)) == 0
    assert Finished(0, "", run).attempts[-1]["step"] == 1


@pytest.mark.parametrize("kept", ["all", "checkpoints only"])
def test_a_run_whose_marker_was_lost_continues(plain_store: Path, run: Path, kept: str):
    """By a copy without hidden files, say; its checkpoints have its id."""
    identity = json.loads((run / MARKER).read_text())["id"]
    (run / MARKER).unlink()
    if kept == "checkpoints only":
        for name in ("status.json", "config.yaml", "metrics.jsonl", "attempts.jsonl"):
            (run / name).unlink()
    assert train(*options(plain_store, run, steps=4)) == 0
    assert Finished(0, "", run).attempts[-1]["step"] == 2
    assert {each.name for each in (run / "weights").glob("step-*")} == {"step-00000003", "step-00000004"}
    assert json.loads((run / MARKER).read_text())["id"] == identity


FOREIGN = {
    "metrics.jsonl": "".join(f'{{"loss": {step}}}\n' for step in range(500)),
    "config.yaml": "run:\n  name: mine  # a comment\n",
    "weights/step-00000001/model.safetensors": "another program's",
    MARKER: '{"format": "llm_pretrain weights", "files": []}',
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_that_no_run_wrote_is_not_replaced(plain_store: Path, tmp_path: Path, name: str, capsys):
    folder = tmp_path / "run"
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_text(FOREIGN[name])
    before = contents(folder)
    assert train(*options(plain_store, folder, "--logging.report", "true")) == 73
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {folder / name.split('/')[0]}: expected ")
    after = contents(folder)
    assert {key: after[key] for key in before} == before
    assert after.keys() - before.keys() <= {".lock"}


def test_other_files_may_lie_in_the_folder(plain_store: Path, tmp_path: Path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "notes.md").write_text("mine")
    (folder / ".notes.md.tmp-01234567").write_text("mine too")
    assert train(*options(plain_store, folder)) == 0
    assert (folder / "notes.md").read_text() == "mine"
    assert (folder / ".notes.md.tmp-01234567").exists()


def test_no_link_is_followed(plain_store: Path, run: Path, tmp_path: Path, capsys):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("metrics.jsonl", ".lock", "checkpoints"):
        (elsewhere / name).write_text("mine")
        (run / name).rename(tmp_path / "aside")
        (run / name).symlink_to(elsewhere / name)
        assert train(*options(plain_store, run, steps=3)) == 73
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {run / name}: expected ")
        assert "found a link" in line
        assert (elsewhere / name).read_text() == "mine"
        (run / name).unlink()
        (tmp_path / "aside").rename(run / name)


@pytest.mark.parametrize("parent", ["checkpoints", "weights"])
def test_a_folder_with_a_file_of_the_users_is_not_deleted(plain_store: Path, run: Path, parent: str):
    noted = run / parent / "step-00000001" / "notes.txt"
    noted.write_text("the best one")
    assert train(*options(plain_store, run, steps=4)) == 0
    assert noted.read_text() == "the best one"
    steps = sorted(each.name for each in (run / parent).glob("step-*"))
    assert steps == ["step-00000001", "step-00000003", "step-00000004"]


def test_a_file_in_the_best_weights_is_kept_beside_them(plain_store: Path, tmp_path: Path):
    folder = tmp_path / "run"
    evaluated = ("--evaluation.eval_steps", "1")
    assert train(*options(plain_store, folder, *evaluated, steps=1)) == 0
    (folder / "weights" / "best" / "notes.txt").write_text("mine")
    assert train(*options(plain_store, folder, *evaluated, steps=3)) == 0
    (kept,) = (folder / "weights").glob("best.kept-*")
    assert (kept / "notes.txt").read_text() == "mine"
    assert not (folder / "weights" / "best" / "notes.txt").exists()


def test_files_honour_the_umask(plain_store: Path, tmp_path: Path):
    before = os.umask(0o077)
    try:
        assert train(*options(plain_store, tmp_path / "run", "--logging.report", "true", steps=1)) == 0
    finally:
        os.umask(before)
    modes = {each.name: each.stat().st_mode & 0o077 for each in (tmp_path / "run").rglob("*")}
    assert {"config.yaml", "status.json", "report.html", MARKER} <= modes.keys()
    assert not any(modes.values()), modes


def test_an_attempt_that_ended_without_a_word_is_told(plain_store: Path, run: Path, capsys):
    """As after SIGKILL, or SIGBUS when a store is cut while it is mapped."""
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps(status | {"state": "running", "exit_code": None}))
    assert train(*options(plain_store, run, steps=3)) == 0
    assert "the attempt before ended without recording why" in capsys.readouterr().out
    assert train(*options(plain_store, run, steps=4)) == 0
    assert "without recording why" not in capsys.readouterr().out


def test_a_pipe_in_place_of_a_file_is_refused(plain_store: Path, run: Path, tmp_path: Path, capsys):
    name = "attempts.jsonl"
    (run / name).rename(tmp_path / "aside")
    os.mkfifo(run / name)
    assert train(*options(plain_store, run, steps=3)) == 73
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {run / name}: expected a file or folder of the run, found a pipe")
    assert (run / name).is_fifo()
