"""Processes that hang, and some that are only slow, each under a watchdog of its own.

Run as `python watchdog_probe.py FOLDER`: forks one process per case, all at once, each of which works in
FOLDER/CASE, writes what it printed to `output` there, and `went on` where it came to its end; leaves every
exit code in FOLDER/codes.json.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from llm_pretrain.config.distributed_config import DistributedConfig
from llm_pretrain.config.tree import Config
from llm_pretrain.launch import watchdog
from llm_pretrain.runs.folder import RunFolder
from llm_pretrain.runs.status import Status, read_status

TIMEOUT, GRACE = 2, 4
LONG = 3 * TIMEOUT
"""As long as a slow thing takes; a hang takes longer than any process may live."""

HANG = 600


def grow(folder: Path, seconds: float) -> None:
    """Write to a file of the run's checkpoints, on and on."""
    with (folder / "checkpoints" / "file").open("a") as file:
        repeat(lambda: (file.write("x"), file.flush()), seconds)


def repeat(act: Callable[[], object], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        act()
        time.sleep(TIMEOUT / 20)


def beside(act: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=act, args=arguments, daemon=True).start()


def blocked_step(folder: Path, seconds: float) -> None:
    watchdog.heartbeat("step 7")
    time.sleep(seconds)


def background_beats(folder: Path, seconds: float) -> None:
    watchdog.heartbeat("step 7")
    beside(repeat, lambda: watchdog.heartbeat("a background save"), seconds)
    time.sleep(seconds)


def background_save(folder: Path, seconds: float) -> None:
    watchdog.heartbeat("step 7")
    beside(grow, folder, seconds)
    time.sleep(seconds)


def save_without_a_byte(folder: Path, seconds: float) -> None:
    watchdog.heartbeat("saving step 8", files=True)
    time.sleep(seconds)


def save_that_stops(folder: Path, seconds: float) -> None:
    watchdog.heartbeat("saving step 8", files=True)
    grow(folder, TIMEOUT / 2)
    time.sleep(seconds)


def progress_too_late(folder: Path, seconds: float) -> None:
    """The main thread goes on while the process lingers, its end already recorded."""
    watchdog.heartbeat("step 7")
    path = RunFolder(folder).status
    while read_status(path)["state"] == "running":
        time.sleep(TIMEOUT / 20)
    Status(path, rank=0, world_size=2, launcher="torchrun").running(8, None)


def locked(folder: Path, seconds: float) -> None:
    watchdog.heartbeat("step 7")
    ctypes.PyDLL(None).sleep(int(seconds))


def beats(folder: Path, seconds: float) -> None:
    watchdog.heartbeat("the evaluation after step 7")
    repeat(watchdog.heartbeat, seconds)


def slow_save(folder: Path, seconds: float) -> None:
    watchdog.heartbeat("saving step 8", files=True)
    grow(folder, seconds)


def waiting_for_a_save(folder: Path, seconds: float) -> None:
    """Another rank's, or this one's in the background."""
    watchdog.heartbeat("saving step 8", files=True)
    beside(grow, folder, seconds)
    time.sleep(seconds)


def slow_reading(folder: Path, seconds: float) -> None:
    watchdog.heartbeat("restoring step 8", files=True)
    with open("/dev/zero", "rb", buffering=0) as file:
        repeat(lambda: file.read(4096), seconds)


def kernel(folder: Path, seconds: float) -> None:
    blocked_step(folder, seconds)


HANGS = (
    blocked_step,
    background_beats,
    background_save,
    save_without_a_byte,
    save_that_stops,
    progress_too_late,
)
SLOW = (beats, slow_save, waiting_for_a_save, slow_reading)


CASES: dict[str, tuple[Callable[[Path, float], None], float]] = {
    **{act.__name__: (act, HANG) for act in HANGS},
    **{act.__name__: (act, LONG) for act in SLOW},
    "locked": (locked, HANG),
    "kernel": (kernel, LONG),
}


def run(name: str, path: Path) -> None:
    """One case, in its own process."""
    act, seconds = CASES[name]
    if name == "kernel":
        sys.modules["ipykernel"] = sys
    if name == "progress_too_late":
        os.environ["WORLD_SIZE"] = "2"  # a process of several ranks lingers
    watchdog.GRACE_SECONDS = GRACE
    folder = RunFolder(path)
    status = Status(folder.status, rank=0, world_size=1, launcher="torchrun")
    with watchdog.hang_watchdog(Config(distributed=DistributedConfig(timeout_seconds=TIMEOUT))):
        watchdog.heartbeat("opening")
        status.running(3, None)
        watchdog.report_hangs_to(folder, status)
        act(path, seconds)
    os.write(1, b"went on\n")


def main(folder: Path) -> None:
    names = {}
    for name in CASES:
        path = folder / name
        (path / "checkpoints").mkdir(parents=True)
        if not (child := os.fork()):
            output = os.open(path / "output", os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            run(name, path)
            os._exit(0)
        names[child] = name
    codes = {names[child]: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in names}
    (folder / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
