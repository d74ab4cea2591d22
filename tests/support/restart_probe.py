"""A script for torchrun: what a restarted process finds in the store that all attempts share.

Run as `torchrun --max-restarts 2 --nproc_per_node 2 restart_probe.py FOLDER`; FOLDER holds config.yaml. In
the first attempt a rank is killed. In each further one the ranks note what became of one engine, with and
without the prefix of the attempt; at last they leave with 75.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from support.engines import SCRIPTS, engine_class, reset_accelerate
from support.faults import Fault, Patch, replacing
from support.stepping import resolved

from llm_pretrain.config.loading import load_config
from llm_pretrain.config.tree import Config
from llm_pretrain.launch.process import rendezvous_init_method

ONE_STORE = replacing(rendezvous_init_method, lambda: "env://")
"""The mistake: all attempts meet in the same store."""

EXIT_CODE = 75


def meet(launcher: str, config: Config, *faults: Fault) -> str | float:
    """Build an engine and sum ones over its ranks; the sum, or the error."""
    reset_accelerate()
    try:
        chosen = engine_class(launcher)
        with Patch.context() as patch:
            for fault in faults:
                fault(patch, chosen)
            engine: Any = chosen(config)
            return engine.reduce_sum(torch.ones(())).item()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def try_both(rank: int, launcher: str, config: Config, folder: Path) -> None:
    """Leave what an engine finds; one rank waits until the other is done with the mistake, then both meet."""
    first = folder / f"{launcher}-first-is-done"
    while rank == 1 and not first.exists():
        time.sleep(0.02)
    soon = replace(config, distributed=replace(config.distributed, timeout_seconds=1))
    mistaken = meet(launcher, soon, ONE_STORE)
    first.touch()
    (folder / f"{launcher} one store-{rank}.json").write_text(json.dumps(mistaken))
    while not all((folder / f"{launcher} one store-{each}.json").exists() for each in (0, 1)):
        time.sleep(0.02)  # the mistake takes one of them longer than a rendezvous may
    (folder / f"{launcher}-{rank}.json").write_text(json.dumps(meet(launcher, config)))


def main(folder: Path) -> int:
    rank, attempt = (int(os.environ[name]) for name in ("RANK", "TORCHELASTIC_RESTART_COUNT"))
    config = resolved(load_config(["--config", str(folder / "config.yaml")]))
    if attempt == 0:
        assert meet("torchrun", config, ONE_STORE) == 2.0
    else:
        try_both(rank, list(SCRIPTS)[attempt - 1], config, folder)
    if attempt == len(SCRIPTS):
        return EXIT_CODE
    (folder / f"attempt-{attempt}-rank-{rank}").touch()
    if rank == 1:
        while not (folder / f"attempt-{attempt}-rank-0").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)  # until the launcher ends it
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
