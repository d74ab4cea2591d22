"""A process that has imported the training code once and forks the ranks of every launch that tests ask for.

Starting two ranks takes about eight CPU seconds of imports; forking them takes none. Each rank gets the
environment that torchrun or `accelerate launch` would give it and runs the real script's `main`.

The server forks while it has one thread and has computed nothing: neither a lock nor an OpenMP pool can be
lost in a child. All pytest-xdist workers of a test run share one server, which is started by the first
launch and ends with the test run.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from support.reached import NOTES

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = {"torchrun": "train_pretrain", "accelerate": "train_pretrain_accelerate"}
RUN_FOLDER, RUN_PROCESS = "LLM_PRETRAIN_TEST_FOLDER", "LLM_PRETRAIN_TEST_PROCESS"
"""Variables that all processes of a test run share: a folder, and the id of the process to end with."""

PR_SET_PDEATHSIG = 1
START_SECONDS = 300
"""Upper bound on the server's imports; they take five CPU seconds."""
KILL_SECONDS = 30.0
"""Between SIGTERM and SIGKILL for the other ranks of one that failed, as in torchrun."""

LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
NOT_PRELOADED = ("deepspeed", "wandb", "tensorboard", "IPython", "ipykernel", "support", "test_", "__")
"""Modules that a launch imports and the server leaves to each launch: they change what others do."""
JEMALLOC = "jemalloc_bg_thd"
"""A thread of Arrow's allocator, which handles forks itself (pthread_atfork)."""


@dataclass(frozen=True)
class Request:
    """One launch.

    Args:
        target: `module:function` to call in every rank; what it returns is the exit code (None: 0).
        arguments: Of the function; JSON.
        world_size: Number of ranks.
        variables: Added to the environment of every rank.
        launcher: `torchrun`, `accelerate` or `none` (no launcher's variables).
        launcher_options: Options of `accelerate launch` before the script.
        output: File for standard output and standard error of all ranks.
        outputs: A file for each rank instead.
        folder: Working directory.
        before: `module:function` and its arguments, called in every rank before the target: for faults.
        end_seconds: Between the first failed rank and SIGTERM for the others, as from torchrun.
        limit: Seconds until the ranks that still run get SIGALRM, which ends them.
        file_size: Upper bound on a file's bytes (RLIMIT_FSIZE).
    """

    target: str
    arguments: list[Any]
    world_size: int = 1
    variables: dict[str, str] = field(default_factory=dict)
    launcher: str = "none"
    launcher_options: list[str] = field(default_factory=list)
    output: str = os.devnull
    outputs: list[str] = field(default_factory=list)
    folder: str = str(ROOT)
    before: list[tuple[str, list[Any]]] = field(default_factory=list)
    end_seconds: float = 5.0
    limit: float | None = None
    file_size: int | None = None


class Forked:
    """Ranks that the server has forked for one request."""

    def __init__(self, connection: socket.socket, log: Path):
        self._lines = connection.makefile("r")
        self._connection = connection
        answer = self._lines.readline()
        if not answer:
            self._lines.close()
            raise RuntimeError(f"the fork server has ended:\n{log.read_text()[-4000:]}")
        self.pids: list[int] = json.loads(answer)
        self._codes: list[int] | None = None
        self.ended: list[float] = []
        """When each rank ended, on the monotonic clock; after `wait`."""

    def wait(self, timeout: float) -> list[int]:
        """Exit codes of all ranks in order; negative numbers are signals.

        Raises:
            TimeoutError: a rank still runs after `timeout` seconds; all are killed.
        """
        if self._codes is None:
            self._connection.settimeout(timeout)
            try:
                self._codes, self.ended = json.loads(self._lines.readline())
            except TimeoutError:
                self.send(signal.SIGKILL)
                raise
            finally:
                self._lines.close()
                self._connection.close()
        assert self._codes is not None
        return self._codes

    def poll(self) -> list[int] | None:
        """The exit codes, or None while a rank still runs."""
        if self._codes is None and not select.select([self._connection], [], [], 0)[0]:
            return None
        return self.wait(START_SECONDS)

    def send(self, number: signal.Signals, rank: int | None = None) -> None:
        """Send a signal to one rank, or to all of them at once."""
        for pid in self.pids if rank is None else [self.pids[rank]]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


