"""Whatever a user gets wrong: one line that names it, the documented exit code, and nothing is harmed.

In this process where that can be, since it is fast; through the launchers where they have a part in it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.corpora import make_store, make_texts, make_tokenizer, write_jsonl
from support.launching import ROOT, TIMEOUT_SECONDS, Finished, ForkedLaunch, launch, train

import train_pretrain
from llm_pretrain.__main__ import main as run_command
from llm_pretrain.data.preparation import Preparation, prepare_store
from llm_pretrain.data.store import TokenStore
from llm_pretrain.files import MARKER

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
        """As `of_training`; status.json says the same, and nothing else in the folder changes."""
        before, reached = contents(folder), progress(folder)
        message = self.of_training(arguments, exit_code, *named)
        status = json.loads((folder / "status.json").read_text())
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


# The configuration: refused before there is a run, so nothing is written.


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (["--model.hiden_size", "64"], ["model.hiden_size", "no such setting", "model.hidden_size"]),
        (["--training.max_steps", "ten"], ["training.max_steps", "expected an integer", "'ten'"]),
        (["--model.num_hidden_layers", "0"], ["model.num_hidden_layers", "more than 0", "found 0"]),
        (
            ["--training.global_batch_size", "7"],
            ["training.global_batch_size", "training.micro_batch_size", "4 * 1", "found 7", "4 or 8"],
        ),
        (["--config", f"{TINY}x"], [f"{TINY}x: no such file"]),
        (["--data.sources", "[]"], ["data.sources", "expected at least one token store", "prepare"]),
        (["--checkpoint.resume", "runs/nowhere"], ["checkpoint.resume", "expected auto", "'runs/nowhere'"]),
        (["please"], ["please", "unexpected argument", "--section.field VALUE"]),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else str(value),
)
def test_a_wrong_configuration(
    refusal: Refusal, plain_store: Path, tmp_path: Path, wrong: list[str], named: list[str]
):
    folder = tmp_path / "run"
    refusal.of_training([*options(folder, plain_store), *wrong], 2, *named)
    assert not folder.exists()


@pytest.mark.parametrize(("rank", "launcher"), [(0, "torchrun"), (1, "torchrun"), (0, ""), (1, "")])
def test_ranks_speak_before_they_meet_and_under_a_launcher_once(
    rank: int,
    launcher: str,
    plain_store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """A process of two, without the other and without anywhere to meet.

    Started by hand the other may be on another machine, with another file; a launcher has one command.
    """
    if launcher:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", launcher)
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *_, **__: pytest.fail("they met"))
    assert train(*options(tmp_path / "run", plain_store)) == 2
    lines = capsys.readouterr().err.splitlines()
    where = f"rank {rank}: " if rank else ""
    expected = (
        f"error: {where}training.global_batch_size: expected a multiple of training.micro_batch_size * world"
    )
    assert [line[: len(expected)] for line in lines] == ([] if rank and launcher else [expected])


# The corpus: refused by the commands, which leave nothing behind.

GOOD = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in make_texts(20)).encode()


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("cut.jsonl", GOOD[: len(GOOD) - 30], ["cut.jsonl:20:", "invalid JSON", "Unterminated string"]),
        ("bytes.txt", b"first line\nsecond \xe4 line\n", ["bytes.txt:", "invalid UTF-8", "0xe4"]),
        ("keys.jsonl", GOOD + b'{"body": "a"}\n', ["keys.jsonl:21:", "no text", "found body"]),
        ("empty.jsonl", b"", ["empty.jsonl", "expected", "found none"]),
        ("missing.jsonl", None, ["missing.jsonl", "found no such path"]),
    ],
)
def test_a_wrong_corpus(refusal: Refusal, tmp_path: Path, name: str, content: bytes | None, named: list[str]):
    corpus, tokenizer = tmp_path / name, make_tokenizer(tmp_path / "tokenizer")
    if content is not None:
        corpus.write_bytes(content)
    before = sorted(tmp_path.rglob("*"))
    refusal.of_command(
        ["prepare", "--input", corpus, "--tokenizer", tokenizer, "--output", tmp_path / "store"], 65, *named
    )
    refusal.of_command(
        ["tokenizer", "--input", corpus, "--vocab_size", "300", "--output", tmp_path / "new"], 65, *named
    )
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("wrong", "exit_code", "named"),
    [
        (["tokenizer", "--vocab_size", "-5"], 2, ["--vocab_size", "expected more than 0", "-5"]),
        (["tokenizer", "--vocab_size", "20"], 65, ["--vocab_size", "expected at least", "20"]),
        (["prepare", "--validation_fraction", "2"], 2, ["--validation_fraction", "expected", "2.0"]),
        (["prepare", "--workers", "-1"], 2, ["--workers", "expected 1 or more", "-1"]),
        (["prepare", "--tokenizer", "nowhere"], 65, ["nowhere", "expected a tokenizer folder", "found none"]),
        (["prepare", "--output", TINY], 65, [TINY, "expected a new folder", "something else"]),
        (["prepare", "--output", "/proc/none/store"], 74, ["/proc/none", "No such file"]),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, list) else str(value),
)
def test_a_wrong_option_of_a_command(
    refusal: Refusal, tmp_path: Path, wrong: list[str], exit_code: int, named: list[str]
):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes(GOOD)
    needed = ["--tokenizer", make_tokenizer(tmp_path / "tokenizer")] if wrong[0] == "prepare" else []
    needed += ["--input", corpus, "--output", tmp_path / "output"]
    refusal.of_command([wrong[0], *needed, *wrong[1:]], exit_code, *named)
    assert not (tmp_path / "output").exists()


# The token store and its tokenizer: refused by the run, whose status.json says so too.


def missing_store(folder: Path, plain_store: Path) -> tuple[list[str], int, list[str]]:
    store = folder / "store"
    return options(folder / "run", store), 65, [str(store), "store.json", "llm-pretrain prepare"]


def other_tokenizer(folder: Path, plain_store: Path) -> tuple[list[str], int, list[str]]:
    store = shutil.copytree(plain_store, folder / "other-store")
    retrained_tokenizer(store)
    hashes = [TokenStore(path).tokenizer_hash[:12] for path in (plain_store, store)]
    named = ["data.sources[1].store", str(plain_store), str(store), *hashes]
    return options(folder / "run", plain_store, store), 65, named


def small_vocabulary(folder: Path, plain_store: Path) -> tuple[list[str], int, list[str]]:
    arguments = [*options(folder / "run", plain_store), "--model.vocab_size", "256"]
    return arguments, 2, ["model.vocab_size", "at least the tokenizer's 259", "256"]


@pytest.mark.parametrize("wrong", [missing_store, other_tokenizer, small_vocabulary])
def test_a_wrong_store(refusal: Refusal, plain_store: Path, tmp_path: Path, wrong: Callable[..., Any]):
    arguments, exit_code, named = wrong(tmp_path, plain_store)
    refusal.of_run(arguments, tmp_path / "run", exit_code, *named)


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
    ("change", "exit_code", "named"),
    [
        (flip_a_byte, 65, ["train/tokens-00000.bin", "expected unaltered contents", "found"]),
        (prepare_again, 78, ["data.store.0 is", "in the checkpoint", "here"]),
        (retrained_tokenizer, 78, ["data.store.0 is", "tokenizer is", "in the checkpoint", "here"]),
    ],
)
def test_a_store_that_changed_after_the_checkpoint(
    refusal: Refusal,
    run_and_store: tuple[Path, Path],
    tmp_path: Path,
    change: Callable[[Path], None],
    exit_code: int,
    named: list[str],
):
    run, store = run_and_store
    shutil.copytree(store, tmp_path / "kept")
    change(store)
    refusal.of_run(options(run, store, steps=3), run, exit_code, *named)
    shutil.rmtree(store, ignore_errors=True)
    shutil.copytree(tmp_path / "kept", store)
    assert train(*options(run, store, steps=3)) == 0
    assert Finished(0, "", run).raw_steps() == [1, 2, 3]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (["--model.hidden_size", "32"], ["model.hidden_size is 64 in the checkpoint, 32 here"]),
        (["--training.global_batch_size", "8"], ["training.global_batch_size is 4", "8 here"]),
    ],
)
def test_a_checkpoint_of_another_configuration(
    refusal: Refusal, run_and_store: tuple[Path, Path], changed: list[str], named: list[str]
):
    run, store = run_and_store
    refusal.of_run([*options(run, store, steps=3), *changed], run, 78, str(run / "checkpoints"), *named)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("weights/step-00000002", ["expected a checkpoint with a manifest.json", "found none"]),
        (".", ["expected a checkpoint", "did you mean", "checkpoints/step-00000002"]),
    ],
)
def test_a_folder_that_is_no_checkpoint(
    refusal: Refusal, trained: tuple[Path, Path], tmp_path: Path, source: str, named: list[str]
):
    run, store = trained
    arguments = [*options(tmp_path / "run", store), "--checkpoint.resume", str(run / source)]
    refusal.of_run(arguments, tmp_path / "run", 74, str(run / source), *named)


def test_never_resume_where_there_are_checkpoints(refusal: Refusal, run_and_store: tuple[Path, Path]):
    run, store = run_and_store
    arguments = [*options(run, store), "--checkpoint.resume", "never"]
    refusal.of_run(arguments, run, 2, "checkpoint.resume: never", str(run / "checkpoints"), "step 2")


def test_checkpoints_of_which_none_is_sound(refusal: Refusal, run_and_store: tuple[Path, Path]):
    run, store = run_and_store
    for file in (run / "checkpoints").rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    refusal.of_run(options(run, store, steps=3), run, 74, "step-00000002", "step-00000001", ".safetensors")


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


@pytest.mark.parametrize("folder", ["/proc/none/run", f"{TINY}/run"])
def test_an_output_folder_that_cannot_be_written(refusal: Refusal, plain_store: Path, folder: str):
    named = [folder, "expected a writable folder", "run.output_dir"]
    refusal.of_training(options(Path(folder), plain_store), 73, *named)


def test_two_runs_in_one_folder(refusal: Refusal, plain_store: Path, tmp_path: Path):
    folder = tmp_path / "run"
    endless = [*options(folder, plain_store, steps=1_000_000), "--checkpoint.save_steps", "0"]
    first = ForkedLaunch("torchrun", 1, folder, endless)
    try:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not (folder / "metrics.jsonl").exists():
            assert first.poll() is None, first.output
            assert time.monotonic() < deadline
            time.sleep(0.05)
        before = (folder / "status.json").read_text()
        named = [str(folder), "locked", f"process {first.ranks.pids[0]}", "run.name"]
        refusal.of_training(options(folder, plain_store), 73, *named)
        assert (folder / "status.json").read_text() == before
        assert json.loads(before)["state"] == "running"
    finally:
        first.ranks.send(signal.SIGTERM)
        finished = first.finish()
    assert finished.exit_code == 75
    assert finished.status["reason"] == "SIGTERM"


def test_an_interruption_before_the_run_begins_is_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(train_pretrain, "TorchrunEngine", interrupted)
    assert train("--config", TINY) == 130
    assert capsys.readouterr() == ("", "")


def test_zlib_is_given_for_the_text_of_all_sources(
    plain_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    other = make_store(tmp_path / "other", documents=80, seed=3, validation_fraction=0.5)
    stores = [TokenStore(plain_store), other]
    assert train(*options(tmp_path / "run", *(store.path for store in stores))) == 0
    sizes = [store.split("validation").text_bytes for store in stores]
    bits = sum(store.zlib_bits_per_byte * size for store, size in zip(stores, sizes, strict=True)) / sum(
        sizes
    )
    assert f"zlib level 9 needs {bits:.4f} bits per byte" in capsys.readouterr().out


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
