"""`prepare` killed at any moment and started again gives the bytes of a run that was not killed."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from support.corpora import make_texts, make_tokenizer, write_jsonl

from llm_pretrain.data import preparation as prepare_module
from llm_pretrain.data import store_writer
from llm_pretrain.data.preparation import Preparation, prepare_store
from llm_pretrain.data.store import TokenStore
from llm_pretrain.errors import DataError, OutputError

OPERATIONS = (
    *((Path, name) for name in ("rename", "replace", "mkdir", "unlink", "write_text")),
    (os, "fsync"),
)
"""What changes the disk, and after or before which a kill may come."""


MIDDLE = 80
"""An operation amid the work, after several commits."""


def all_files(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def preparation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Preparation:
    """Many small batches: two files, bad records, duplicates, masks that begin late, and several shards."""
    monkeypatch.setattr(prepare_module, "BATCH_BYTES", 1500)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    generator = random.Random(3)
    records: list[dict] = [{"text": text} for text in make_texts(60, longest=25)]
    records += [records[index] for index in (3, 9, 40)]
    records += [{"prompt": text, "completion": "yes"} for text in make_texts(20, seed=1, longest=9)]
    records += [{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 0]}, {"no": "text"}, {"text": ""}]
    generator.shuffle(records[20:])
    files = [
        write_jsonl(tmp_path / f"{k}.jsonl", part) for k, part in enumerate((records[:50], records[50:]))
    ]
    return Preparation(
        [str(file) for file in files],
        make_tokenizer(tmp_path / "tokenizer"),
        tmp_path / "store",
        0.2,
        on_error="skip",
        deduplicate=True,
        workers=1,
        shard_bytes=700,
        commit_seconds=0.0,
    )


def run_until_killed(work: Callable[[], object], kill_at: int) -> bool:
    """Runs `work` in a process that kills itself at operation `kill_at`; False if it came to its end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads; none is used
        child = os.fork()
    if child == 0:
        done = 0

        def counted(original: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*arguments: Any, **options: Any) -> Any:
                nonlocal done
                done += 1
                if done == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*arguments, **options)

            return wrapped

        try:
            files = tuple((store_writer.HashedFile, name) for name in ("write", "sync", "close"))
            for owner, name in OPERATIONS + files:
                setattr(owner, name, counted(getattr(owner, name)))
            work()
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), "the run failed by itself"
    return status != 0


def expected_files(preparation: Preparation) -> dict[str, bytes]:
    whole = replace(preparation, output=Path(preparation.output).with_name("whole"), commit_seconds=1e9)
    return all_files(prepare_store(whole).path)


@pytest.mark.parametrize("apart", [24, pytest.param(5, marks=pytest.mark.slow)])
def test_a_preparation_killed_anywhere_gives_the_same_bytes(preparation: Preparation, apart: int):
    """The run is killed at an operation, and started again; the points lie closely over all of the work."""
    expected = expected_files(preparation)
    output = Path(preparation.output)
    points = []
    for kill_at in (*range(1, 12), *range(12, 1000, apart)):
        if not run_until_killed(lambda: prepare_store(preparation), kill_at):
            break
        points.append(kill_at)
        if not (output / "store.json").exists() or list(output.parent.glob(".*/state.json")):
            prepare_store(preparation)
        else:  # killed between the last two files that are removed; all the work is done
            shutil.rmtree(output.with_name(".store.partial"))
        assert all_files(output) == expected, f"killed at operation {kill_at}"
        assert not list(output.parent.glob(".*"))
        shutil.rmtree(output)
    assert len(points) > 15
    assert all_files(output) == expected


