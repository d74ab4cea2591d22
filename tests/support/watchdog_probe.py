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

from support.mutation import Edit, mutated

from llm_pretrain.config import Config, DistributedConfig
from llm_pretrain.training import watchdog
from llm_pretrain.training.run_folder import RunFolder
from llm_pretrain.training.status import Status

WATCHDOG = "llm_pretrain/training/watchdog.py"
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
    watchdog.beat("step 7")
    time.sleep(seconds)


def background_beats(folder: Path, seconds: float) -> None:
    watchdog.beat("step 7")
    beside(repeat, lambda: watchdog.beat("a background save"), seconds)
    time.sleep(seconds)


def background_save(folder: Path, seconds: float) -> None:
    watchdog.beat("step 7")
    beside(grow, folder, seconds)
    time.sleep(seconds)


def save_without_a_byte(folder: Path, seconds: float) -> None:
    watchdog.beat("saving step 8", files=True)
    time.sleep(seconds)


def save_that_stops(folder: Path, seconds: float) -> None:
    watchdog.beat("saving step 8", files=True)
    grow(folder, TIMEOUT / 2)
    time.sleep(seconds)


def locked(folder: Path, seconds: float) -> None:
    watchdog.beat("step 7")
    ctypes.PyDLL(None).sleep(int(seconds))


def beats(folder: Path, seconds: float) -> None:
    watchdog.beat("the evaluation after step 7")
    repeat(watchdog.beat, seconds)


def slow_save(folder: Path, seconds: float) -> None:
    watchdog.beat("saving step 8", files=True)
    grow(folder, seconds)


def waiting_for_a_save(folder: Path, seconds: float) -> None:
    """Another rank's, or this one's in the background."""
    watchdog.beat("saving step 8", files=True)
    beside(grow, folder, seconds)
    time.sleep(seconds)


def slow_reading(folder: Path, seconds: float) -> None:
    watchdog.beat("restoring step 8", files=True)
    with open("/dev/zero", "rb", buffering=0) as file:
        repeat(lambda: file.read(4096), seconds)


def kernel(folder: Path, seconds: float) -> None:
    blocked_step(folder, seconds)


HANGS = (blocked_step, background_beats, background_save, save_without_a_byte, save_that_stops)
SLOW = (beats, slow_save, waiting_for_a_save, slow_reading)
_ANY_THREAD = Edit(
    WATCHDOG, "if watchdog is None or threading.get_ident() != watchdog.owner:", "if watchdog is None:"
)
_ANY_PHASE = Edit(WATCHDOG, "if phase.files and (found", "if (found")
_NO_FILES = Edit(WATCHDOG, "if phase.files and (found", "if False and (found")
CASES: dict[str, tuple[Callable[[Path, float], None], float, tuple[Edit, ...]]] = {
    **{act.__name__: (act, HANG, ()) for act in HANGS},
    **{act.__name__: (act, LONG, ()) for act in SLOW},
    "locked": (locked, HANG, ()),
    "kernel": (kernel, LONG, ()),
    "heard from any thread": (background_beats, LONG, (_ANY_THREAD,)),
    "files in any phase": (background_save, LONG, (_ANY_PHASE,)),
    "files in no phase": (slow_save, LONG, (_NO_FILES,)),
}


def run(name: str, path: Path) -> None:
    """One case, in its own process."""
    act, seconds, edits = CASES[name]
    if name == "kernel":
        sys.modules["ipykernel"] = sys
    with mutated(*edits):
        watchdog.GRACE_SECONDS = GRACE
        folder = RunFolder(path)
        status = Status(folder.status, rank=0, world_size=1, launcher="torchrun")
        with watchdog.watching(Config(distributed=DistributedConfig(timeout_seconds=TIMEOUT))):
            watchdog.beat("opening")
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
