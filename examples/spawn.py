"""Start either script from Python, without a launcher, by `torch.multiprocessing.spawn`.

    python examples/spawn.py --processes 2 train_pretrain.py --config configs/tiny-moe.yaml
    python examples/spawn.py --processes 2 train_pretrain_accelerate.py --config configs/tiny-moe.yaml

It is for programs that start trainings themselves, on one machine. It leaves with the workers' exit code.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import socket
import sys
from pathlib import Path

from torch.multiprocessing.spawn import ProcessExitedException, spawn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def worker(local_rank: int, processes: int, port: int, script: str, argv: list[str]) -> None:
    """One rank: what a launcher would put into the environment, then the script's own `main`."""
    place = {
        "RANK": local_rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": processes,
        "LOCAL_WORLD_SIZE": processes,
    }
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in (place | meeting).items()}
    sys.exit(importlib.import_module(script).main(argv))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> int:
    parser = argparse.ArgumentParser(description="A training without a launcher.")
    parser.add_argument("--processes", type=int, default=2, metavar="N")
    parser.add_argument("script", choices=("train_pretrain.py", "train_pretrain_accelerate.py"))
    parser.add_argument("options", nargs=argparse.REMAINDER, help="the script's own")
    chosen = parser.parse_args()
    if chosen.processes < 1:
        parser.error(f"--processes: expected 1 or more, found {chosen.processes}")
    arguments = (chosen.processes, free_port(), chosen.script.removesuffix(".py"), chosen.options)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # waiting threads leave the cores to others
    workers = spawn(worker, args=arguments, nprocs=chosen.processes, join=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the workers by itself: they save and leave
    try:
        while workers and not workers.join():
            pass
    except ProcessExitedException as ended:
        return ended.exit_code
    return 0


if __name__ == "__main__":  # the workers import this file too
    sys.exit(main())
