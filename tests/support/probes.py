"""Commands of launchers, and what a test puts into a forked rank, or looks at in it."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from support.launching import train

import train_pretrain_accelerate as script

ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def build_a_bare_accelerator() -> None:
    """The mistake of an `Accelerator()` that is not told of the CPU, for as long as this process lives."""
    accelerator: Any = script.Accelerator
    script.Accelerator = lambda cpu, **options: accelerator(**options)  # type: ignore[misc]


def list_threads(folder: str, options: list[str]) -> int:
    """Train in this rank; leaves the names of the process's threads in `threads-RANK`."""
    exit_code = train("--run.output_dir", folder, *options)
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has just ended
            names.append((task / "comm").read_text().strip())
    (Path(folder) / f"threads-{os.environ['RANK']}").write_text("\n".join(names))
    return exit_code
