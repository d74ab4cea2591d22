"""Runs torchrun or `accelerate launch` for `llm-pretrain train`, and ends as their ranks do.

By themselves, both kill ranks that have not saved 30 s after a signal. They print a traceback for every exit
code but 0, and exit with 1.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import subprocess
import sys
from contextlib import suppress
from types import FrameType

import psutil

_LOST = 71
"""Exit code of a rank that lost another one, whose own code says more."""


def main() -> int:
    """Run the module named first on the command line with the other words; returns the exit code."""
    module, *sys.argv[1:] = sys.argv[1:]
    os.environ["PET_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # torchrun's --signals-to-handle, also under accelerate
    logging.disable(logging.ERROR)  # torchrun logs each rank that ends
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _forward)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # takes seconds

    try:
        importlib.import_module(module).main()
    except subprocess.CalledProcessError as error:  # of accelerate with a single process
        return _exit_code({0: error.returncode})
    except ChildFailedError as error:
        return _exit_code({failure.local_rank: failure.exitcode for failure in error.failures.values()})
    return 0


def _forward(number: int, frame: FrameType | None) -> None:
    """Hand a signal on to the ranks, which save and exit; without ranks, exit."""
    ranks = psutil.Process().children()
    if not ranks:
        sys.exit(128 + number)
    for rank in ranks:
        with suppress(psutil.Error):
            rank.send_signal(number)


def _exit_code(codes: dict[int, int]) -> int:
    for rank, code in codes.items():
        if code < 0:
            print(f"error: rank {rank} was ended by {signal.Signals(-code).name}", file=sys.stderr)
            return 128 - code
    return next((code for code in codes.values() if code != _LOST), _LOST)


if __name__ == "__main__":
    sys.exit(main())
