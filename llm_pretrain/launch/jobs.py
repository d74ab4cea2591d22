"""Starts the entry scripts as a user would, reads their logs, and kills process trees."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from llm_pretrain.config.loading import PRESETS
from llm_pretrain.config.yaml_text import read_yaml_file
from llm_pretrain.hardware import gpu_count, usable_cores

PACKAGE_ROOT = Path(__file__).resolve().parent.parent.parent
"""The folder with the package and the scripts: the checkout, or site-packages."""
RUN_MODULE = (sys.executable, "-P", "-m")
"""Start of a command that runs a module. `-P` stops Python from importing from the working directory, where a
file `random.py` would replace the module `random`."""
SCRIPTS = {
    "torchrun": "train_pretrain.py",
    "accelerate": "train_pretrain_accelerate.py",
    "trainer": "examples/train_pretrain_trainer.py",
}
"""Launch path → its script, relative to the folder with the scripts."""
RESUMABLE_PATHS = ("torchrun", "accelerate")
"""Launch paths that can resume from each other's checkpoints."""

_LAUNCHER_VARIABLES = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
_POLL_SECONDS, _KILL_SECONDS = 0.02, 60
_LOG_LINES, _LOG_LINE_CHARACTERS = 4, 300


@dataclass(frozen=True)
class Machine:
    """GPUs, and CPU cores that this process may use."""

    gpus: int
    cores: int

    @property
    def max_world_size(self) -> int:
        """One process per GPU; without GPUs one per core, but at least four, enough for every mesh."""
        return self.gpus or max(4, self.cores)


def this_machine() -> Machine:
    """The machine that this process runs on."""
    return Machine(gpu_count(), usable_cores())


@dataclass(frozen=True)
class Job:
    """One launch of a script.

    Args:
        path: Key of `SCRIPTS`.
        world_size: Number of processes.
        folder: The run's output folder.
        log: File to which stdout and stderr are appended.
        options: Command line of the script, without the output folder.
        threads: CPU threads per process.
        strategy: `distributed.strategy`.
        with_launcher: Start a single process through torchrun, instead of as plain Python.
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
class LaunchContext:
    """Settings that all jobs of a command share.

    Args:
        scripts: Folder with the scripts.
        machine: GPUs and cores.
        timeout_seconds: A job that runs longer is killed.
        zero_stage: `distributed.zero_stage`.
    """

    scripts: Path
    machine: Machine
    timeout_seconds: float
    zero_stage: int | None = None


class RunningJob:
    """A started job. As a context manager, it kills all remaining processes on exit.

    Args:
        job: The job to start.
        context: Settings of the start.
        gpus: Numbers of the GPUs that the job may use; ignored on a machine without GPUs.
    """

    def __init__(self, job: Job, context: LaunchContext, gpus: Sequence[int] = ()):
        self.job, self.timed_out = job, False
        self.done = False  # whether `run_until` has killed the job because it was done
        self.started = time.monotonic()
        self._deadline = self.started + context.timeout_seconds
        self._workers: list[psutil.Process] = []
        job.log.parent.mkdir(parents=True, exist_ok=True)
        command = [*launch_command(job, context), *job.options, "--run.output_dir", str(job.folder)]
        with job.log.open("ab") as log:
            log.write(f"$ {' '.join(command)}\n".encode())
            log.flush()
            self.process = subprocess.Popen(
                command, env=launch_environment(context.scripts, _visible_gpus(context.machine, gpus)),
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def poll(self) -> int | None:
        """The launcher's exit code; None while it runs. Kills a job that exceeds the time limit."""
        code = self.process.poll()
        if code is None and time.monotonic() > self._deadline:
            self.timed_out = True
            self.kill()
            return self.process.wait()
        return code

    def find_workers(self) -> list[psutil.Process]:
        """The launcher's child processes, which are kept so that `kill` need not search for them first."""
        with suppress(psutil.Error):
            self._workers = psutil.Process(self.process.pid).children(recursive=True)
        return self._workers

    def kill(self) -> None:
        """Send SIGKILL to the launcher and to all workers, which torchrun puts into separate sessions."""
        kill_tree(self.process, self._workers)

    def __enter__(self) -> RunningJob:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.kill()
        except (SystemExit, KeyboardInterrupt):  # a second signal, which `timeout` sends at once
            self.kill()
            raise


