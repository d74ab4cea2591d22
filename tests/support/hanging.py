"""Stops ranks of a launched run for good, and looks at what the others make of it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
from support.interrupting import wait_for_step
from support.launching import TIMEOUT_SECONDS, Finished, finish, kill_outright, start

HANG_SECONDS = 10
LAUNCHER_WAITS_SECONDS = 30
"""Between the launcher's SIGTERM and its SIGKILL, which alone ends a stopped process."""

SLACK_SECONDS = 60
"""For a machine that does much else."""

WATCHED = ("--distributed.timeout_seconds", str(HANG_SECONDS))


def ranks_of(process: subprocess.Popen[str]) -> dict[int, psutil.Process]:
    """The workers of a launcher, by rank."""
    children = psutil.Process(process.pid).children()
    return {int(child.environ()["RANK"]): child for child in children if "RANK" in child.environ()}


def disturb(
    process: subprocess.Popen[str], folder: Path, step: int, act: Callable[[psutil.Process], None], rank: int
) -> Finished:
    """Wait for a step, act on a rank, wait for the end: in time, and with no process left."""
    try:
        wait_for_step(process, folder, step)
        return _act_and_finish(process, folder, act, rank)
    finally:
        if process.poll() is None:
            kill_outright(process)


def disturb_save(
    launcher: str, folder: Path, options: list[str], act: Callable[[psutil.Process], None], rank: int
) -> Finished:
    """Act on a rank while a checkpoint is being written, seen by its unfinished folder.

    The rank is stopped first; where the folder is gone a moment later, it came too late for this save and is
    let go on to the next.
    """
    process = start(launcher, 2, folder, options)
    try:
        wait_for_step(process, folder, 5)  # a checkpoint is committed: there is one to go on from
        worker, deadline = ranks_of(process)[rank], time.monotonic() + TIMEOUT_SECONDS
        while True:
            assert time.monotonic() < deadline, "no save was met"
            assert process.poll() is None, f"ended:\n{process.communicate()[0][-4000:]}"
            if not unfinished(folder):
                time.sleep(0.0005)
                continue
            worker.suspend()
            time.sleep(0.5)
            if unfinished(folder):
                return _act_and_finish(process, folder, act, rank)
            worker.resume()
    finally:
        if process.poll() is None:
            kill_outright(process)


def unfinished(folder: Path) -> list[str]:
    """Names of what is not committed below a run's checkpoints and weights."""
    found = []
    for part in (folder / "checkpoints", folder / "weights"):
        with suppress(FileNotFoundError):
            found += [path.name for path in part.iterdir() if path.name.startswith(".")]
    return found


def _act_and_finish(
    process: subprocess.Popen[str], folder: Path, act: Callable[[psutil.Process], None], rank: int
) -> Finished:
    members = psutil.Process(process.pid).children(recursive=True)
    began = time.monotonic()
    act(ranks_of(process)[rank])
    finished = finish(process, folder)
    took = time.monotonic() - began
    limit = HANG_SECONDS + LAUNCHER_WAITS_SECONDS + SLACK_SECONDS
    assert took < limit, f"{took:.0f} s until its end:\n{finished.output[-3000:]}"
    _, alive = psutil.wait_procs(members, timeout=30)
    for member in alive:
        member.kill()
    assert not alive, f"left behind: {alive}"
    assert finished.exit_code != 0
    return finished
