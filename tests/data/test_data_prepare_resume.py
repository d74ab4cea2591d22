"""`prepare` killed at any moment and started again gives the bytes of a run that was not killed."""

from __future__ import annotations

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
from hypothesis import given
from hypothesis import strategies as st
from support.corpora import make_texts, make_tokenizer, write_jsonl
from support.faulty_io import Tree, read_tree, write_tree
from support.fuzzing import altered_bytes, altered_json, dumped, fuzzed

from llm_pretrain.data import preparation as prepare_module
from llm_pretrain.data import store_writer
from llm_pretrain.data.preparation import Preparation, prepare_store
from llm_pretrain.data.store import TokenStore
from llm_pretrain.errors import DataError, OutputError
from llm_pretrain.files import MARKER

OPERATIONS = (
    *((Path, name) for name in ("rename", "replace", "mkdir", "unlink", "write_text")),
    (os, "fsync"),
)
"""What changes the disk, and after or before which a kill may come."""


MIDDLE = 80
"""An operation amid the work, after several commits."""


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


def expected_files(preparation: Preparation) -> Tree:
    whole = replace(preparation, output=Path(preparation.output).with_name("whole"), commit_seconds=1e9)
    return read_tree(prepare_store(whole).path)


@pytest.mark.parametrize("apart", [30, pytest.param(3, marks=pytest.mark.slow)])
def test_a_preparation_killed_anywhere_gives_the_same_bytes(preparation: Preparation, apart: int):
    """The run is killed at an operation, and started again; the points lie closely over all of the work."""
    expected = expected_files(preparation)
    output = Path(preparation.output)
    points = []
    for kill_at in range(1, 1000, apart):
        if not run_until_killed(lambda: prepare_store(preparation), kill_at):
            break
        points.append(kill_at)
        if not (output / "store.json").exists() or list(output.parent.glob(".*/state.json")):
            prepare_store(preparation)
        else:  # killed between the last two files that are removed; all the work is done
            shutil.rmtree(output.with_name(".store.partial"))
        assert read_tree(output) == expected, f"killed at operation {kill_at}"
        assert not list(output.parent.glob(".*"))
        shutil.rmtree(output)
    assert len(points) > 4
    assert read_tree(output) == expected


def test_the_replaced_store_is_restored_if_the_new_one_fails(
    preparation: Preparation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Killed between the two renamings that replace a store, and then started with other, broken input."""
    before = read_tree(prepare_store(replace(preparation, validation_fraction=0.5)).path)
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
    assert read_tree(output) == before
    assert not list(output.parent.glob(".*"))
    killed()
    assert read_tree(prepare_store(again).path) == expected
    assert not list(output.parent.glob(".*"))


def test_a_continued_preparation_says_from_where(preparation: Preparation):
    assert run_until_killed(lambda: prepare_store(preparation), MIDDLE)
    notices: list[str] = []
    done: list[int] = []
    prepare_store(replace(preparation, notice=notices.append, progress=done.append))
    (notice,) = notices
    assert "continues after" in notice
    size = sum(Path(name).stat().st_size for name in preparation.input)
    assert sum(done) == size


def with_other_text(preparation: Preparation, put: Callable[[Path, Path], object]) -> Preparation:
    """A file of the same size and time, as `rsync -t` and `cp -p` leave it."""
    file = Path(preparation.input[0])
    new = file.with_suffix(".new")
    new.write_text(file.read_text().replace("one", "two"))
    shutil.copystat(file, new)
    put(new, file)
    return preparation


def with_another_tokenizer(preparation: Preparation) -> Preparation:
    folder = Path(preparation.output).with_name("other")
    return replace(preparation, tokenizer=make_tokenizer(folder, bos=False))


def with_zeros(preparation: Preparation) -> Preparation:
    file = Path(preparation.output).with_name(".store.partial") / "store/train/tokens-00000.bin"
    file.write_bytes(bytes(file.stat().st_size))
    return preparation


CHANGES: dict[str, Callable[[Preparation], Preparation]] = {
    "another order": lambda preparation: replace(preparation, input=preparation.input[::-1]),
    "an option": lambda preparation: replace(preparation, deduplicate=False),
    "a form of special tokens": lambda preparation: replace(preparation, special_tokens="tokens"),
    "a separator": lambda preparation: replace(preparation, document_separator="x"),
    "a tokenizer": with_another_tokenizer,
    "text, renamed": lambda preparation: with_other_text(preparation, shutil.move),
    "text, copied": lambda preparation: with_other_text(preparation, shutil.copy2),
    "a shard of zeros": with_zeros,
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_inputs_or_options_start_from_the_beginning(preparation: Preparation, name: str):
    assert run_until_killed(lambda: prepare_store(preparation), MIDDLE)
    assert Path(preparation.output).with_name(".store.partial").joinpath("state.json").exists()
    other = CHANGES[name](preparation)
    notices: list[str] = []
    store = prepare_store(replace(other, notice=notices.append))
    assert notices == []
    assert read_tree(store.path) == expected_files(other)


@pytest.mark.fuzz
def test_any_state_of_prepare_makes_the_right_store(preparation: Preparation):
    expected = expected_files(preparation)
    assert run_until_killed(lambda: prepare_store(preparation), MIDDLE)
    output = Path(preparation.output)
    partial = output.with_name(".store.partial")
    kept = read_tree(partial)
    marks = {"lock", MARKER}  # without these it would be somebody else's folder
    files = {name: content for name, content in kept.items() if content is not None and name not in marks}
    state = json.loads(files["state.json"])

    @fuzzed(12)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        for folder in (partial, output):
            shutil.rmtree(folder, ignore_errors=True)
        write_tree(kept, partial)
        name = data.draw(st.sampled_from(["state.json", *sorted(files)]))
        by_value = name == "state.json" and data.draw(st.booleans())
        content = altered_json(state).map(dumped) if by_value else altered_bytes(files[name])
        (partial / name).write_bytes(data.draw(content))
        prepare_store(preparation)
        assert read_tree(output) == expected
        assert not partial.exists()

    check()


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
    store = prepare_store(preparation)
    assert read_tree(store.path) == expected
    assert not (tmp_path / ".store.partial").exists()
    counts = {name: store.facts[name] for name in ("duplicates", "deduplicated", "skipped")}
    assert counts == {"duplicates": 3, "deduplicated": True, "skipped": {"empty document": 1, "no text": 1}}
    assert store.facts["input_documents"] == [50, 31]


@pytest.mark.slow
def test_workers_end_when_the_main_process_is_killed(tmp_path: Path):
    """Else they would wait for their next batch for ever, each with the memory of a tokenizer."""
    corpus = write_jsonl(tmp_path / "c.jsonl", [{"text": "x" * 2000}] * 8000)
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


def test_a_preparation_killed_again_and_again_completes_with_more_workers(preparation: Preparation):
    expected = expected_files(preparation)
    for kill_at in range(30, 80, 10):
        assert run_until_killed(lambda: prepare_store(preparation), kill_at)
    assert read_tree(prepare_store(replace(preparation, workers=2)).path) == expected