def kill_tree(process: subprocess.Popen[bytes], children: Sequence[psutil.Process] = ()) -> None:
    """Send SIGKILL to a process, to its known `children`, and to all its other children."""
    found = list(children)
    for _ in range(2):  # the second pass finds children that were started during the first
        kill_all(found)
        if process.poll() is None:  # otherwise the process ID may belong to another process
            with suppress(psutil.Error):
                found = psutil.Process(process.pid).children(recursive=True)
    kill_all(found)
    with suppress(ProcessLookupError):
        process.kill()
    with suppress(subprocess.TimeoutExpired):  # signals do not reach a process that hangs in a driver
        process.wait(_KILL_SECONDS)
    psutil.wait_procs([*children, *found], timeout=10)


def kill_all(processes: Sequence[psutil.Process]) -> None:
    """Send SIGKILL to the processes that still run."""
    for process in processes:
        with suppress(psutil.Error):
            process.kill()


def launch_command(job: Job, context: LaunchContext) -> list[str]:
    """The command without the script's options; writes the file for `accelerate launch` beside the log."""
    script, world_size = str(context.scripts / SCRIPTS[job.path]), job.world_size
    if job.path == "accelerate":
        on_gpu, file = context.machine.gpus > 0, job.log.with_suffix(".accelerate.yaml")
        settings = launch_settings(job.strategy, context.zero_stage, world_size, on_gpu=on_gpu)
        file.write_text(json.dumps(settings))  # JSON is YAML, too
        command = [*RUN_MODULE, "accelerate.commands.launch", "--config_file", str(file)]
        # port 0 selects a free port, so that concurrent launches do not collide
        return [*command, "--num_processes", str(world_size), "--main_process_port", "0", script]
    if world_size == 1 and not job.with_launcher:
        return [sys.executable, script]
    command = [*RUN_MODULE, "torch.distributed.run", "--standalone", "--nproc_per_node"]
    return [*command, str(world_size), script]


def launch_settings(
    strategy: str, zero_stage: int | None, world_size: int, *, on_gpu: bool
) -> dict[str, Any]:
    """Settings with which `accelerate launch` really starts `world_size` processes.

    The function adapts the strategy's file in `configs/accelerate/`. Without a GPU, `MULTI_CPU` and
    `--cpu --num_processes 2` would start one process, without a warning.
    """
    file = {"ddp": "cpu2.yaml", "fsdp": "fsdp2.yaml", "deepspeed": f"zero{zero_stage or 2}.yaml"}[strategy]
    settings = read_yaml_file(PRESETS / "accelerate" / file) | {"num_processes": world_size}
    if strategy == "ddp":
        kind = "MULTI_GPU" if world_size > 1 else "NO"
        return settings | {"distributed_type": kind, "use_cpu": not on_gpu}
    # without GPUs the file decides: `use_cpu: true` would turn DeepSpeed into DDP
    return settings | ({"use_cpu": False} if on_gpu else {})


def launch_environment(scripts: Path, gpus: str | None = None) -> dict[str, str]:
    """This process's environment, without the variables of a launcher that started this process.

    Args:
        scripts: Folder with the scripts.
        gpus: Value for `CUDA_VISIBLE_DEVICES`; None leaves the variable as it is.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER_VARIABLES and not name.startswith(("ACCELERATE_", "TORCHELASTIC_"))
    }
    # A package beside the script takes precedence over this one, so that edited copies can be compared.
    paths = [str(scripts), str(PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    kept["PYTHONPATH"] = os.pathsep.join(paths)
    if gpus is not None:
        kept["CUDA_VISIBLE_DEVICES"] = gpus
    return {"OMP_WAIT_POLICY": "passive"} | kept


def _visible_gpus(machine: Machine, gpus: Sequence[int]) -> str:
    """`CUDA_VISIBLE_DEVICES` for some of the GPUs that this process sees, by their numbers here."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return ",".join(visible[number] if visible else str(number) for number in gpus if machine.gpus)


