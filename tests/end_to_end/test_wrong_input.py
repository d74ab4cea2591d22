"""Whatever a user gets wrong: one line that names it, the documented exit code, and nothing is harmed.

In this process where that can be, since it is fast; through the launchers where they have a part in it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.corpora import make_store, make_texts, make_tokenizer, write_jsonl
from support.launching import ROOT, Finished, launch, train

import train_pretrain
from llm_pretrain.__main__ import main as run_command
from llm_pretrain.data.preparation import Preparation, prepare_store
from llm_pretrain.data.store import TokenStore
from llm_pretrain.errors import OutputError
from llm_pretrain.files import MARKER
from llm_pretrain.runs.folder import RunFolder
from llm_pretrain.runs.status import read_status

TINY = str(ROOT / "configs" / "tiny-dense.yaml")


def options(folder: Path, *stores: Path, steps: int = 2) -> list[str]:
    sources = json.dumps([{"store": str(store)} for store in stores])
    return [
        *("--config", TINY, "--run.output_dir", str(folder), "--distributed.cpu_threads", "1"),
        *("--data.sources", sources, "--training.max_steps", str(steps), "--schedule.warmup_steps", "0"),
        *("--training.global_batch_size", "4", "--checkpoint.save_steps", "1"),
        *("--evaluation.eval_steps", "0"),
    ]


class Refusal:
    """Runs what must be refused, and checks how it is: exit code, one line, what the line names."""

    def __init__(self, capsys: pytest.CaptureFixture[str]):
        self.capsys = capsys

    def of_training(self, arguments: list[str], exit_code: int, *named: str) -> str:
        """The message after `error: `."""
        self.capsys.readouterr()
        assert train(*arguments) == exit_code
        return self._message("error: ", named)

    def of_command(self, arguments: list[str | Path], exit_code: int, *named: str) -> str:
        """The message after `llm-pretrain COMMAND: error: `."""
        self.capsys.readouterr()
        assert run_command([str(argument) for argument in arguments]) == exit_code
        return self._message(f"llm-pretrain {arguments[0]}: error: ", named)

    def of_run(self, arguments: list[str], folder: Path, exit_code: int, *named: str) -> None:
        """As `of_training`; status.json says the same, but stays if a finished run refuses settings or data.
        Nothing else in the folder changes."""
        before, reached, was = contents(folder), progress(folder), read_status(folder / "status.json")
        message = self.of_training(arguments, exit_code, *named)
        status = json.loads((folder / "status.json").read_text())
        if was.get("state") == "finished" and exit_code in (2, 65, 78):
            assert status == was
            status |= {"state": "failed", "exit_code": exit_code, "reason": message}
        assert (status["state"], status["exit_code"], status["reason"]) == ("failed", exit_code, message)
        assert (status["launcher"], status["world_size"], status["pid"]) == ("torchrun", 1, os.getpid())
        assert progress(folder) == reached
        assert contents(folder) == before

    def _message(self, prefix: str, named: tuple[str, ...]) -> str:
        output, error = self.capsys.readouterr()
        (line,) = error.splitlines()
        assert line.startswith(prefix)
        assert not [text for text in named if text not in line], line
        assert "Traceback" not in output
        return line.removeprefix(prefix)


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Refusal:
    return Refusal(capsys)


def contents(folder: Path) -> dict[str, str]:
    """Every file of a run and its hash, but for lock, marker and status.json."""
    changing = (".lock", MARKER, "status.json")
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in changing]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def progress(folder: Path) -> tuple[int, str | None]:
    """How far status.json says a run is."""
    file = folder / "status.json"
    status = json.loads(file.read_text()) if file.exists() else {"step": 0, "checkpoint": None}
    return status["step"], status["checkpoint"]


@pytest.fixture(scope="module")
def trained(plain_store: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(run, store): two steps, each with a checkpoint, on a store of their own."""
    folder = tmp_path_factory.mktemp("trained")
    shutil.copytree(plain_store, folder / "store")
    assert train(*options(folder / "run", folder / "store")) == 0
    return folder / "run", folder / "store"


