"""Stops launched runs by signals at chosen moments; checks that nothing but the end of the run came of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from filelock import FileLock
from support.interrupting import newest_checkpoint, wait_for_step
from support.launching import (
    ACCELERATE_SCRIPT,
    CPU_FILE,
    TIMEOUT_SECONDS,
    TORCHRUN_SCRIPT,
    Finished,
    finish,
    start_command,
)

from llm_pretrain.files import MARKER

MARK = "FAULT_TEST_LAUNCH"
"""Variable in the environment of everything that a launch starts, to find what survives it."""

_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
_USR1 = ("--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
_ACCELERATE = (sys.executable, "-m", "accelerate.commands.launch")
_TWO = ("--config_file", str(CPU_FILE), "--num_processes", "2", "--main_process_port", "0")
_TRAIN = (sys.executable, "-m", "llm_pretrain", "train", "--nproc")

COMMANDS: dict[str, tuple[str, ...]] = {
    "python": (sys.executable, str(TORCHRUN_SCRIPT)),
    "python accelerate": (sys.executable, str(ACCELERATE_SCRIPT)),
    "torchrun 1": (*_TORCHRUN[:-1], "1", str(TORCHRUN_SCRIPT)),
    "torchrun": (*_TORCHRUN, str(TORCHRUN_SCRIPT)),
    "torchrun usr1": (*_TORCHRUN, *_USR1, str(TORCHRUN_SCRIPT)),
    "accelerate 1": (*_ACCELERATE, "--cpu", "--num_processes", "1", str(ACCELERATE_SCRIPT)),
    "accelerate": (*_ACCELERATE, *_TWO, str(ACCELERATE_SCRIPT)),
    "train": (*_TRAIN, "2"),
    "train accelerate": (*_TRAIN, "2", "--launcher", "accelerate"),
    "train accelerate 1": (*_TRAIN, "1", "--launcher", "accelerate"),
}
"""Launchers up to the script's options, by a short name."""


@dataclass
class Launch:
    """A launch in a session of its own that is going on."""

    process: subprocess.Popen[str]
    folder: Path
    mark: str

    def members(self) -> list[psutil.Process]:
        """Every living process that it started, wherever it has moved; the launcher too."""
        return list(marked(self.mark))

    def workers(self) -> dict[int, psutil.Process]:
        """The training processes by rank."""
        found: dict[int, psutil.Process] = {}
        for member in self.members():
            with suppress(psutil.Error):
                script = [
                    word for word in member.cmdline() if word.endswith(("pretrain.py", "_accelerate.py"))
                ]
                if script and member.cmdline()[1] not in ("-m",):
                    found[int(member.environ().get("RANK", "0"))] = member
        return found

    def finish(self) -> Finished:
        return finish(self.process, self.folder)


def marked(mark: str) -> Iterator[psutil.Process]:
    """Living processes with this mark in their environment."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                yield process


def begin(command: str | Sequence[str], folder: Path, options: Sequence[str], **variables: str) -> Launch:
    """Start a launcher of `COMMANDS`, or another command up to the script's options."""
    words = COMMANDS[command] if isinstance(command, str) else command
    mark = uuid.uuid4().hex
    marked = variables | {MARK: mark}
    process = start_command(words, folder, options, variables=marked, preexec=default_signals)
    return Launch(process, folder, mark)


def default_signals() -> None:
    """A shell's background job ignores Ctrl-C, one under nohup SIGHUP, and so would all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def wait_until(launch: Launch, happened: Callable[[], bool], what: str, *, pause: float = 0.005) -> None:
    """Return as soon as `happened()`; fail where the launch ends before."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not happened():
        assert launch.process.poll() is None, (
            f"ended before {what}:\n{launch.process.communicate()[0][-4000:]}"
        )
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(pause)


def row_of(step: int) -> Callable[[Launch], None]:
    """The moment when the row of `step` is written."""
    return lambda launch: wait_for_step(launch.process, launch.folder, step)


def start_of_run(launch: Launch) -> None:
    """The moment when the run has begun, and models and checkpoints are still to be built and read."""
    status = launch.folder / "status.json"
    before = status.stat().st_mtime_ns if status.exists() else 0
    wait_until(launch, lambda: status.exists() and status.stat().st_mtime_ns > before, "the run's start")


def during_imports(launch: Launch) -> None:
    """The moment when every worker is loading torch's libraries."""

    def loading() -> bool:
        workers = launch.workers()
        wanted = 2 if "2" in launch.process.args else 1  # type: ignore[operator]  # a list of words
        return len(workers) == wanted and all(_has_torch(worker.pid) for worker in workers.values())

    wait_until(launch, loading, "the imports")