def test_the_replaced_store_is_restored_if_the_new_one_fails(
    preparation: Preparation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Killed between the two renamings that replace a store, and then started with other, broken input."""
    before = all_files(prepare_store(replace(preparation, validation_fraction=0.5)).path)
    again = replace(preparation, overwrite=True)
    expected = expected_files(again)
    output, rename = Path(preparation.output), Path.rename

    def killed_before_the_new_one(path: Path, target: Path) -> Path:
        if target == output:
            raise SystemExit
        return rename(path, target)

    def killed() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", killed_before_the_new_one)
            with pytest.raises(SystemExit):
                prepare_store(again)
        assert not output.exists()

    killed()
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{")
    with pytest.raises(DataError):
        prepare_store(replace(again, input=[str(bad)], on_error="fail"))
    assert all_files(output) == before
    assert not list(output.parent.glob(".*"))
    killed()
    assert all_files(prepare_store(again).path) == expected
    assert not list(output.parent.glob(".*"))


def test_a_preparation_killed_with_one_worker_resumes_with_two(preparation: Preparation):
    expected = expected_files(preparation)
    assert run_until_killed(lambda: prepare_store(preparation), MIDDLE)
    assert all_files(prepare_store(replace(preparation, workers=2)).path) == expected


def test_a_preparation_killed_repeatedly_completes(preparation: Preparation):
    expected = expected_files(preparation)
    kill_at, kills = 30, 0
    while run_until_killed(lambda: prepare_store(preparation), kill_at):
        kills += 1
        kill_at += 10  # at last there is enough time for what comes after the last commit
    assert kills > 4
    assert all_files(Path(preparation.output)) == expected


def test_finished_batches_are_not_encoded_again(preparation: Preparation, monkeypatch: pytest.MonkeyPatch):
    assert run_until_killed(lambda: prepare_store(preparation), MIDDLE)
    read = []
    original = prepare_module.read_sources
    monkeypatch.setattr(
        prepare_module,
        "read_sources",
        lambda *a, after, **o: read.append(after) or original(*a, after=after, **o),
    )
    notices: list[str] = []
    done: list[int] = []
    prepare_store(replace(preparation, notice=notices.append, progress=done.append))
    assert read[0] > (0, 0)
    assert len(notices) == 1
    assert "continues after" in notices[0]
    size = sum(Path(name).stat().st_size for name in preparation.input)
    assert sum(done) == size


@pytest.mark.parametrize(
    "change", ["input", "option", "tokenizer", "order", "text", "rename", "copy", "damage"]
)
def test_changed_inputs_or_options_start_from_the_beginning(preparation: Preparation, change: str):
    assert run_until_killed(lambda: prepare_store(preparation), MIDDLE)
    partial = Path(preparation.output).with_name(".store.partial")
    assert (partial / "state.json").exists()
    other = preparation
    if change == "input":
        other = replace(preparation, input=preparation.input[1:])
    elif change == "option":
        other = replace(preparation, deduplicate=False)
    elif change == "tokenizer":
        other = replace(preparation, tokenizer=make_tokenizer(partial.with_name("other"), bos=False))
    elif change == "order":
        other = replace(preparation, input=preparation.input[::-1])
    elif change == "text":
        file = Path(preparation.input[0])
        file.write_text(file.read_text().replace("one", "two"))
        os.utime(file, (1, 1))
    elif change in ("rename", "copy"):  # as by `rsync -t` and `cp -p`, of a file of the same size and time
        file = Path(preparation.input[0])
        new = file.with_suffix(".new")
        new.write_text(file.read_text().replace("one", "two"))
        shutil.copystat(file, new)
        shutil.move(new, file) if change == "rename" else shutil.copy2(new, file)
    else:
        file = next((partial / "store").rglob("offsets.bin"))
        file.write_bytes(file.read_bytes()[:8])
    notices: list[str] = []
    store = prepare_store(replace(other, notice=notices.append))
    assert notices == []
    assert all_files(store.path) == expected_files(other)


def test_the_test_above_detects_files_that_are_not_truncated(
    preparation: Preparation, monkeypatch: pytest.MonkeyPatch
):
    """Without truncation and its hash check, data written after the last commit stays in the files."""

    def untruncated(self: Any, path: Path, keep: int | None = None, sha256: str = "") -> None:
        self.path, self._hash, self.bytes = path, hashlib.sha256(), 0
        self._file = path.open("wb" if keep is None else "ab")
        for data in self.content():
            self._hash.update(data)
            self.bytes += len(data)

    expected = expected_files(preparation)
    monkeypatch.setattr(store_writer.HashedFile, "__init__", untruncated)
    for kill_at in range(MIDDLE, MIDDLE + 60):
        assert run_until_killed(lambda: prepare_store(preparation), kill_at)
        try:
            if all_files(prepare_store(replace(preparation, workers=1)).path) != expected:
                return
        except Exception:  # any error is a difference too
            return
        shutil.rmtree(preparation.output, ignore_errors=True)
    pytest.fail("every store was the expected one")


def test_a_second_prepare_of_one_output_is_refused(preparation: Preparation, tmp_path: Path):
    partial = tmp_path / ".store.partial"
    partial.mkdir()
    with FileLock(partial / "lock"), pytest.raises(OutputError, match="store: expected no other") as caught:
        prepare_store(preparation)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 73
    assert isinstance(prepare_store(preparation), TokenStore)


def test_an_interrupted_run_keeps_what_was_committed(preparation: Preparation, tmp_path: Path):
    expected = expected_files(preparation)
    batches = []

    def interrupt(_: int) -> None:
        batches.append(1)
        if len(batches) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_store(replace(preparation, progress=interrupt))
    assert not (tmp_path / "store").exists()
    assert (tmp_path / ".store.partial" / "state.json").exists()
    assert all_files(prepare_store(preparation).path) == expected
    assert not (tmp_path / ".store.partial").exists()


def test_workers_end_when_the_main_process_is_killed(tmp_path: Path):
    """Else they would wait for their next batch for ever, each with the memory of a tokenizer."""
    corpus = write_jsonl(tmp_path / "c.jsonl", [{"text": "x" * 2000}] * 30_000)
    command = [
        *(sys.executable, "-m", "llm_pretrain", "prepare", "--input", str(corpus), "--workers", "2"),
        *("--tokenizer", str(make_tokenizer(tmp_path / "tokenizer")), "--output", str(tmp_path / "store")),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    import psutil

    workers: list[psutil.Process] = []
    while len(workers) < 3 and process.poll() is None:  # two and the tracker of resources
        workers = psutil.Process(process.pid).children()
        time.sleep(0.01)
    assert process.poll() is None
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive


def test_a_store_counts_what_was_left_out(preparation: Preparation):
    facts = prepare_store(preparation).facts
    assert facts["duplicates"] == 3
    assert facts["skipped"] == {"empty document": 1, "no text": 1}
    assert sum(facts["input_documents"]) == 81
    assert facts["input_documents"][0] == 50
    state = json.loads((Path(preparation.output) / "store.json").read_text())
    assert state["deduplicated"] is True