@pytest.fixture
def run_and_store(trained: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """A copy of the trained run and its store, to be damaged."""
    for path in trained:
        shutil.copytree(path, tmp_path / path.name)
    return tmp_path / "run", tmp_path / "store"


# The configuration and the options: refused before there is a run, so nothing is written.


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (["--training.max_steps", "ten"], ["training.max_steps", "expected an integer", "'ten'"]),
        (["--config", f"{TINY}x"], [f"{TINY}x: no such file"]),
        (["please"], ["please", "unexpected argument", "--section.field VALUE"]),
    ],
    ids=["value", "file", "argument"],
)
def test_a_wrong_configuration(
    refusal: Refusal, plain_store: Path, tmp_path: Path, wrong: list[str], named: list[str]
):
    folder = tmp_path / "run"
    refusal.of_training([*options(folder, plain_store), *wrong], 2, *named)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("wrong", "exit_code", "named"),
    [
        (["prepare", "--workers", "-1"], 2, ["--workers", "expected 1 or more", "-1"]),
        (["prepare", "--tokenizer", "nowhere"], 65, ["nowhere", "expected a tokenizer folder", "found none"]),
        (["prepare", "--output", "/proc/none/store"], 74, ["/proc/none", "No such file"]),
        (["tokenizer", "--vocab_size", "300", "--input", "none"], 65, ["none", "found no such path"]),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else str(value),
)
def test_a_wrong_option_of_a_command(
    refusal: Refusal, tmp_path: Path, wrong: list[str], exit_code: int, named: list[str]
):
    corpus = write_jsonl(tmp_path / "corpus.jsonl", [{"text": text} for text in make_texts(20)])
    needed = ["--tokenizer", make_tokenizer(tmp_path / "tokenizer")] if wrong[0] == "prepare" else []
    needed += ["--input", corpus, "--output", tmp_path / "output"]
    refusal.of_command([wrong[0], *needed, *wrong[1:]], exit_code, *named)
    assert not (tmp_path / "output").exists()


# The token store and its tokenizer: refused by the run, whose status.json says so too.


def test_stores_of_two_tokenizers(refusal: Refusal, plain_store: Path, tmp_path: Path):
    store = shutil.copytree(plain_store, tmp_path / "other-store")
    retrained_tokenizer(store)
    hashes = [TokenStore(path).tokenizer_hash[:12] for path in (plain_store, store)]
    named = ["data.sources[1].store", str(plain_store), str(store), *hashes]
    refusal.of_run(options(tmp_path / "run", plain_store, store), tmp_path / "run", 65, *named)


def test_a_vocabulary_smaller_than_the_tokenizers(refusal: Refusal, plain_store: Path, tmp_path: Path):
    arguments = [*options(tmp_path / "run", plain_store), "--model.vocab_size", "256"]
    refusal.of_run(arguments, tmp_path / "run", 2, "model.vocab_size", "at least the tokenizer's 259", "256")


# What changed since the checkpoint: refused, and the same command continues once it is put right.


def flip_a_byte(store: Path) -> None:
    file = store / "train" / "tokens-00000.bin"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)


def prepare_again(store: Path) -> None:
    """The same documents, split otherwise."""
    corpus = write_jsonl(store.with_name("corpus.jsonl"), [{"text": text} for text in make_texts(400)])
    tokenizer = shutil.copytree(store / "tokenizer", store.with_name("tokenizer"))
    prepare_store(Preparation([str(corpus)], tokenizer, store, validation_fraction=0.3, overwrite=True))


def retrained_tokenizer(store: Path) -> None:
    """A store of the same text by another tokenizer."""
    shutil.rmtree(store)
    corpus = write_jsonl(store.with_name("corpus.jsonl"), [{"text": text} for text in make_texts(400)])
    tokenizer = make_tokenizer(store.with_name("tokenizer"), bos=False)
    prepare_store(Preparation([str(corpus)], tokenizer, store))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (prepare_again, ["data.store.0 is", "in the checkpoint", "here"]),
        (retrained_tokenizer, ["data.store.0 is", "tokenizer is", "in the checkpoint", "here"]),
    ],
)
def test_a_store_that_changed_after_the_checkpoint(
    refusal: Refusal,
    run_and_store: tuple[Path, Path],
    tmp_path: Path,
    change: Callable[[Path], None],
    named: list[str],
):
    run, store = run_and_store
    shutil.copytree(store, tmp_path / "kept")
    change(store)
    refusal.of_run(options(run, store, steps=3), run, 78, *named)
    shutil.rmtree(store, ignore_errors=True)
    shutil.copytree(tmp_path / "kept", store)
    assert train(*options(run, store, steps=3)) == 0
    assert Finished(0, "", run).raw_steps() == [1, 2, 3]


