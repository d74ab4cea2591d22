"""Which commit was measured on which machine, and how busy others kept it meanwhile."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_BUSY_CORES = 0.1
"""Cores that others may use on average before a row is marked busy."""


class Witness:
    """How many cores other processes used since it was made, and the load before and after."""

    def __init__(self):
        self.load, self._busy, self._own = os.getloadavg()[0], _busy_seconds(), _own_seconds()
        self._start = time.monotonic()

    def others(self) -> float | None:
        """Cores that others kept busy on average, from the kernel's counters; None where it has none.

        Children count as others until they have been waited for.
        """
        busy = _busy_seconds()
        if busy is None or self._busy is None:
            return None
        used = busy - self._busy - (_own_seconds() - self._own)
        return max(0.0, used / max(time.monotonic() - self._start, 1e-9))

    def text(self) -> str:
        """`load 0.1 before, 1.0 after; others used 0.02 cores`."""
        others = self.others()
        used = "" if others is None else f"; others used {others:.2f} cores"
        return f"load {self.load:.1f} before, {os.getloadavg()[0]:.1f} after{used}"

    def busy(self) -> bool:
        """Whether wall times are worth little, and ratios of CPU times less than on an idle machine."""
        others = self.others()
        return self.load > 1.0 if others is None else others > _BUSY_CORES


def _busy_seconds() -> float | None:
    """Seconds that all cores together have worked since the machine started (user, nice, system)."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return None
    return (int(fields[1]) + int(fields[2]) + int(fields[3])) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def machine() -> str:
    """`AMD EPYC, 2 cores, torch 2.13.0`, with the GPU where there is one."""
    import torch

    from llm_pretrain.hardware import processor, usable_cores

    cores = usable_cores()
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{processor()}, {cores} cores{gpu}, Python {platform.python_version()}, torch {torch.__version__}"


def commit() -> str:
    """Short revision of the working tree, with `+` when it holds more than that."""
    revision = _git("rev-parse", "--short", "HEAD")
    return revision + ("+" if _git("status", "--porcelain") else "") if revision else "unknown"


def _git(*arguments: str) -> str:
    """Standard output of a git command in this repository; empty when it fails, or without git."""
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def python_path() -> str:
    """PYTHONPATH for a script that is started: this checkout, then what it held before."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