class ForkServer:
    """Client of a running server.

    Args:
        path: Its socket.
    """

    def __init__(self, path: Path):
        self.path = path

    def start(self, request: Request) -> Forked:
        """Fork the ranks of a request."""
        noted = {NOTES: os.environ[NOTES]} if NOTES in os.environ else {}  # the server has an earlier test's
        request = replace(request, variables=noted | request.variables)
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(self.path))
            connection.sendall(json.dumps(asdict(request)).encode() + b"\n")
            return Forked(connection, self.path.with_suffix(".log"))
        except BaseException:
            connection.close()
            raise

    def run(self, request: Request, timeout: float) -> list[int]:
        """Fork the ranks and wait for their exit codes."""
        return self.start(request).wait(timeout)


def share_with_workers() -> None:
    """Let this process and those that it starts share one folder and one server; called by conftest."""
    if RUN_FOLDER not in os.environ:
        os.environ[RUN_FOLDER] = tempfile.mkdtemp(prefix="fork-server-")
        os.environ[RUN_PROCESS] = str(os.getpid())


def remove_shared() -> None:
    """Remove the shared folder, in the process that has made it; called by conftest."""
    if os.environ.get(RUN_PROCESS) == str(os.getpid()):
        shutil.rmtree(os.environ[RUN_FOLDER], ignore_errors=True)


_started: list[subprocess.Popen[bytes]] = []
"""Kept as long as this process lives: it is not waited for."""


@cache
def fork_server() -> ForkServer:
    """The test run's server, started by whoever asks first."""
    from filelock import FileLock

    share_with_workers()
    folder = Path(os.environ[RUN_FOLDER])
    with FileLock(folder / "lock"):
        if not (folder / "socket").exists():
            _started.append(start_server(folder / "socket", ends_with=int(os.environ[RUN_PROCESS])))
    return ForkServer(folder / "socket")


def own_environment() -> dict[str, str]:
    """The environment without what a launcher would take for its own."""
    own = ("ACCELERATE_", "TORCHELASTIC_", "PYTEST_")
    return {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith(own)
    }


