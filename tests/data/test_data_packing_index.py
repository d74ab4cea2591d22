"""A stored packing index equals the packing; damaged, foreign and incomplete files are not used."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from support.corpora import make_store

from llm_pretrain.data import packing as packing_index
from llm_pretrain.data.packing import FOLDER, PackedIndex, pack, packed_index
from llm_pretrain.data.store import TokenStore

NAME = "train-best_fit-64.bin"
ARRAYS = ("piece_start", "piece_length", "sequence_offsets")


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TokenStore:
    """A store whose index is kept in a file, however small it is."""
    monkeypatch.setattr(packing_index, "IN_MEMORY", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return make_store(tmp_path / "store", documents=120)


def check(
    store: TokenStore, found: PackedIndex, packing: str = "best_fit", sequence_length: int = 64
) -> None:
    expected = pack(store.split("train").offsets, sequence_length, packing)
    for name in ARRAYS:
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name


def written(store: TokenStore) -> Path:
    packed_index(store, "train", 64, "best_fit")
    return store.path / FOLDER / NAME


@pytest.mark.parametrize("packing", ["best_fit", "concat", "pad"])
def test_it_is_built_once_and_then_mapped(large: TokenStore, packing: str, monkeypatch: pytest.MonkeyPatch):
    check(large, packed_index(large, "train", 64, packing), packing)
    with monkeypatch.context() as patched:
        patched.setattr(packing_index, "pack", None)  # must not be called again
        again = packed_index(large, "train", 64, packing)
    check(large, again, packing)
    base = again.piece_start
    while isinstance(base.base, np.ndarray):
        base = base.base
    assert isinstance(base, np.memmap)
    assert [file.name for file in (large.path / FOLDER).glob("*.bin")] == [f"train-{packing}-64.bin"]
    assert not list((large.path / FOLDER).glob("*.tmp*"))
    large.verify()


def test_pieces_as_long_as_their_type_can_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packing_index, "IN_MEMORY", 0)
    store = make_store(tmp_path / "store", documents=6, longest=30_000)
    for sequence_length in ((1 << 16) - 1, 1 << 16):
        found = packed_index(store, "train", sequence_length, "best_fit")
        assert max(found.piece_length) == sequence_length, "no document fills a sequence"
        check(store, found, sequence_length=sequence_length)


def damage(file: Path, kind: str) -> None:
    content = bytearray(file.read_bytes())
    if kind == "cut":
        del content[-8:]
    elif kind == "empty":
        content.clear()
    elif kind == "endless":  # JSON has no such number, Python's reader does
        content[:4096] = re.sub(rb'"pieces": \d+', b'"pieces": 1e999', content[:4096])[:4096].ljust(
            4096, b"\0"
        )
    else:
        content[{"digest": content.index(b'"digest"') + 14, "flipped": -5}[kind]] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("kind", ["cut", "empty", "endless", "digest", "flipped"])
def test_a_damaged_file_is_built_anew_with_a_warning(
    large: TokenStore, kind: str, caplog: pytest.LogCaptureFixture
):
    file = written(large)
    sound = file.read_bytes()
    damage(file, kind)
    with caplog.at_level(logging.WARNING):
        check(large, packed_index(large, "train", 64, "best_fit"))
    assert [str(file) in message for message in caplog.messages] == [True]
    assert "built anew" in caplog.text
    assert file.read_bytes() == sound


def test_what_is_sampled_in_a_large_file_is_compared(
    large: TokenStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(packing_index, "_WHOLE", 0)
    file = written(large)
    check(large, packed_index(large, "train", 64, "best_fit"))
    damage(file, "flipped")
    check(large, packed_index(large, "train", 64, "best_fit"))
    assert "contents are altered" in caplog.text


def test_an_index_of_another_store_is_not_used(large: TokenStore, tmp_path: Path):
    other = make_store(tmp_path / "other", documents=90, seed=3)
    written(large)
    shutil.copytree(large.path / FOLDER, other.path / FOLDER)
    check(other, packed_index(other, "train", 64, "best_fit"))


def test_a_store_that_cannot_be_written_to(
    large: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """A file stands where the folder should be: not even root can make it."""
    (large.path / FOLDER).write_text("")
    check(large, packed_index(large, "train", 64, "best_fit"))
    assert (tmp_path / "cache" / "llm_pretrain" / FOLDER / large.hash / NAME).is_file()
    assert not caplog.messages
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    check(large, packed_index(large, "train", 64, "best_fit"))
    assert "packed in memory" in caplog.text


def test_files_of_a_killed_build_are_removed_by_the_next(large: TokenStore):
    def killed() -> None:
        packing_index._digest = lambda stream: os.kill(os.getpid(), signal.SIGKILL)
        packed_index(large, "train", 64, "best_fit")

    file = large.path / FOLDER / NAME
    process = multiprocessing.get_context("fork").Process(target=killed)
    process.start()
    process.join(timeout=60)
    assert process.exitcode == -signal.SIGKILL
    assert not file.exists()
    assert [*file.parent.glob(".*.tmp-*")]
    check(large, packed_index(large, "train", 64, "best_fit"))
    assert file.is_file()
    assert not [*file.parent.glob(".*.tmp-*")]


def _build(path: Path, results: multiprocessing.SimpleQueue) -> None:
    packing_index.IN_MEMORY = 0
    index = packed_index(TokenStore(path), "train", 64, "best_fit")
    results.put([getattr(index, name).tolist() for name in ARRAYS])


def test_processes_that_start_at_once_agree(large: TokenStore):
    context = multiprocessing.get_context("fork")  # spawned ones would import torch
    results = context.SimpleQueue()
    processes = [context.Process(target=_build, args=(large.path, results)) for _ in range(3)]
    for process in processes:
        process.start()
    found = [results.get() for _ in processes]
    for process in processes:
        process.join(timeout=60)
    expected = pack(large.split("train").offsets, 64, "best_fit")
    assert all(each == [getattr(expected, name).tolist() for name in ARRAYS] for each in found)


def test_a_full_disk_leaves_nothing_half_written(
    large: TokenStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    def full(stream: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packing_index, "_digest", full)
    check(large, packed_index(large, "train", 64, "best_fit"))
    left = [file for file in tmp_path.rglob("*.bin*") if FOLDER in str(file)]
    assert all(file.suffix == ".lock" for file in left)