def during_save(step: int | None = None) -> Callable[[Launch], None]:
    """The moment when a checkpoint (of `step`, or any) is half written; the workers stand still in it.

    Whoever sends them a signal lets them go on by `go_on`.
    """
    pattern = f".step-{step:08d}.tmp-*" if step is not None else ".step-*.tmp-*"

    def moment(launch: Launch) -> None:
        checkpoints, deadline = launch.folder / "checkpoints", time.monotonic() + TIMEOUT_SECONDS
        start_of_run(launch)
        workers = launch.workers().values()  # to look for them takes longer than a save
        while time.monotonic() < deadline:
            wait_until(launch, lambda: any(checkpoints.glob(pattern)), "a save", pause=0.001)
            for worker in workers:
                worker.suspend()
            time.sleep(0.05)
            if any(checkpoints.glob(pattern)):
                return
            for worker in workers:
                worker.resume()
        raise AssertionError("no save was met")

    return moment


def go_on(launch: Launch) -> None:
    """Let workers that stand still go on."""
    for worker in launch.workers().values():
        worker.resume()


def _has_torch(pid: int) -> bool:
    try:
        return "libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def to_launcher(*numbers: signal.Signals, gap: float = 0.0) -> Callable[[Launch], None]:
    """These signals, one after the other, to the launcher's own process."""
    return _sending(os.kill, numbers, gap)


def to_group(*numbers: signal.Signals, gap: float = 0.0) -> Callable[[Launch], None]:
    """To the launcher's process group, as a terminal sends them."""
    return _sending(os.killpg, numbers, gap)


def _sending(
    kill: Callable[[int, int], None], numbers: Sequence[signal.Signals], gap: float
) -> Callable[[Launch], None]:
    def send(launch: Launch) -> None:
        for index, number in enumerate(numbers):
            time.sleep(gap if index else 0.0)
            with suppress(ProcessLookupError):
                kill(launch.process.pid, number)
        go_on(launch)

    return send


def to_everything(number: signal.Signals) -> Callable[[Launch], None]:
    """To every process at once: launcher, ranks, loader workers, whatever else they have started."""

    def send(launch: Launch) -> None:
        for member in launch.members():
            with suppress(psutil.NoSuchProcess):
                member.send_signal(number)
        go_on(launch)

    return send


def to_rank(rank: int, number: signal.Signals) -> Callable[[Launch], None]:
    """To one training process alone."""

    def send(launch: Launch) -> None:
        launch.workers()[rank].send_signal(number)
        go_on(launch)

    return send


def no_traceback_of_ours(output: str) -> None:
    """No frame of this project's, nor of a loader's worker; launchers print tracebacks of their own.

    torchrun, once its workers have ended, sometimes aborts after its SignalException ("terminate called").
    """
    frames = re.findall(
        r'File "[^"]*(?:llm_pretrain/|train_pretrain|multiprocessing/|torch/utils/data)[^"]*"', output
    )
    frames = [frame for frame in frames if "elastic" not in frame]
    assert not frames, f"{frames[:4]} in\n{output[-4000:]}"
    of_workers = re.split(r"SignalException: Process \d+ got signal", output)[0]
    for word in ("terminate called", "core dumped", "Segmentation", "Aborted", "DataLoader worker"):
        assert word not in of_workers, output[-4000:]


def nothing_left(launch: Launch) -> None:
    """No process, no held lock, no half-written file."""
    gone = time.monotonic() + 30
    while survivors := launch.members():
        assert time.monotonic() < gone, f"still there: {[each.cmdline() for each in survivors]}"
        time.sleep(0.05)
    folder = launch.folder
    if not folder.exists():
        return
    with FileLock(folder / ".lock", blocking=False):
        pass
    hidden = {path.name for path in folder.rglob(".*")} - {".lock", MARKER}
    assert not hidden, f"left behind: {sorted(hidden)}"


def stopped_cleanly(launch: Launch, finished: Finished, rows_before: int, start_step: int) -> int:
    """The attempt ended as preempted, saved, from where the one before stood; returns the step it came to."""
    status = finished.status
    assert (status["state"], status["exit_code"]) == ("preempted", 75), (status, finished.output[-4000:])
    assert finished.exit_code != 0
    step = status["step"]
    if step:
        assert newest_checkpoint(launch.folder) == step
        assert Path(status["checkpoint"]).name == f"step-{step:08d}"
    rows = finished.raw_steps()[rows_before:] if (launch.folder / "metrics.jsonl").exists() else []
    steps = list(dict.fromkeys(rows))
    assert [each for each in steps if each > start_step] == list(range(start_step + 1, step + 1))
    no_traceback_of_ours(finished.output)
    nothing_left(launch)
    return step
