"""A command with what it took: CPU time and memory of its own, whoever starts it.

Linux counts the memory of the process that starts another among the peak of that one, so a test process that
has grown would measure itself. A small process in between starts the command, and reports.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Measured:
    """How a command ended. The peak is that of its largest process; CPU time is that of all."""

    exit_code: int
    cpu_seconds: float
    memory_bytes: int


def run_measured(command: list[str], **options: Any) -> Measured:
    """Run `command` to its end, with `options` of `subprocess.run`."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        subprocess.run([sys.executable, "-S", __file__, str(report), *command], check=True, **options)
        return Measured(**json.loads(report.read_text()))


def main(report: str, command: list[str]) -> None:
    """Between the two."""
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    found = {
        "exit_code": process.returncode,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "memory_bytes": usage.ru_maxrss * 1024,
    }
    Path(report).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
