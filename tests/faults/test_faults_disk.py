"""Disks that are full, too small for a file, broken or read-only: one line, nothing lost, exact afterwards.

| fault | what comes of it |
|---|---|
| full disk in a periodic save | warning, training goes on; 74 after three in a row; older ones intact |
| space comes back | the next save passes, nothing is lost |
| a limit on the size of files | as a full disk |
| I/O error in fsync or rename | as a full disk |
| folder that cannot be written | 73, before anything is done |
| full disk at metrics, status, attempts | 73 or 74, the file named |
| full disk at report.html | a warning |

The quick tests run the script's `main` in a fork, the slow ones the public commands on both launchers.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.corpora import make_store
from support.crash_checks import exact_rows, small_options, tensor_digests
from support.faulty_io import Fault
from support.interrupting import assert_exact
from support.launching import Finished, launch

from llm_pretrain.checkpoints.folders import committed_folders
from llm_pretrain.checkpoints.manifest import find_damage, read_manifest

STEPS = 8
MAX_FAILED_SAVES = 3
"""Failures in a row that end a run, as documented."""
ASYNC = ["--checkpoint.async_save", "true"]
MODES = pytest.mark.parametrize("mode", [[], ASYNC], ids=["sync", "async"])
LAUNCHERS = pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
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
@MODES
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


@pytest.mark.slow
@MODES
@pytest.mark.parametrize(
    "only",
    [
        *("create:shard-", "fsync:shard-", "fsync:manifest.json"),
        *("rename:checkpoints/.step-", "create:model.safetensors"),
    ],
)
def test_two_failed_saves_and_room_again_lose_nothing(probe, small, oracle, tmp_path, mode, only):
    fault = Fault("refuse", 2, errno.ENOSPC, times=2, only=only)
    (end,) = probe.train(tmp_path / "run", [*small, *mode], faults={0: fault})
    assert end.exit_code == 0, end.output
    told = lines(end.output, "warning: ")
    assert len([line for line in told if "No space left on device" in line and "bytes" in line]) == 2, told
    check_same_end(tmp_path / "run", oracle)


@pytest.mark.slow
@pytest.mark.parametrize("only", ["create:shard-", "fsync:shard-", "rename:checkpoints/.step-"])
def test_a_disk_that_breaks_for_good_stops_the_run(probe, small, oracle, tmp_path, only):
    folder = tmp_path / "run"
    fault = Fault("refuse", 2, errno.EIO, times=-1, only=only)
    (end,) = probe.train(folder, small, faults={0: fault})
    assert end.exit_code == 74, end.output
    check_stopped(folder, end.output, "Input/output error", step=5)
    assert sound_steps(folder) == [1, 2]
    (end,) = probe.train(folder, small)
    assert end.exit_code == 0, end.output
    check_same_end(folder, oracle)


def test_a_failure_of_the_last_save_is_an_error_at_once(probe, small, oracle, tmp_path):
    folder = tmp_path / "run"
    fault = Fault("refuse", STEPS - 1, errno.ENOSPC, only="fsync:shard-")
    (end,) = probe.train(folder, small, faults={0: fault})
    assert end.exit_code == 74, end.output
    assert sound_steps(folder) == [STEPS - 2, STEPS - 1]
    assert Finished(0, "", folder).status["exit_code"] == 74
    (end,) = probe.train(folder, small)
    assert end.exit_code == 0, end.output
    check_same_end(folder, oracle)


@pytest.mark.slow
def test_a_disk_that_turns_read_only_stops_the_run(probe, small, oracle, tmp_path):
    """From the second save on every change is refused, also of status.json; the line is the same."""
    folder = tmp_path / "run"
    (end,) = probe.train(folder, small, faults={0: Fault("refuse", 60, errno.EROFS, times=-1)})
    assert end.exit_code in (73, 74), end.output
    (error,) = lines(end.output, "error: ")
    assert "Read-only file system" in error
    assert str(folder) in error
    assert "Traceback" not in end.output
    (end,) = probe.train(folder, small)
    assert end.exit_code == 0, end.output
    check_same_end(folder, oracle)


@pytest.mark.slow
def test_a_limit_on_the_size_of_files(probe, small, oracle, tmp_path):
    """The signal that comes with it does not kill; smaller files are still written."""
    folder = tmp_path / "run"
    (end,) = probe.train(folder, small, file_size=50_000)
    assert end.exit_code == 74, end.output
    check_stopped(folder, end.output, "File too large", step=MAX_FAILED_SAVES)
    assert committed_folders(folder / "checkpoints") == {}
    (end,) = probe.train(folder, small)
    assert end.exit_code == 0, end.output
    check_same_end(folder, oracle)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "codes"),
    [
        ("metrics.jsonl", {73}),
        ("attempts.jsonl", {73}),
        ("config.yaml", {73, 74}),
        ("status.json", {73, 74}),
        ("report.html", {0}),
    ],
)
def test_a_full_disk_at_a_small_file_is_one_line(probe, small, oracle, tmp_path, file, codes):
    folder = tmp_path / "run"
    options = [*small, "--logging.report", "true"]
    at = 1 if file in ("metrics.jsonl", "status.json") else 0
    fault = Fault("refuse", at, errno.ENOSPC, times=-1, only=f"write:{file}")
    (end,) = probe.train(folder, options, faults={0: fault})
    assert end.exit_code in codes, end.output
    assert "Traceback" not in end.output
    (line,) = lines(end.output, "warning: no report" if codes == {0} else "error: ")
    assert file in line
    assert "No space left on device" in line
    assert not list(folder.glob(".*.tmp-*"))
    (end,) = probe.train(folder, small)
    assert end.exit_code == 0, end.output
    check_same_end(folder, oracle)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() == 0 and not shutil.which("setpriv"), reason="no setpriv")
def test_a_folder_without_the_right_to_write_is_refused(small, oracle, tmp_path):
    """The public command; nothing is left behind."""
    (tmp_path / "locked").mkdir(mode=0o555)
    drop = "-dac_override,-dac_read_search"
    prefix = ["setpriv", f"--bounding-set={drop}", f"--inh-caps={drop}"] if os.geteuid() == 0 else []
    finished = launch("torchrun", 1, tmp_path / "locked" / "run", [*small], exit_code=73, prefix=prefix)
    (error,) = lines(finished.output, "error: ")
    assert "Permission denied" in error
    assert str(tmp_path / "locked" / "run") in error
    assert list((tmp_path / "locked").iterdir()) == []


@pytest.mark.slow
@needs_mount
def test_a_read_only_disk_is_refused(probe, small, disk):
    folder = disk(1 << 20)
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    (end,) = probe.train(folder / "run", small)
    assert end.exit_code == 73, end.output
    (error,) = lines(end.output, "error: ")
    assert "Read-only file system" in error
    assert str(folder / "run") in error


@pytest.mark.slow
@needs_mount
@MODES
@LAUNCHERS
def test_a_launched_run_on_a_full_disk(launcher, mode, options, undisturbed, disk):
    """Six saves, of which the disk takes two."""
    folder = disk(room_for_two(undisturbed.folder)) / "run"
    failed = launch(launcher, 2, folder, [*options, *mode], exit_code=None)
    assert failed.exit_code != 0
    check_stopped(folder, failed.output, "No space left on device", step=20, later=4 * len(mode) // 2)
    assert sound_steps(folder) == [4, 8]
    resize(folder.parent, 2 * room_for_two(undisturbed.folder))
    assert_exact(launch(launcher, 2, folder, [*options, *mode]), undisturbed)


@pytest.mark.slow
@needs_mount
@MODES
@LAUNCHERS
def test_a_launched_run_whose_disk_gets_room_again(launcher, mode, options, undisturbed, disk):
    """Somebody deletes something after the first failed save: the run ends as if nothing had been."""
    folder = disk(room_for_two(undisturbed.folder)) / "run"

    def make_room() -> None:
        metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 300
        while not (metrics.exists() and '"step": 13,' in metrics.read_text()):
            if time.monotonic() > deadline:
                return
            time.sleep(0.01)
        resize(folder.parent, 2 * room_for_two(undisturbed.folder))

    helper = threading.Thread(target=make_room)
    helper.start()
    finished = launch(launcher, 2, folder, [*options, *mode])
    helper.join()
    assert len(finished.attempts) == 1
    assert [line for line in lines(finished.output, "warning: ") if "No space left on device" in line]
    assert_exact(finished, undisturbed)


@pytest.mark.slow
@MODES
@LAUNCHERS
def test_a_launched_run_with_a_limit_on_files(launcher, mode, options, undisturbed, tmp_path):
    folder = tmp_path / "run"
    failed = launch(
        launcher, 2, folder, [*options, *mode], exit_code=None, prefix=["prlimit", "--fsize=200000"]
    )
    assert failed.exit_code != 0
    check_stopped(folder, failed.output, "File too large", step=4 * MAX_FAILED_SAVES, later=2 * len(mode))
    assert_exact(launch(launcher, 2, folder, [*options, *mode]), undisturbed)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("strace"), reason="no strace to refuse system calls")
@pytest.mark.parametrize("call", ["fsync", "rename"])
@LAUNCHERS
def test_a_launched_run_whose_system_calls_fail(launcher, call, options, undisturbed, tmp_path):
    """Refused by the kernel's own interface, from about the second save on: no save passes any more."""
    folder = tmp_path / "run"
    trace = ["strace", "-f", "--seccomp-bpf", "-qq", "-o", str(tmp_path / "trace"), "-e", f"trace={call}"]
    after = {"fsync": 25, "rename": 8}[call]  # counted in each thread, so only saves in the main one
    failed = launch(
        launcher,
        2,
        folder,
        options,
        exit_code=None,
        prefix=[*trace, "-e", f"inject={call}:error=EIO:when={after}+"],
    )
    assert failed.exit_code != 0
    assert "INJECTED" in (tmp_path / "trace").read_text()
    assert "Input/output error" in failed.output
    assert sound_steps_without_leftovers(folder)
    assert_exact(launch(launcher, 2, folder, options), undisturbed)


def sound_steps_without_leftovers(folder: Path) -> list[int]:
    """As `sound_steps`; a failed rename may also have kept what it was to clean away."""
    committed = committed_folders(folder / "checkpoints")
    for path in committed.values():
        assert find_damage(path, read_manifest(path)) == []
    return list(committed)
