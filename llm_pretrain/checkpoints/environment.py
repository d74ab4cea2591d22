"""Versions, hardware and git revision that wrote a checkpoint, and what their change means.

Bit identity holds on one kind of hardware and one set of versions; elsewhere training continues, but not
to the last bit, and the user is told.
"""

from __future__ import annotations

import functools
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import llm_pretrain

_DECIDES_ARITHMETIC = ("torch", "llm_pretrain", "device")


def environment(device: torch.device) -> dict[str, str | None]:
    """Versions, hardware and git revision of this process."""
    return {
        "torch": torch.__version__,
        "llm_pretrain": llm_pretrain.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "git_revision": _git_revision(),
    }


def environment_changes(saved: dict[str, str | None], device: torch.device) -> list[str]:
    """What differs from the saved environment and may change the last bits of a result."""
    current = environment(device)
    return [
        f"{key} was {saved.get(key)} when the checkpoint was saved and is {current[key]} now: "
        "training continues, but not bit for bit"
        for key in _DECIDES_ARITHMETIC
        if saved.get(key) != current[key]
    ]


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@functools.cache
def _git_revision() -> str | None:
    """Commit of the framework's own checkout, `-dirty` with local changes; None when installed."""
    folder = Path(llm_pretrain.__file__).parent
    git = ["git", "--no-optional-locks", "-C", str(folder)]
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 10}
    try:
        # An installed package may lie inside somebody else's repository.
        subprocess.run([*git, "ls-files", "--error-unmatch", "__init__.py"], check=True, **options)
        described = subprocess.run(
            [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"], check=True, **options
        )
        return described.stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None
