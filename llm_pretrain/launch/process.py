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
from llm_pretrain.launch.watchdog import COLLECTIVE_TIMEOUTS, peer_failure
from llm_pretrain.text import first_line, reason_of

INTERRUPTED = 130
"""Exit code after a Ctrl-C before the run began; after a later Ctrl-C, the run saves and exits with 75."""
PR_SET_PDEATHSIG = 1
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Options of glibc's `mallopt`, by their numbers in malloc.h."""
_ELASTIC = "TORCHELASTIC_RUN_ID"
"""Variable that torchrun sets for workers, and `accelerate launch` if there are several processes."""
_ACCELERATE = ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND")
"""Variables that `accelerate launch` sets for a single process."""
_trained: tuple[int, int] | None = None
"""Process id and threads of an earlier run, in this process or in the process that it was forked from."""


def prepare_process(config: Config) -> None:
    """Apply the process settings that must be equal under both launchers, before any computation.

    Raises:
        ConfigError: some of the launcher's variables are missing, or this is a fork of a multi-threaded run.
        ResourceError: the launcher has died.
    """
    check_environment()
    die_with_launcher()
    check_parent_alive()
    # Accelerate's DDP options have the deprecated name only; both launch paths must set equal options.
    warnings.filterwarnings("ignore", message=".*`broadcast_buffers` is deprecated", category=FutureWarning)
    # Notes of torch's compiler; TF32 would change the bits of every product in fp32.
    for message in ("TensorFloat32 tensor cores", r"\s*Online softmax is disabled"):
        warnings.filterwarnings("ignore", message=message, category=UserWarning)
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
    # If the variable is unset, Accelerate counts cores and sets another number of threads.
    os.environ["OMP_NUM_THREADS"] = str(threads)
    _trained = os.getpid(), threads


def cpu_threads(config: Config) -> int:
    """Threads of this process: configured, or exported, or cores ÷ processes on this machine.

    The defaults of torchrun and accelerate differ, and another number of threads sums in another order.
    """
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
    return config.distributed.cpu_threads or default_threads(local_world_size)


def default_threads(processes: int) -> int:
    """Threads per process: the exported OMP_NUM_THREADS, else this machine's cores ÷ `processes`."""
    return exported_threads() or max(1, usable_cores() // processes)


_MOST_THREADS = 1 << 10
"""Limit of OMP_NUM_THREADS and `distributed.cpu_threads`: too many threads end a process silently."""
_EXPORTED = "LLM_PRETRAIN_OMP_NUM_THREADS"
"""Variable with the user's OMP_NUM_THREADS (empty if there was none), which `_set_threads` replaces."""


def exported_threads() -> int | None:
    """The user's OMP_NUM_THREADS; None if it is unset or no number of threads.

    Launchers also set the variable for their workers. So this takes the first process, from this one upwards,
    that no launcher started, and reads its initial environment. If another user owns it, the result is None.
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
    first = value.split(",")[0].strip()  # further numbers are for nested parallel regions
    is_possible = re.fullmatch("[0-9]{1,4}", first) and 0 < int(first) <= _MOST_THREADS
    return int(first) if is_possible else None


def _is_launched(environment: Mapping[str, str]) -> bool:
    """Whether a launcher has set these variables."""
    return _ELASTIC in environment or all(name in environment for name in _ACCELERATE)


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory instead of returning it to the system; without glibc, do nothing.

    By default, glibc maps every large tensor anew, and the page faults take 6 to 8 % of a small
    mixture-of-experts step on a CPU.
    """
    if not torch.cuda.is_available() and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def die_with_launcher() -> None:
    """Ask Linux for SIGTERM when the launcher dies, so that no worker is orphaned.

    A process started from a shell gets no such signal: it may outlive its shell on purpose.
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

    A `PretrainError` prints its message, but only once if all ranks raise it. Any other error is a bug and
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
        _report_and_leave(CheckpointError(f"{error.filename or 'input/output'}: {reason_of(error)}"), rank)
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
    """Exit with this code. If there are several processes, skip Python's clean-up.

    Threads of a back-end may outlive the process group (gloo's do under FSDP and DeepSpeed). If such a thread
    still runs while Python unloads libraries, it aborts the process after a finished run.
    """
    ignore_stop_signals()  # a further signal would replace the exit code
    _leave(exit_code, outright=int(os.environ.get("WORLD_SIZE") or 1) > 1)


def _report_and_leave(error: PretrainError, rank: int) -> None:
    """Print the error, unless rank 0 prints it too, report it to the launcher, and exit with its code."""
    # without a process group or torchrun, rank 0 may be on another machine and not have this error
    is_repeated = rank > 0 and error.shared and (_has_peers() or _ELASTIC in os.environ)
    where = f"rank {rank}: " if rank and not isinstance(error, StuckError) and not is_repeated else ""
    text = "".join(f"error: {where}{line}\n" for line in error.lines())
    with suppress(OSError):  # the terminal or pipe is closed
        if not is_repeated:
            sys.stderr.write(text)  # one write: other ranks write to the same terminal
    if not isinstance(error, StuckError):  # else another rank's error may be the cause
        _report_to_launcher(text)
    _leave(error.exit_code)


def _report_to_launcher(text: str) -> None:
    """Write the message to the file that torchrun quotes at the end of its own traceback.

    The format is that of torch.distributed.elastic's error handler, which would also add our traceback.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file and _ELASTIC in os.environ:
        details = {"message": text.rstrip(), "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": details}))