NEWEST, WEIGHTS = "checkpoints/step-00000002", "weights/step-00000002"


@pytest.mark.parametrize(
    ("name", "changes", "exit_code", "named"),
    [
        ("run", ["--training.global_batch_size", "8"], 78, ["training.global_batch_size is 4", "8 here"]),
        ("run", ["--checkpoint.resume", "never"], 2, ["checkpoint.resume: never", "step 2"]),
        ("new", ["--checkpoint.resume", WEIGHTS], 74, [WEIGHTS, "expected a checkpoint with a manifest"]),
        ("new", ["--checkpoint.resume", "."], 74, ["expected a checkpoint", "did you mean", NEWEST]),
    ],
    ids=["another configuration", "never", "weights", "a run"],
)
def test_what_a_run_cannot_continue_with(
    refusal: Refusal,
    run_and_store: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    changes: list[str],
    exit_code: int,
    named: list[str],
):
    run, store = run_and_store
    monkeypatch.chdir(run)
    folder = run.with_name(name)
    refusal.of_run([*options(folder, store, steps=3), *changes], folder, exit_code, *named)


def test_another_runs_finished_checkpoint_makes_a_whole_run(trained: tuple[Path, Path], tmp_path: Path):
    """Nothing is left to train, but a run's folder has its checkpoint and its weights all the same."""
    run, store = trained
    source = run / "checkpoints" / "step-00000002"
    assert train(*options(tmp_path / "run", store), "--checkpoint.resume", str(source)) == 0
    finished = Finished(0, "", tmp_path / "run")
    assert finished.status["state"] == "finished"
    assert finished.status["checkpoint"] == str(tmp_path / "run" / "checkpoints" / "step-00000002")
    names = [file.name for file in (run / "weights" / "step-00000002").iterdir()]
    for name in names:
        theirs, ours = (folder / "weights" / "step-00000002" / name for folder in (run, tmp_path / "run"))
        assert theirs.read_bytes() == ours.read_bytes()


def test_weights_that_a_kill_left_out_are_made_up_for(run_and_store: tuple[Path, Path]):
    run, store = run_and_store
    expected = contents(run / "weights")
    shutil.rmtree(run / "weights" / "step-00000002")
    assert train(*options(run, store)) == 0
    assert contents(run / "weights") == expected
    assert Finished(0, "", run).raw_steps() == [1, 2]


# The run's folder.


def test_an_output_folder_that_cannot_be_written(refusal: Refusal, plain_store: Path):
    folder = f"{TINY}/run"
    named = [folder, "expected a writable folder", "run.output_dir"]
    refusal.of_training(options(Path(folder), plain_store), 73, *named)


def test_two_runs_in_one_folder(plain_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A run has its folder to itself from its start to its end."""
    folder, steps = tmp_path / "run", train_pretrain.TorchrunEngine.train_step

    def train_step(self: Any, taken: Any) -> None:
        with pytest.raises(OutputError, match=rf"{folder}: .* locked .*process {os.getpid()}.* run\.name"):
            RunFolder(folder).acquire(lambda checkpoints: None)
        steps(self, taken)

    monkeypatch.setattr(train_pretrain.TorchrunEngine, "train_step", train_step)
    assert train(*options(folder, plain_store)) == 0
    RunFolder(folder).acquire(lambda checkpoints: None)


def test_a_launched_data_error(tmp_path: Path):
    """Launchers add reports of their own; ours is one line, whoever raised it."""
    folder, store = tmp_path / "run", make_store(tmp_path / "store", documents=50).path
    flip_a_byte(store)
    arguments = [*options(folder, store), "--training.global_batch_size", "8"]
    finished = launch("torchrun", 2, folder, arguments, exit_code=None)
    assert finished.exit_code not in (0, None)
    (line,) = re.findall(r"^error: .*$", finished.output, re.MULTILINE)
    for ours in ("llm_pretrain/", "train_pretrain"):  # the environment may lie in the same folder
        assert f'File "{ROOT}/{ours}' not in finished.output, "a traceback through our code"
    assert "train/tokens-00000.bin: expected unaltered contents" in line
    status = finished.status
    assert (status["state"], status["exit_code"], status["world_size"]) == ("failed", 65, 2)
    assert line == f"error: {status['reason']}"
