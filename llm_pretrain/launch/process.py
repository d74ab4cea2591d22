"""Start and end of a training process: threads, determinism, rendezvous, signals, exit codes."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import torch

from llm_pretrain.config.tree import Config
from llm_pretrain.errors import CheckpointError, ConfigError, PretrainError, ResourceError, StuckError
from llm_pretrain.files import flush_streams, prepare_streams
from llm_pretrain.hardware import usable_cores
from llm_pretrain.launch.checks import MASTER_VARIABLES, accelerate_launch_arguments, check_environment
from llm_pretrain.launch.out_of_memory import explain_out_of_memory
from llm_pretrain.launch.peer_failure import COLLECTIVE_TIMEOUTS, peer_failure

INTERRUPTED = 130
"""Exit code of a Ctrl-C before the run began; later ones save and exit with 75."""
PR_SET_PDEATHSIG = 1
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Options of glibc's `mallopt`, by their numbers in malloc.h."""
_ELASTIC = "TORCHELASTIC_RUN_ID"
"""Set by torchrun, and by `accelerate launch` with several processes, for workers only."""
_ACCELERATE = ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND")
"""Set by `accelerate launch` with one process."""
_trained: tuple[int, int] | None = None
"""Process id and number of threads of an earlier run, in this process or in the one it was forked from."""


def prepare_process(config: Config) -> None:
    """Apply the process settings that must be equal under both launchers, before any computation.

    Raises:
        ConfigError: some of the launcher's variables are missing, or this is a fork of a multi-threaded run.
        ResourceError: the launcher has died.
    """
    check_environment()
    die_with_launcher()
    check_parent_alive()
    # Accelerate's DDP options have the old name only, and both paths must set the same
    warnings.filterwarnings("ignore", message=".*`broadcast_buffers` is deprecated", category=FutureWarning)
    keep_freed_memory()
    _set_threads(cpu_threads(config))
    if config.training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NCCL_ALGO", "Ring")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def _set_threads(threads: int) -> None:
    """Set the number of threads of torch, and of Accelerate, which reads OMP_NUM_THREADS."""
    global _trained
    if _trained is not None and _trained[0] != os.getpid() and min(threads, _trained[1]) > 1:
        raise ConfigError(
            f"launch: this process is a fork of one that trained with {_trained[1]} threads, which do not "
            f"exist here, so that its {threads} threads would hang; restart the notebook's kernel, or set "
            "distributed.cpu_threads to 1"
        )
    torch.set_num_threads(threads)
    os.environ.setdefault(_EXPORTED, str(exported_threads() or ""))
    # if it is unset, Accelerate counts cores and sets another number of threads
    os.environ["OMP_NUM_THREADS"] = str(threads)
    _trained = os.getpid(), threads


def cpu_threads(config: Config) -> int:
    """Threads of this process: as configured, as exported, or cores ÷ processes on this machine.

    torchrun and accelerate set different defaults, and another number of threads sums in another order.
    """
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
    return config.distributed.cpu_threads or default_threads(local_world_size)


