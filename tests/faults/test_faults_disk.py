"""Disks that are full, too small for a file, broken or read-only: one line, nothing lost, exact afterwards.

All run the script's `main` in a fork.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.corpora import make_store
from support.crash_checks import exact_rows, small_options, tensor_digests
from support.faulty_io import Fault
from support.launching import Finished

from llm_pretrain.checkpoints.folders import committed_folders
from llm_pretrain.checkpoints.manifest import find_damage, read_manifest

STEPS = 8
MAX_FAILED_SAVES = 3
"""Failures in a row that end a run, as documented."""
ASYNC = ["--checkpoint.async_save", "true"]
needs_mount = pytest.mark.skipif(
    os.geteuid() != 0 or subprocess.call(["unshare", "--mount", "true"], stderr=subprocess.DEVNULL) != 0,
    reason="mounting a small disk needs root",
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of a very small run: eight steps, each saved."""
    store = make_store(tmp_path_factory.mktemp("small") / "store", documents=60, masked=True)
    return [*small_options(store.path), "--training.max_steps", str(STEPS), "--evaluation.eval_steps", "0"]


@pytest.fixture(scope="module")
def oracle(probe, small, tmp_path_factory) -> Path:
    """The small run that nothing happened to."""
    folder = tmp_path_factory.mktemp("oracle") / "run"
    (end,) = probe.train(folder, small)
    assert end.exit_code == 0, end.output
    return folder


@pytest.fixture
def disk(tmp_path) -> Iterator[Callable[[int], Path]]:
    """A function that mounts an empty disk of so many bytes."""
    mounted: list[Path] = []

    def mount(size: int) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def resize(folder: Path, size: int) -> None:
    """Give a mounted disk another size."""
    subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], check=True)


def used(folder: Path) -> int:
    """Bytes that a folder takes on a disk of whole pages."""
    return sum(-(-file.stat().st_size // 4096) * 4096 for file in folder.rglob("*") if file.is_file())


def room_for_two(finished: Path) -> int:
    """Size of a disk that holds two checkpoints and their weights, and half as much again as one."""
    (one, *_) = committed_folders(finished / "checkpoints").values()
    (weights, *_) = committed_folders(finished / "weights").values()
    small_files = sum(file.stat().st_size + 4096 for file in finished.iterdir() if file.is_file())
    return 2 * (used(one) + used(weights)) + used(one) // 2 + small_files


def sound_steps(folder: Path) -> list[int]:
    """Steps of the committed checkpoints; every one must be whole, and nothing hidden beside them."""
    for parent in ("checkpoints", "weights"):
        assert [path.name for path in (folder / parent).glob(".*")] == []
    committed = committed_folders(folder / "checkpoints")
    for path in committed.values():
        assert find_damage(path, read_manifest(path)) == []
    return list(committed)


def lines(output: str, start: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(start)]


def check_stopped(folder: Path, output: str, reason: str, *, step: int, later: int = 0) -> None:
    """Three failed saves in a row ended the run at `step`, with a line that says where, how much and why.

    Or up to `later` steps after it: what became of a save in the background is taken when the next is due.
    """
    (error,) = lines(output, "error: ")
    assert reason in error
    assert str(folder) in error
    assert "bytes" in error
    assert not re.search(r'File "[^"]*llm_pretrain/', output), (
        "a traceback of ours; launchers print their own"
    )
    status = Finished(0, "", folder).status
    assert (status["state"], status["exit_code"]) == ("failed", 74)
    assert step <= max(exact_rows(folder)) <= step + later, "training goes on until the third failure"
    warnings = lines(output, "warning: ")
    told = [line for line in warnings if reason in line and "bytes" in line]
    assert len(told) >= MAX_FAILED_SAVES - 1, output


def check_same_end(folder: Path, oracle: Path) -> None:
    """Rows and the last checkpoint are those of the run that nothing happened to."""
    assert exact_rows(folder) == exact_rows(oracle)
    last = max(sound_steps(folder))
    assert last == max(sound_steps(oracle))
    name = f"checkpoints/step-{last:08d}"
    assert tensor_digests(folder / name) == tensor_digests(oracle / name)


@needs_mount
@pytest.mark.parametrize("mode", [[], pytest.param(ASYNC, marks=pytest.mark.slow)], ids=["sync", "async"])
def test_a_full_disk_stops_after_three_saves_and_continues_with_more_room(probe, small, oracle, disk, mode):
    folder = disk(room_for_two(oracle)) / "run"
    (end,) = probe.train(folder, [*small, *mode])
    assert end.exit_code == 74, end.output
    check_stopped(folder, end.output, "No space left on device", step=5, later=len(mode) // 2)
    assert sound_steps(folder) == [1, 2]
    resize(folder.parent, 2 * room_for_two(oracle))
    (end,) = probe.train(folder, [*small, *mode])
    assert end.exit_code == 0, end.output
    check_same_end(folder, oracle)


def refused(only: str, at: int = 2, error: int = errno.ENOSPC, times: int = -1) -> dict[str, Any]:
    return {"faults": {0: Fault("refuse", at, error, times=times, only=only)}}


FULL, BROKEN = "No space left on device", "Input/output error"
STOPS: dict[str, tuple[dict[str, Any], set[int], str, list[int] | None]] = {
    "last save": (refused("fsync:shard-", STEPS - 1, times=1), {74}, FULL, [STEPS - 2, STEPS - 1]),
    "fsync breaks": (refused("fsync:shard-", error=errno.EIO), {74}, BROKEN, [1, 2]),
    "limit on files": ({"file_size": 50_000}, {74}, "File too large", []),
    "read-only": (refused("", 60, errno.EROFS), {73, 74}, "Read-only file system", None),
    "metrics.jsonl": (refused("write:metrics.jsonl", 1), {73}, FULL, None),
    "attempts.jsonl": (refused("write:attempts.jsonl", 0), {73}, FULL, None),
    "config.yaml": (refused("write:config.yaml", 0), {73, 74}, FULL, None),
    "status.json": (refused("write:status.json", 1), {73, 74}, FULL, None),
}
"""name: the fault, the exit code, the reason, and the steps saved before it, where saves alone fail."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "last save" else pytest.mark.slow) for name in STOPS]
)
def test_a_disk_that_fails_stops_the_run_in_one_line_and_the_same_command_ends_it(
    probe, small, oracle, tmp_path, name
):
    """A failure of the last save at once, of others after the third; the signal of a limit does not kill."""
    fault, codes, reason, saved = STOPS[name]
    folder = tmp_path / "run"
    (end,) = probe.train(folder, small, **fault)
    assert end.exit_code in codes, end.output
    assert "Traceback" not in end.output
    (error,) = lines(end.output, "error: ")
    assert reason in error
    assert str(folder) in error
    assert not name.endswith((".jsonl", ".yaml", ".json")) or name in error
    if saved is not None:
        assert sound_steps(folder) == saved
    if saved in ([], [1, 2]):
        check_stopped(folder, end.output, reason, step=len(saved) + MAX_FAILED_SAVES)
    (end,) = probe.train(folder, small)
    assert end.exit_code == 0, end.output
    check_same_end(folder, oracle)
