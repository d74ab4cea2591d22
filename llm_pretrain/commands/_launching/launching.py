"""Starts the scripts as a user would, side by side where their threads fit the cores, and kills them whole.

It knows commands and processes, not what the runs are for.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

import llm_pretrain
from llm_pretrain.commands._launching.machine import SCRIPTS, Machine

PACKAGE_ROOT = Path(llm_pretrain.__file__).parent.parent
_LAUNCHER_VARIABLES = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Job:
    """One launch.

    Args:
        path: Key of `SCRIPTS`.
        world_size: Processes.
        folder: The run's own folder.
        log: Where its output goes; appended.
        options: Of the script, but for its folder.
        threads: Per process.
        strategy: As in the configuration.
        with_launcher: Whether one process of path torchrun has torchrun above it, too.
    """

    path: str
    world_size: int
    folder: Path
    log: Path
    options: tuple[str, ...]
    threads: int
    strategy: str = "ddp"
    with_launcher: bool = False


@dataclass(frozen=True)
class Place:
    """Where jobs run.

    Args:
        scripts: Folder with the scripts.
        machine: GPUs and cores.
        accelerate_files: Strategy and world size to the file of settings for `accelerate launch`.
        timeout_seconds: A job that takes longer is killed.
    """

    scripts: Path
    machine: Machine
    accelerate_files: Mapping[tuple[str, int], Path]
    timeout_seconds: float


class Launched:
    """A started job."""

    def __init__(self, job: Job, place: Place, gpus: Sequence[str] = ()):
        self.job, self.timed_out = job, False
        self.started = time.monotonic()
        self._deadline = self.started + place.timeout_seconds
        job.log.parent.mkdir(parents=True, exist_ok=True)
        command = [*launch_command(job, place), *job.options]
        command += ["--run.output_dir", str(job.folder)]
        with job.log.open("ab") as log:
            log.write(f"$ {' '.join(command)}\n".encode())
            log.flush()
            self.process = subprocess.Popen(
                command, env=_environment(place.scripts, gpus), stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self._members: list[psutil.Process] = []

    @property
    def exit_code(self) -> int | None:
        """None while it runs; a job that runs for too long is killed."""
        code = self.process.poll()
        if code is None and time.monotonic() > self._deadline:
            self.timed_out = True
            self.kill()
            return self.process.wait()
        return code

    def remember_members(self) -> list[psutil.Process]:
        """Look up the launcher's workers now, so that a later kill need not look first; returns them."""
        with suppress(psutil.Error):
            self._members = psutil.Process(self.process.pid).children(recursive=True)
        return self._members

    def kill(self) -> None:
        """SIGKILL to the launcher and all that it started; torchrun gives workers sessions of their own."""
        known = self._members
        for _ in range(2):  # once what is known already, once what was started since
            _kill_all(known)
            if self.process.poll() is None:  # else its number may be another process's by now
                with suppress(psutil.Error):
                    known = psutil.Process(self.process.pid).children(recursive=True)
        _kill_all(known)
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        psutil.wait_procs([*self._members, *known], timeout=10)


def _kill_all(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()


def processes_of(folder: Path) -> list[psutil.Process]:
    """Every process on this machine that was started to train in `folder`, zombies left out."""
    found, folder_option = [], ["--run.output_dir", str(folder)]
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = process.cmdline()
            pairs = (words[i : i + 2] for i, word in enumerate(words) if word == folder_option[0])
            if folder_option in pairs and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def launch_command(job: Job, place: Place) -> list[str]:
    """The command up to the script's options."""
    script, world_size = str(place.scripts / SCRIPTS[job.path]), job.world_size
    if job.path == "accelerate":
        settings = place.accelerate_files[job.strategy, world_size]
        run = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(settings)]
        # port 0: a free one, so that launches side by side do not meet
        return [*run, "--num_processes", str(world_size), "--main_process_port", "0", script]
    if world_size == 1 and not job.with_launcher:
        return [sys.executable, script]
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
    return [*run, str(world_size), script]


def run_side_by_side(
    jobs: Sequence[Job],
    place: Place,
    *,
    on_start: Callable[[Job], None],
    on_end: Callable[[Launched, int], None],
) -> None:
    """Run all jobs, in their order, as many at a time as fit; what runs is killed where this is left early.

    Without a GPU a job takes a core per thread of each process, with GPUs a GPU per process.
    """
    waiting, running = list(jobs), list[tuple[Launched, list[int]]]()
    free = list(range(place.machine.gpus or place.machine.cores))
    try:
        while waiting or running:
            for job in list(waiting):
                wanted = job.world_size * (1 if place.machine.gpus else job.threads)
                if wanted > len(free) and running:
                    continue
                taken, free = free[:wanted], free[wanted:]
                waiting.remove(job)
                on_start(job)
                running.append((Launched(job, place, visible_gpus(taken, place)), taken))
            time.sleep(POLL_SECONDS)
            for launched, taken in list(running):
                code = launched.exit_code
                if code is not None:
                    running.remove((launched, taken))
                    free = sorted([*free, *taken])
                    on_end(launched, code)
    finally:
        for launched, _ in running:
            launched.kill()


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Turns SIGTERM, and a terminal that closes, into an ordinary exit, so that what was started is killed.

    Only in the main thread. A SIGHUP that is ignored, as under nohup, stays ignored.
    """

    def leave(number: int, *_: object) -> None:
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def killed_at_the_end(launched: Launched) -> Iterator[Launched]:
    """Leaves no process behind, however the block is left: the launcher's workers may have outlived it."""
    try:
        yield launched
    finally:
        launched.kill()


def visible_gpus(taken: Sequence[int], place: Place) -> list[str]:
    """Names of the GPUs with these numbers, as CUDA_VISIBLE_DEVICES has them; none without a GPU."""
    if not place.machine.gpus:
        return []
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return [names[number] if names else str(number) for number in taken]


def _environment(scripts: Path, gpus: Sequence[str]) -> dict[str, str]:
    """This process's environment, without what a launcher would take for its own."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER_VARIABLES and not name.startswith(("ACCELERATE_", "TORCHELASTIC_"))
    }
    # A package beside the script comes before this path, so edited copies can be compared too.
    paths = [str(scripts), str(PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    kept["PYTHONPATH"] = os.pathsep.join(paths)
    kept["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return kept