def default_threads(processes: int) -> int:
    """Threads per process: the exported OMP_NUM_THREADS, else this machine's cores ÷ `processes`."""
    return exported_threads() or max(1, usable_cores() // processes)


_MOST_THREADS = 1 << 10
"""Limit of OMP_NUM_THREADS, as of `distributed.cpu_threads`: very many threads end the process silently."""
_EXPORTED = "LLM_PRETRAIN_OMP_NUM_THREADS"
"""Holds the user's OMP_NUM_THREADS, empty if there was none, after `_set_threads` has replaced it."""


def exported_threads() -> int | None:
    """The user's OMP_NUM_THREADS; None without one, or where it is no number of threads."""
    first = exported_setting().split(",")[0].strip()  # the others are of nested regions
    is_possible = re.fullmatch("[0-9]{1,4}", first) and 0 < int(first) <= _MOST_THREADS
    return int(first) if is_possible else None


def exported_setting() -> str:
    """The text of the user's OMP_NUM_THREADS; empty without one.

    Launchers set the variable for their workers too. So it is read from the initial environment of the first
    process, from this one upwards, that no launcher has started. Empty if that is another user's process.
    """
    value = os.environ.get(_EXPORTED)
    if value is None:
        environment: Mapping[str, str] = os.environ
        process: psutil.Process | None = psutil.Process()
        try:
            while process and _is_launched(environment):
                process = process.parent()
                environment = process.environ() if process else {}
        except psutil.Error:
            environment = {}
        value = environment.get("OMP_NUM_THREADS", "")
    return value


def _is_launched(environment: Mapping[str, str]) -> bool:
    """Whether a launcher has set these variables."""
    return _ELASTIC in environment or all(name in environment for name in _ACCELERATE)


def keep_freed_memory() -> None:
    """Tell glibc to keep freed blocks instead of returning them to the system.

    By default every large tensor is mapped anew, and faulting its pages in costs 6 to 8 % of a small
    mixture-of-experts step on a CPU. Does nothing without glibc.
    """
    if not torch.cuda.is_available() and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def die_with_launcher() -> None:
    """Ask Linux for SIGTERM when the launcher dies, so that no worker is orphaned.

    Not for a process started from a shell, which may outlive its shell on purpose.
    """
    if sys.platform != "linux" or not (os.environ.get(_ELASTIC) or accelerate_launch_arguments()):
        return
    launcher = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != launcher:
        os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def report_errors() -> Iterator[None]:
    """Turn errors into one line and the process's exit code.

    A `PretrainError` prints its message, once if all ranks raise the same. Any other error is a bug and
    prints its traceback.
    """
    prepare_streams()
    number = os.environ.get("RANK", "")
    rank = int(number) if number.isdecimal() else 0
    try:
        with explain_out_of_memory():
            yield
    except KeyboardInterrupt:
        _leave(INTERRUPTED)
    except PretrainError as error:
        _report_and_leave(peer_failure(error, rank) or error, rank)
    except OSError as error:
        _report_and_leave(
            CheckpointError(f"{error.filename or 'input/output'}: {error.strerror or error}"), rank
        )
    except Exception as error:
        peer_error = peer_failure(error, rank)
        has_group = torch.distributed.is_initialized()
        if not has_group and (peer_error or isinstance(error, torch.distributed.DistError)):
            _report_and_leave(ResourceError(_no_rendezvous(error)), rank)
        if peer_error:
            _report_and_leave(peer_error, rank)
        if not _has_peers():
            raise
        traceback.print_exc()
        _leave(1)


def exit_process(exit_code: int) -> None:
    """Exit with this code; one process of several exits without Python's clean-up.

    Threads of a back-end may outlive the process group (gloo's do under FSDP and DeepSpeed). One that still
    runs while Python unloads its libraries aborts a finished run.
    """
    ignore_stop_signals()  # another one would replace the exit code
    _leave(exit_code, outright=int(os.environ.get("WORLD_SIZE") or 1) > 1)


def _report_and_leave(error: PretrainError, rank: int) -> None:
    """Print the error, unless rank 0 prints the same or the launcher repeats it, and exit with its code."""
    # without a process group or torchrun, rank 0 may be on another machine and not have this error
    is_repeated = rank > 0 and error.shared and (_has_peers() or _ELASTIC in os.environ)
    where = f"rank {rank}: " if rank and not isinstance(error, StuckError) and not is_repeated else ""
    text = "".join(f"error: {where}{line}\n" for line in error.lines())
    with suppress(OSError):  # the terminal or pipe is closed
        if not is_repeated:
            sys.stderr.write(text)  # one write: other ranks write to the same terminal
    if not isinstance(error, StuckError):  # another rank's error, if it has one, is the cause
        _report_to_launcher(text)
    _leave(error.exit_code)


def _report_to_launcher(text: str) -> None:
    """Write the message into the file from which torchrun takes the last lines of its own traceback.

    The format is that of torch.distributed.elastic's error handler, which would add our traceback.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file and _ELASTIC in os.environ:
        details = {"message": text.rstrip(), "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": details}))


def _no_rendezvous(error: Exception) -> str:
    """One line for a process group that could not be formed."""
    address = ":".join(os.environ.get(name, "?") for name in MASTER_VARIABLES)
    return (
        f"launch: {str(error).splitlines()[0]:.200} (rank {os.environ.get('RANK', '?')} of "
        f"{os.environ.get('WORLD_SIZE', '?')}, rendezvous at {address}); start every rank, with one "
        "address and a free port for all"
    )


def _has_peers() -> bool:
    """Whether this process is in a process group of several ranks."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _leave(exit_code: int, *, outright: bool = False) -> None:
    """Exit; `outright` or if the process group has other ranks, without clean-up, which would wait for them.

    A single process may be a notebook's kernel, in which `SystemExit` ends the cell and not the kernel.
    """
    flush_streams()
    if outright or _has_peers():
        os._exit(exit_code)
    sys.exit(exit_code)


_SUBREAPERS = ("systemd", "slurmstepd", "tini", "dumb-init", "docker-init", "catatonit", "conmon")
"""Programs besides process 1 that orphans are reparented to."""


def check_parent_alive() -> None:
    """Stop a worker whose launcher ended before `die_with_launcher` was called, during the imports.

    It would wait for its peers forever or, as the only worker, train without a launcher that can stop it.

    Raises:
        ResourceError: the launcher is gone.
    """
    if sys.platform == "linux" and is_orphan():
        raise ResourceError(
            f"launch: expected the launcher that started this process, found process {os.getppid()} in its "
            "place; the launcher was killed, start it again"
        ).of_all_ranks()


def is_orphan() -> bool:
    """Whether this process has a launcher's variables and a parent that orphans are reparented to.

    In a container, process 1 may be the launcher itself (a Python program) or a wrapper that the launcher
    started, which then has the launcher's variables too.
    """
    elastic = _ELASTIC in os.environ
    if not _is_launched(os.environ):
        return False
    with suppress(psutil.Error):
        parent = psutil.Process().parent()
        if parent is None:  # it is outside this container
            return False
        words = parent.cmdline()
        program = os.path.basename(words[0]).split(":")[0] if words else ""  # slurmstepd: [12.0]
        if "python" in program or (os.getppid() != 1 and program not in _SUBREAPERS):
            return False
        with suppress(psutil.AccessDenied):  # of another user, so not a wrapper of this process
            return not (elastic and _ELASTIC in parent.environ())
        return True
    return False


SCHEME = "attempt"
POLLS_PER_SECOND = 2000
"""How often all ranks of an attempt together ask the store, which answers some 30,000 requests a second."""
distributed: Any = torch.distributed
"""Untyped: pyright does not see all names that torch documents as exported."""


@cache
def rendezvous_init_method() -> str:
    """The `init_method` of both launch paths: `env://` with a key prefix for each attempt.

    torchrun's agent keeps one store for all attempts. Without the prefix a restarted process reads the
    addresses of killed ones, and gloo's connections to them are refused (pytorch/pytorch#135712).
    """
    distributed.register_rendezvous_handler(SCHEME, _rendezvous)
    return f"{SCHEME}://"


def _rendezvous(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
    """Store, rank and world size of `env://`, with the attempt's prefix before every key.

    Raises:
        ConfigError: another process that was started by hand has the same RANK; all would wait for the one
            that is missing.
    """
    if "timeout" in options:  # the collectives' time-out is longer, for slow disks
        options["timeout"] /= COLLECTIVE_TIMEOUTS
    for store, rank, world_size in distributed.rendezvous("env" + url.removeprefix(SCHEME), **options):
        if _ELASTIC in os.environ:
            yield distributed.PrefixStore(join_attempt(store, rank, world_size), store), rank, world_size
            continue
        process = f"process {os.getpid()} on {socket.gethostname()}"
        first = store.compare_set(f"rank_{rank}", "", process).decode()
        if first != process:
            raise ConfigError(f"RANK: expected another one in each process, found {rank} in {first} too")
        yield store, rank, world_size


def join_attempt(store: Any, rank: int, world_size: int) -> str:
    """A name that exactly the ranks of one attempt get, whatever earlier ones have left in the store.

    Rank 0 makes it up. The others take the newest name, in which their rank must be free, and ask again until
    that attempt is complete: the processes of an earlier one are dead. They poll, because torch logs two
    lines for each wait that times out. TORCHELASTIC_RESTART_COUNT is no such name, since every agent of
    torchrun counts for itself (pytorch/pytorch#108158).

    Raises:
        torch.distributed.DistStoreError: not all ranks came within the store's time-out.
    """
    newest, own = f"attempt_of_{world_size}", uuid.uuid4().hex
    if rank == 0:
        store.set(newest, own)
        if world_size > 1:
            store.wait([f"{own}_{other}" for other in range(1, world_size)])
        store.set(f"{own}_complete", "")
        return own
    deadline = time.monotonic() + store.timeout.total_seconds()
    while time.monotonic() < deadline:
        name = store.get(newest).decode()
        is_free = store.compare_set(f"{name}_{rank}", "", own).decode() == own
        if is_free and store.check([f"{name}_complete"]):
            return name
        time.sleep(max(0.05, world_size / POLLS_PER_SECOND))
    raise distributed.DistStoreError(f"not all of {world_size} ranks came to the rendezvous")


STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1)
"""SIGHUP is sent when the terminal closes; torchrun forwards it."""
ONE_STOP_SECONDS = 1.0
"""Signals within this time count as one: workers get them from the terminal and from the launcher."""


class SignalHandler:
    """Records the first stop signal inside a `with` block.

    The run then finishes its step and saves. Later signals are ignored, since launchers and schedulers repeat
    them, except Ctrl-C: the second one, at least `ONE_STOP_SECONDS` after the latest signal, prints a
    warning, and the third ends the process at once, without saving. Outside the main thread, where Python
    cannot install handlers, nothing is installed. An ignored SIGHUP (nohup) stays ignored.

    Args:
        verbose: Whether to print on standard error what a signal leads to; one process of a run does.
    """

    def __init__(self, *, verbose: bool = True) -> None:
        self.signal: signal.Signals | None = None
        self._verbose = verbose
        self._latest = 0.0
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> SignalHandler:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None and _has_peers():  # it exits, and must say why before the launcher's SIGTERM
            ignore_stop_signals()
            return
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned

    def _handle(self, number: int, frame: FrameType | None) -> None:
        received, now = signal.Signals(number), time.monotonic()
        if self.signal is None:
            self.signal = received
            self._print(f"{received.name}: the run saves and stops after this step")
        elif received is signal.SIGINT and now - self._latest >= ONE_STOP_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            self._print(
                "SIGINT again: the run still saves and stops after this step; one more ends it at once and "
                "loses the steps since the last checkpoint"
            )
        self._latest = now

    def _print(self, text: str) -> None:
        """Write without Python's streams, whose locks the interrupted code may hold."""
        if self._verbose:
            try:
                os.write(2, f"{text}\n".encode())
            except OSError:  # a closed terminal; the run stops all the same
                self._verbose = False

    @property
    def requested(self) -> bool:
        """Whether this process was asked to stop."""
        return self.signal is not None


def ignore_stop_signals() -> None:
    """Ignore further stop signals, in a process that is about to exit."""
    if threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