def start_server(
    path: Path, *, ends_with: int, variables: Mapping[str, str] | None = None
) -> subprocess.Popen:
    """Start a server that listens at `path` and ends when the process `ends_with` is gone."""
    kept = own_environment() | {"CUDA_VISIBLE_DEVICES": "", "OPENBLAS_NUM_THREADS": "1"}
    kept |= {"PYTHONPATH": python_path(ROOT, ROOT / "tests"), "PYTHONWARNINGS": "ignore"}
    # threads that spin while they wait take the cores from one another
    kept |= {"OMP_WAIT_POLICY": "passive"} | dict(variables or {})
    log = path.with_suffix(".log")
    with log.open("w") as output:
        command = [sys.executable, "-m", "support.fork_server", str(path), str(ends_with)]
        process = subprocess.Popen(
            command, cwd=ROOT, env=kept, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    deadline = time.monotonic() + START_SECONDS
    while not path.exists():
        assert process.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline, "the fork server did not start"
        time.sleep(0.05)
    return process


def python_path(*folders: Path) -> str:
    """PYTHONPATH of a process that imports from these folders, then from where this one does."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def free_port() -> int:
    """A port that nobody listens at, outside the range that outgoing connections draw from."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


LEARNED = Path()
"""In the server and its forks: where a launch leaves the names of its imports."""


@dataclass
class _Launch:
    name: str
    connection: socket.socket
    end_seconds: float
    running: dict[int, int]
    """Process id -> rank."""
    codes: list[int]
    ended: list[float]
    stop_at: float
    end_at: float = float("inf")
    kill_at: float = float("inf")
    cpu_seconds: float = 0.0


class _Server:
    """Accepts requests, forks ranks and reports their ends; one thread, so that it may fork."""

    def __init__(self, path: str, ends_with: int):
        self.ends_with = ends_with
        self.launches: list[_Launch] = []
        self.listener = socket.socket(socket.AF_UNIX)
        self.woken, wake = socket.socketpair()
        for each in (self.woken, wake):
            each.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        self.wake = wake
        self.listener.bind(path + ".starting")
        self.listener.listen(64)
        os.rename(path + ".starting", path)

    def serve(self) -> None:
        """Serve until the process `ends_with` is gone; the ranks get SIGKILL with this process."""
        while _is_alive(self.ends_with):
            sockets = [self.listener, self.woken, *(launch.connection for launch in self.launches)]
            ready, _, _ = select.select(sockets, [], [], 0.5)
            if self.woken in ready:
                with suppress(BlockingIOError):
                    self.woken.recv(4096)
            for launch in [each for each in self.launches if each.connection in ready]:
                self._signal(launch, signal.SIGKILL)  # who asked for it has gone
            if self.listener in ready:
                self._accept()
            self._reap()

    def _accept(self) -> None:
        connection, _ = self.listener.accept()
        with connection.makefile("r") as lines:
            request = Request(**json.loads(lines.readline()))
        self._import_learned()
        gc.collect()
        gc.freeze()
        environments = rank_environments(request)
        names = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
        threads = [name for name in names if name != JEMALLOC]
        assert len(threads) == 1, f"a fork would lose the locks of other threads: {threads}"
        running = {}
        for rank, environment in enumerate(environments):
            if (child := os.fork()) == 0:
                self._run(request, rank, environment, connection)
            running[child] = rank
        stop_at = time.monotonic() + (request.limit or float("inf"))
        codes, ended = [0] * request.world_size, [0.0] * request.world_size
        name = f"{request.target} {str(request.arguments)[:200]}"
        launch = _Launch(name, connection, request.end_seconds, running, codes, ended, stop_at)
        self.launches.append(launch)
        self._answer(launch, list(running))

    def _import_learned(self) -> None:
        """Import what earlier launches imported on their way."""
        if LEARNED.exists():
            names = json.loads(LEARNED.read_text())
            LEARNED.unlink()
            for name in names:
                if name not in sys.modules and not name.startswith(NOT_PRELOADED):
                    with suppress(BaseException):  # some modules only work where another has imported them
                        import_module(name)

    def _reap(self) -> None:
        now = time.monotonic()
        for launch in list(self.launches):
            for pid in list(launch.running):
                found, status, usage = os.wait4(pid, os.WNOHANG)
                if found:
                    launch.cpu_seconds += usage.ru_utime + usage.ru_stime
                    rank = launch.running.pop(pid)
                    launch.codes[rank], launch.ended[rank] = os.waitstatus_to_exitcode(status), now
                    if launch.codes[rank]:
                        launch.end_at = min(launch.end_at, now + launch.end_seconds)
            if not launch.running:
                print(f"{launch.cpu_seconds:.1f} CPU seconds: {launch.name}", flush=True)  # to the log
                self._answer(launch, [launch.codes, launch.ended])
                launch.connection.close()
                self.launches.remove(launch)
            elif now > launch.kill_at:
                self._signal(launch, signal.SIGKILL)
            elif now > launch.stop_at:
                launch.stop_at, launch.kill_at = float("inf"), now + KILL_SECONDS
                self._signal(launch, signal.SIGALRM)
            elif now > launch.end_at and launch.kill_at == float("inf"):
                launch.kill_at = now + KILL_SECONDS
                self._signal(launch, signal.SIGTERM)

    def _signal(self, launch: _Launch, number: signal.Signals) -> None:
        for pid in launch.running:
            os.kill(pid, number)

    def _answer(self, launch: _Launch, value: Any) -> None:
        with suppress(OSError):  # who asked for it has gone
            launch.connection.sendall(json.dumps(value).encode() + b"\n")

    def _run(self, request: Request, rank: int, environment: dict[str, str], own: socket.socket) -> None:
        """The child: never returns."""
        code: object = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # as at the top of the scripts
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            os.setsid()
            others = [each.connection for each in self.launches]
            for each in (self.listener, self.woken, self.wake, own, *others):
                each.close()
            os.environ.clear()
            os.environ |= environment
            os.chdir(request.folder)
            path = request.outputs[rank] if request.outputs else request.output
            output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            if request.file_size:
                resource.setrlimit(resource.RLIMIT_FSIZE, (request.file_size, request.file_size))
            for target, arguments in request.before:
                resolve(target)(*arguments)
            code = resolve(request.target)(*request.arguments)
        except SystemExit as exit_:
            code = exit_.code
        except BaseException:
            traceback.print_exc()
        finally:
            if isinstance(code, str):
                print(code, file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def note_imports() -> None:
    """Leave the names of this rank's imports for the server, which does them for all launches that follow."""
    temporary = LEARNED.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(sorted(sys.modules)))
    temporary.rename(LEARNED)


def resolve(target: str) -> Any:
    """The function that `module:name` names."""
    module, name = target.split(":")
    return getattr(import_module(module), name)


def rank_environments(request: Request) -> list[dict[str, str]]:
    """Every rank's environment, as the launcher of the request would set it."""
    shared = dict(os.environ) | request.variables
    size, elastic = str(request.world_size), request.world_size > 1
    if request.launcher == "accelerate":
        shared |= accelerate_variables(tuple(request.launcher_options))
    if request.launcher == "none" or not elastic:
        return [shared] * request.world_size
    shared |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "ROLE_WORLD_SIZE": size, "ROLE_NAME": "default"}
    shared |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": "fork-server"}
    shared |= {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": "False"} | request.variables
    return [
        shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank)}
        for rank in range(request.world_size)
    ]


