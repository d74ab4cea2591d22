"""What launches need to know before they start: the scripts, their strategies, this machine.

Pure but for looking at the machine. What is launched, and what for, is the commands' business.
"""

from __future__ import annotations

import os
import platform
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from llm_pretrain.config import Config, to_dict

SCRIPTS = {
    "torchrun": "train_pretrain.py",
    "accelerate": "train_pretrain_accelerate.py",
    "trainer": "examples/train_pretrain_trainer.py",
}
"""Path to its script, inside of the folder with the scripts."""
_PACKAGES = ("torch", "accelerate", "transformers", "numpy")


@dataclass(frozen=True)
class Machine:
    """What runs here: GPUs, and cores that this process may use."""

    gpus: int
    cores: int

    @property
    def most_processes(self) -> int:
        """Largest world size: one process per GPU; without one, per core, and two on a single core."""
        return self.gpus or max(2, self.cores)


def this_machine() -> Machine:
    """The machine that this process runs on."""
    import torch

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(torch.cuda.device_count() if torch.cuda.is_available() else 0, usable)


def call_facts(
    arguments: Namespace,
    machine: Machine,
    *,
    started: float,
    threads: int,
    scripts: Path,
    steps: int,
    notes: Sequence[str],
    config: Config,
) -> dict[str, Any]:
    """What the JSON file of a call says besides its results: versions, machine, settings.

    Args:
        arguments: The call's, with `config` and `settings`.
        machine: Where it ran.
        started: Seconds since 1970.
        threads: Per process.
        scripts, steps, notes, config: Of the call's plan.
    """
    import torch

    from llm_pretrain.checkpoints import environment

    found = environment(torch.device("cuda", 0) if machine.gpus else torch.device("cpu"))
    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        "llm_pretrain": found["llm_pretrain"],
    }
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "versions": versions,
        "machine": found["platform"],
        "cpu" if not machine.gpus else "gpu": found["device"],
        "cores": machine.cores,
        "gpus": machine.gpus,
        "threads": threads,
        "git_revision": found["git_revision"],
        "started": started,
        "seconds": round(time.time() - started, 1),
        "config_files": arguments.config,
        "settings": arguments.settings,
        "scripts": str(scripts),
        "steps": steps,
        "notes": list(notes),
        "config": to_dict(config),
    }