def _no_rendezvous(error: Exception) -> str:
    """The message if the process group could not be formed."""
    address = ":".join(os.environ.get(name, "?") for name in MASTER_VARIABLES)
    return (
        f"launch: {first_line(error):.200} (rank {os.environ.get('RANK', '?')} of "
        f"{os.environ.get('WORLD_SIZE', '?')}, rendezvous at {address}); start every rank, with one "
        "address and a free port for all"
    )


def _has_peers() -> bool:
    """Whether this process is in a process group of several ranks."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _leave(exit_code: int, *, outright: bool = False) -> None:
    """Exit. With `outright` or peers in the process group, skip the clean-up, which would wait for peers.

    A single process may be a notebook's kernel, where `SystemExit` ends the cell but not the kernel.
    """
    flush_streams()
    if outright or _has_peers():
        os._exit(exit_code)
    sys.exit(exit_code)


_SUBREAPERS = ("systemd", "slurmstepd", "tini", "dumb-init", "docker-init", "catatonit", "conmon")
"""Programs that adopt orphaned processes, besides process 1."""


def check_parent_alive() -> None:
    """Stop a worker whose launcher ended during the imports, before `die_with_launcher` was called.

    Such a worker would wait for its peers forever, or train alone where no launcher can stop it.

    Raises:
        ResourceError: the launcher is gone.
    """
    if sys.platform == "linux" and is_orphan():
        raise ResourceError(
            f"launch: expected the launcher that started this process, found process {os.getppid()} in its "
            "place; the launcher was killed, start it again"
        ).of_all_ranks()


def is_orphan() -> bool:
    """Whether this process has a launcher's variables, but a parent that adopts orphans.

    In a container, process 1 may be the launcher itself (a Python program). It may also be a wrapper that the
    launcher started and that has the launcher's variables, too.
    """
    elastic = _ELASTIC in os.environ
    if not _is_launched(os.environ):
        return False
    with suppress(psutil.Error):
        parent = psutil.Process().parent()
        if parent is None:  # the parent is outside this container
            return False
        words = parent.cmdline()
        program = os.path.basename(words[0]).split(":")[0] if words else ""  # slurmstepd: [12.0]
        if "python" in program or (os.getppid() != 1 and program not in _SUBREAPERS):
            return False
        with suppress(psutil.AccessDenied):  # another user's process is no wrapper of this process
            return not (elastic and _ELASTIC in parent.environ())
        return True
    return False


SCHEME = "attempt"
POLLS_PER_SECOND = 2000
"""Requests per second to the store by all ranks of an attempt; the store answers about 30,000."""
distributed: Any = torch.distributed
"""Untyped: pyright does not see all names that torch documents as exported."""


@cache
def rendezvous_init_method() -> str:
    """The `init_method` of both launch paths: `env://` with a key prefix for each attempt.

    torchrun's agent keeps one store for all attempts. Without the prefix, a restarted process would read the
    addresses of killed processes, which refuse gloo's connections (pytorch/pytorch#135712).
    """
    distributed.register_rendezvous_handler(SCHEME, _rendezvous)
    return f"{SCHEME}://"


def _rendezvous(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
    """Store, rank and world size of `env://`, with the attempt's prefix before every key.

    Raises:
        ConfigError: another process that was started by hand has this RANK; all would wait for the missing
            rank.
    """
    if "timeout" in options:  # the given time-out is for collectives, which wait for slow disks
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
    """A name that exactly the ranks of one attempt get, whatever earlier attempts left in the store.

    Rank 0 makes up the name. Each other rank claims its number under the newest name, until the attempt of
    that name is complete: the name may be of an earlier attempt, whose processes are dead. They poll, because
    torch logs two lines for each wait that times out. TORCHELASTIC_RESTART_COUNT cannot be the name: every
    agent of torchrun counts separately (pytorch/pytorch#108158).

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
"""Signals that stop a run. SIGHUP is sent when the terminal closes, and torchrun forwards it."""
ONE_STOP_SECONDS = 1.0
"""Signals within this time count as one: workers get a Ctrl-C from the terminal and from the launcher."""


class SignalHandler:
    """Records the first stop signal inside a `with` block.

    The run then finishes its step and saves. Later signals are ignored, since launchers and schedulers repeat
    them. Ctrl-C is the exception: a second one, at least `ONE_STOP_SECONDS` after the latest signal, prints a
    warning, and a third ends the process at once, without saving. Python allows handlers in the main thread
    only; in other threads, nothing is installed. If SIGHUP is ignored (nohup), it stays ignored.

    Args:
        verbose: Whether to print the effect of a signal on standard error; one process of a run does.
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
        if error is not None and _has_peers():  # the process must report the error despite a SIGTERM
            ignore_stop_signals()
            return
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned

    def _handle(self, number: int, frame: FrameType | None) -> None:
        received, now = signal.Signals(number), time.monotonic()
        if self.signal is None:
            self.signal = received
            text = f"{received.name}: the run saves and stops after this step"
            if received is signal.SIGTERM and _ELASTIC in os.environ:  # the launcher also ends ranks with it
                text += ", unless another rank failed"
            if _ELASTIC in os.environ and os.environ.get("PET_SIGNALS_TO_HANDLE") != "SIGQUIT":
                seconds = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")
                text += f" (its launcher waits {seconds} s, then kills it, and prints a traceback)"
            self._print(text)
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
            except OSError:  # the terminal is closed; the run stops even so
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