@cache
def accelerate_variables(options: tuple[str, ...]) -> dict[str, str]:
    """What `accelerate launch OPTIONS script.py` adds to the environment, by Accelerate's own functions."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

    before = dict(os.environ)
    try:
        parsed = launch_command_parser().parse_args([*options, "script.py"])
        parsed, _, _ = _validate_launch_command(parsed)
        if parsed.num_processes > 1:
            found = prepare_multi_gpu_env(parsed)
        else:
            _, found = prepare_simple_launcher_cmd_env(parsed)
    finally:
        os.environ.clear()
        os.environ |= before
    return {name: value for name, value in found.items() if before.get(name) != value}


def run_script(script: str, argv: Sequence[str]) -> None:
    """A rank's part of a launch: the script's `main`, and its way to end a process."""
    module = import_module(script)
    sys.argv = [str(ROOT / f"{script}.py"), *argv]
    exit_code = module.main(list(argv))
    note_imports()
    module.exit_process(exit_code)


def assert_imported_from(folder: str) -> None:
    """Fail unless the project that the ranks run is the one in `folder`."""
    for name in ("llm_pretrain", *SCRIPTS.values()):
        file = import_module(name).__file__ or ""
        assert Path(file).is_relative_to(folder), f"{name}: imported {file}, expected a file in {folder}"


def run_own_script(scripts: Sequence[str], argvs: Sequence[Sequence[str]]) -> None:
    """`run_script` with a script and options for each rank."""
    rank = int(os.environ["RANK"])
    run_script(scripts[rank], argvs[rank])


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def main(path: str, ends_with: str) -> None:
    global LEARNED
    LEARNED = Path(path).with_suffix(".modules")
    for script in SCRIPTS.values():
        import_module(script)
    _Server(path, int(ends_with)).serve()


if __name__ == "__main__":
    import_module("support.fork_server").main(*sys.argv[1:])  # the name that the targets import it by
