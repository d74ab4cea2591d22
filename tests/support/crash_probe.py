"""Trains in forks of one process that has imported everything, many times over, with faults put in.

Started by `CrashProbe` with `faulty_io.c` preloaded. It reads one JSON object per line: a training to run
and the fault of each rank; it answers with one line: how each rank ended. Knows nothing of what is right.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from support.faulty_io import HOW, Fault

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = {"torchrun": "train_pretrain", "accelerate": "train_pretrain_accelerate"}


@dataclass(frozen=True)
class Ended:
    """How one rank ended: exit code (negative: by that signal), what it printed, seconds after the first."""

    exit_code: int
    output: str
    seconds: float


class CrashProbe:
    """A running probe.

    Args:
        library: Compiled `faulty_io.c`.
        folder: For its own files.
    """

    def __init__(self, library: Path, folder: Path):
        self.library, self.folder = library, folder
        folder.mkdir(parents=True, exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        environment |= {
            "LD_PRELOAD": str(library),
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(library), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
        )

    def train(
        self,
        folder: Path,
        options: list[str],
        *,
        world_size: int = 1,
        launcher: str = "torchrun",
        faults: dict[int, Fault] | None = None,
        journal: Path | None = None,
        with_data: bool = False,
        limit: float = 120,
        edits: Sequence[Any] = (),
        file_size: int | None = None,
    ) -> list[Ended]:
        """Run a script with `options` in `world_size` forks; their ends in the order of ranks.

        Args:
            folder: `run.output_dir`; calls below it are watched.
            options: The script's.
            world_size, launcher: Which script, on how many processes.
            faults: Rank → its fault.
            journal: Where the calls of all ranks are written, with their data if `with_data`.
            limit: Seconds until what still runs is killed; such a rank's exit code is -14.
            edits: Mistakes to put in (`support.mutation.Edit`).
            file_size: Bytes that no file may exceed (RLIMIT_FSIZE).
        """
        request = {
            "folder": str(folder),
            "options": options,
            "world_size": world_size,
            "launcher": launcher,
            "faults": {str(rank): asdict(fault) for rank, fault in (faults or {}).items()},
            "journal": str(journal) if journal else "/dev/null",
            "with_data": with_data,
            "limit": limit,
            "file_size": file_size,
            "edits": [[edit.file, edit.old, edit.new] for edit in edits],
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the probe has ended"
        return [Ended(**each) for each in json.loads(answer)]

    def close(self) -> None:
        """End the probe."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        assert self._process.stdout is not None
        self._process.stdout.close()


def main(library: str, folder: str) -> None:
    hook = ctypes.CDLL(library)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in SCRIPTS.values():
        import_module(name)
    known = Path(folder) / "modules.json"
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(json.dumps(_run(hook, request, Path(folder), known)) + "\n")
        answers.flush()
        if known.exists():  # what a training imports on its way, imported once for all that follow
            _import_all(json.loads(known.read_text()))
            known.unlink()


def _import_all(names: list[str]) -> None:
    for name in names:
        if name not in sys.modules and not name.startswith(("mutant", "__")):
            try:
                import_module(name)
            except BaseException:  # some modules only work where another has imported them
                continue


def _run(hook: Any, request: dict[str, Any], folder: Path, known: Path) -> list[dict[str, Any]]:
    world_size, port = request["world_size"], _free_port()
    outputs = [folder / f"output-{rank}" for rank in range(world_size)]
    children = {}
    for rank in range(world_size):
        if (child := os.fork()) == 0:
            _child(hook, request, rank, port, outputs[rank], known)
        children[child] = rank
    ended: dict[int, tuple[int, float]] = {}
    deadline, first = time.monotonic() + request["limit"], None
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        now = time.monotonic()
        if child:
            first = now if first is None else first
            ended[children.pop(child)] = (os.waitstatus_to_exitcode(status), now - first)
        elif now > deadline:
            for child, rank in children.items():
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                ended[rank] = (-signal.SIGALRM, now - (first or now))
            children = {}
        else:
            time.sleep(0.002)
    return [
        {"exit_code": ended[rank][0], "seconds": ended[rank][1], "output": outputs[rank].read_text()}
        for rank in range(world_size)
    ]


def _child(hook: Any, request: dict[str, Any], rank: int, port: int, output: Path, known: Path) -> None:
    code = 1
    try:
        out = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        if request["world_size"] > 1:
            size = str(request["world_size"])
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size}
            os.environ |= {"LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if request["file_size"]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_size"], request["file_size"]))
        _arm(hook, request, rank)
        code = _train(request)
        if rank == 0:
            known.write_text(json.dumps(sorted(sys.modules)))
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _arm(hook: Any, request: dict[str, Any], rank: int) -> None:
    fault = Fault(**request["faults"].get(str(rank), {}))
    texts = (request["folder"].encode(), request["journal"].encode())
    numbers = (ctypes.c_long(fault.at), HOW[fault.how], fault.error, ctypes.c_long(fault.times))
    hook.faulty_arm(*texts, int(request["with_data"]), rank, fault.only.encode(), *numbers)


def _train(request: dict[str, Any]) -> int:
    from support.mutation import Edit, mutated

    script, options = SCRIPTS[request["launcher"]], ["--run.output_dir", request["folder"]]
    options = ["--logging.report", "false", *options, *request["options"]]
    with mutated(*(Edit(*edit) for edit in request["edits"])) as load:
        if request["edits"]:
            return load(f"{script}.py").main(options)
        return import_module(script).main(options)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


if __name__ == "__main__":
    main(*sys.argv[1:])