def processes_of(folder: Path) -> list[psutil.Process]:
    """All processes of this machine whose command line trains in `folder`, without zombies."""
    found, option = [], ["--run.output_dir", str(folder)]
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []  # another user's process has none
        trains_here = any(words[i : i + 2] == option for i in range(len(words)))
        if trains_here and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def run_until(
    jobs: Sequence[Job],
    context: LaunchContext,
    done: Callable[[RunningJob], bool] = lambda started: False,
    *,
    every: float = _POLL_SECONDS,
    after: Mapping[Job, Collection[Job]] | None = None,
    on_start: Callable[[Job], bool | None] = lambda job: None,
    on_end: Callable[[RunningJob, int], None] = lambda started, code: None,
    stop_seconds: float = 0.0,
) -> list[tuple[RunningJob, int]]:
    """Run jobs in order, as many at a time as fit, each until it ends or is done.

    With GPUs, a job takes one GPU per process. Without GPUs, it takes one core per thread of each process. An
    exception, also one from a signal, ends all running jobs.

    Args:
        jobs: The jobs to start.
        context: Settings of the start.
        done: Called with each running job; True kills the job. The callback may also kill it itself.
        every: Seconds between two such calls.
        after: Job → the jobs that must have ended before it starts.
        on_start: Called before a start; False leaves the job out.
        on_end: Called with each ended job and its exit code.
        stop_seconds: Time that jobs have after an exception to save and end, before they are killed.

    Returns:
        The started jobs with their exit codes, in the order in which they ended.
    """
    waiting, running, ended = list(jobs), dict[RunningJob, list[int]](), list[tuple[RunningJob, int]]()
    free, after = list(range(context.machine.gpus or context.machine.cores)), after or {}
    with ExitStack() as started_jobs:
        try:
            while waiting or running:
                for job in list(waiting):
                    needed = job.world_size * (1 if context.machine.gpus else job.threads)
                    unfinished = {*waiting, *(started.job for started in running)}
                    if (needed > len(free) and running) or not unfinished.isdisjoint(after.get(job, ())):
                        continue
                    waiting.remove(job)
                    if on_start(job) is not False:
                        taken, free = free[:needed], free[needed:]
                        running[started_jobs.enter_context(RunningJob(job, context, taken))] = taken
                for started in list(running):
                    if (code := started.poll()) is None and done(started):
                        started.done, code = True, -signal.SIGKILL
                        started.kill()
                    if code is not None:
                        free = sorted([*free, *running.pop(started)])
                        ended.append((started, code))
                        on_end(started, code)
                time.sleep(every)
        except BaseException:
            if stop_seconds:
                _stop(list(running), stop_seconds)
            raise
    return ended


def _stop(jobs: Sequence[RunningJob], seconds: float) -> None:
    """Ask jobs to save and end, and wait at most `seconds` for them."""
    for job in jobs:
        job.process.terminate()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(job.poll() is None for job in jobs):
        time.sleep(_POLL_SECONDS)


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that context managers kill the started jobs.

    If SIGHUP is ignored, as under nohup, it stays ignored.
    """

    def leave(number: int, *_: object) -> None:
        sys.exit(128 + number)

    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def last_error_lines(log: Path) -> list[str]:
    """The last lines of a log that name an error; if there are none, the last lines."""
    try:
        lines = [line.rstrip() for line in log.read_text("utf-8", errors="replace").splitlines()]
    except OSError:
        return []
    errors = [line for line in lines if line.startswith("error: ")] or [
        line for line in lines if "Error: " in line
    ]
    last = list(dict.fromkeys(errors or lines))[-_LOG_LINES:]
    return [line[:_LOG_LINE_CHARACTERS] for line in last]
