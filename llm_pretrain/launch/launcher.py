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
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

import psutil

_LOST = 71
"""Exit code of a rank that lost another one (or was out of memory); another rank's code says more."""


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
        return exit_code([(0, error.returncode, 0)])
    except ChildFailedError as error:
        failures = error.failures.values()
        return exit_code([(each.local_rank, each.exitcode, each.timestamp) for each in failures])
    return 0


def _forward(number: int, frame: FrameType | None) -> None:
    """Hand a signal on to the ranks, which save and exit; without ranks, exit."""
    ranks = psutil.Process().children()
    if not ranks:
        sys.exit(128 + number)
    for rank in ranks:
        with suppress(psutil.Error):
            rank.send_signal(number)


def exit_code(failures: Sequence[tuple[int, int, int]]) -> int:
    """A rank's own code, else that of the signal that ended one, else that of ranks that lost another one.

    Args:
        failures: Local rank, exit code, and second of the end. Of ranks that end later than the first one by
            more than a second the launcher has ended some.
    """
    first = min(second for _, _, second in failures)
    codes = {rank: code for rank, code, second in failures if second <= first + 1}
    if own := [code for code in codes.values() if code > 0 and code != _LOST]:
        return own[0]
    for rank, code in codes.items():
        if code < 0:
            print(f"error: rank {rank} was ended by {signal.Signals(-code).name}", file=sys.stderr)
            return 128 - code
    return _LOST


if __name__ == "__main__":
    sys.exit(main())
