"""Starts probe scripts under a launcher, in a process group of their own, and waits for their end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from support.fork_server import python_path
from support.launching import ROOT, environment, kill_outright, train

LIMIT_SECONDS = 400
"""Far above what a launch takes; reached when something hangs."""

ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


@dataclass
class Launch:
    """A finished launch of a probe."""

    exit_code: int
    output: str
    folder: Path

    def variant(self, name: str) -> list:
        """What each process did."""
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob(f"{name}-*.json"))]


def start_probe(command: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    """Start a launcher with `folder` as working directory; its output goes to a file there."""
    options = environment() | {"PYTHONPATH": python_path(ROOT, ROOT / "tests"), "OMP_NUM_THREADS": "1"}
    with (folder / "output").open("w") as output:
        return subprocess.Popen(
            command, cwd=folder, env=options, stdout=output, stderr=output, text=True, start_new_session=True
        )


def finish_probe(process: subprocess.Popen[str], folder: Path) -> Launch:
    """Wait for a launcher's end; one that hangs is ended."""
    try:
        process.wait(LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        kill_outright(process)
        process.wait()
        raise AssertionError((folder / "output").read_text()[-3000:]) from None
    return Launch(process.returncode, (folder / "output").read_text(), folder)


def list_threads(folder: str, options: list[str]) -> int:
    """Train in this rank; leaves the names of the process's threads in `threads-RANK`."""
    exit_code = train("--run.output_dir", folder, *options)
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has just ended
            names.append((task / "comm").read_text().strip())
    (Path(folder) / f"threads-{os.environ['RANK']}").write_text("\n".join(names))
    return exit_code
