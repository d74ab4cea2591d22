"""A script for launchers: what becomes of the Accelerate engine, with and without a mistake put in.

Run as `LAUNCHER launch_probe.py FOLDER VARIANT...`; FOLDER holds config.yaml. Each variant leaves, per
process, what it did. The last variant may be `main`: the real script's `main`, whose exit code is returned.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist
from support.engines import engine_class, rendezvous_in, reset_accelerate
from support.faults import Fault, Patch, replacing
from support.stepping import drive, resolved

from llm_pretrain.config.loading import load_config
from llm_pretrain.launch.checks import check_accelerate_settings, check_world_size

NO_COUNT = replacing(check_world_size, lambda world_size: None)
NO_COMPARISON = replacing(check_accelerate_settings, lambda config, accumulation_steps: None)


def bare(patch: Patch, engine: type) -> None:
    """An `Accelerator()` that is not told of the CPU."""
    script: Any = sys.modules[engine.__module__]
    accelerator = script.Accelerator
    patch.setattr(script, "Accelerator", lambda cpu, **options: accelerator(**options))


LAUNCHED = dict(os.environ)
"""What the launcher has said."""
PATIENCE_SECONDS = 120
VARIANTS: dict[str, list[Fault]] = {
    "ours": [],
    "no count of processes": [NO_COUNT],
    "bare accelerator": [bare],
    "bare accelerator, no count of processes": [bare, NO_COUNT],
    "no comparison of settings": [NO_COMPARISON],
}


def start_again() -> None:
    """Forget what Accelerate keeps, but nothing of what the launcher has said."""
    reset_accelerate()
    os.environ.update(LAUNCHED)


def try_variant(folder: Path, variant: str) -> dict[str, object]:
    """Train a step; the number of processes that were connected and the strategy, or the error."""
    start_again()
    config = resolved(load_config(["--config", str(folder / "config.yaml")]))
    try:
        chosen = engine_class("accelerate")
        with Patch.context() as patch:
            for fault in VARIANTS[variant]:
                fault(patch, chosen)
            engine: Any = chosen(config)
            strategy = engine.accelerator.distributed_type.value
            updates = drive(engine, config).updates
            engine.close()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": None, "processes": engine.world_size, "strategy": strategy, "updates": updates}


def main(folder: Path, variants: list[str]) -> int:
    for variant in variants:
        if variant == "main":
            start_again()
            return import_module("train_pretrain_accelerate").main(["--config", str(folder / "config.yaml")])
        # a mistake's process group must leave nothing in the launcher's store, where the real one follows
        with nullcontext() if variant == "ours" else rendezvous_in(folder / f"{variant}-rendezvous"):
            found = try_variant(folder, variant)
            (folder / f"{variant}-{os.getpid()}.json").write_text(json.dumps(found))
            wait_for_all(folder, variant)
            if dist.is_initialized():
                dist.destroy_process_group()
    return 0


def wait_for_all(folder: Path, variant: str) -> None:
    """Until every process has got as far: leaving a group that another still joins would tear it."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(list(folder.glob(f"{variant}-*.json"))) < int(LAUNCHED.get("WORLD_SIZE", "1")):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{variant}: another process has not come as far")
        time.sleep(0.02)


def run(folder: str, variants: list[str]) -> int:
    """`main` in a forked rank."""
    return main(Path(folder), variants)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
