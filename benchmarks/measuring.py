"""What every benchmark says about its figures: their spread, the commit, the machine and how busy it was."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Spread:
    """Median, minimum and maximum of repeated measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """The spread of at least one value."""
        found = list(values)
        return cls(statistics.median(found), min(found), max(found))

    def text(self, unit: str = "", digits: int = 3) -> str:
        """`1.012 (0.990 to 1.034)`, with a unit where there is one."""
        space = f" {unit}" if unit else ""
        low, high = f"{self.low:.{digits}f}", f"{self.high:.{digits}f}"
        return f"{self.median:.{digits}f}{space} ({low} to {high})"


def goal(description: str, met: bool) -> str:
    """The line that says whether a goal was reached."""
    return f"goal: {description}: {'met' if met else 'MISSED'}"


def header(command: str) -> str:
    """Command, commit and machine: what a figure is worth nothing without."""
    import torch

    malloc = [f"{name}={value}" for name, value in os.environ.items() if name.startswith("MALLOC_")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return "\n".join(
        [
            f"command  {' '.join([*malloc, 'python -m benchmarks', command])}",
            f"commit   {commit()}",
            f"machine  {cpu_name()}, {cores} cores{gpu}, Python {platform.python_version()}, "
            f"torch {torch.__version__}",
            f"load     {os.getloadavg()[0]:.1f} before the start (other processes disturb wall times)",
        ]
    )


def commit() -> str:
    """Short revision of the working tree, with `+` when it holds more than that."""
    revision = _git("rev-parse", "--short", "HEAD")
    return revision + ("+" if _git("status", "--porcelain") else "") if revision else "unknown"


def _git(*arguments: str) -> str:
    """Standard output of a git command in this repository; empty when it fails."""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def cpu_name() -> str:
    """The processor's model, where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown CPU"
    )
