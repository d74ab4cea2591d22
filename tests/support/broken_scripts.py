"""Folders with the two scripts, one known mistake put into one of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import faults
from support.engines import SCRIPTS, engine_class
from support.faults import Fault, Patch

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Mistake:
    """A fault of one script, and what must notice it.

    Args:
        launcher: Whose script.
        fault: The mistake.
        options: Of `parity`: the cheapest cells that show it.
        cell: The cell that is wrong.
        step, key: Where it is seen first.
    """

    launcher: str
    fault: Fault
    options: tuple[str, ...]
    cell: str
    step: int
    key: str


def _own_tokens(original: Any, self: Any, values: list[int]) -> list[int]:
    return [values[0], *original(self, values)[1:]]


ONE_PROCESS = ("--world-size", "1")
TWO_PROCESSES = ("--world-size", "2")
MISTAKES = {
    "divided twice": Mistake(
        "accelerate", faults.DIVIDED_TWICE, ONE_PROCESS, "accelerate W=1 A=6 fp32", 1, "train/grad_norm"
    ),
    "a gate of one's own": Mistake(
        "accelerate", faults.OWN_GATE, ONE_PROCESS, "accelerate W=1 A=6 fp32", 1, "train/parameters_sha256"
    ),
    "sharded twice": Mistake(
        "accelerate", faults.SHARDED_TWICE, TWO_PROCESSES, "accelerate W=2 A=3 fp32", 1, "data/batch_sha256"
    ),
    "a prepared scheduler": Mistake(
        "accelerate",
        faults.PREPARED_SCHEDULE,
        TWO_PROCESSES,
        "accelerate W=2 A=3 fp32",
        2,
        "train/parameters_sha256",
    ),
    "counts that are not summed": Mistake(
        "torchrun",
        faults.around("sum_integers", _own_tokens),
        ("--paths", "torchrun", "--world-size", "1,2"),
        "torchrun W=2 A=3 fp32",
        1,
        "train/loss_tokens",
    ),
}

_SCRIPT = """import sys

sys.path[:0] = [{root!r}, {tests!r}]
import {script} as script
from support.fork_server import resolve

main, exit_process = script.main, script.exit_process
if __name__ == "__main__":
    for target, arguments in {before!r}:
        resolve(target)(*arguments)
    exit_process(main())
"""


def write_scripts(folder: Path, *before: tuple[str, list[Any]], launcher: str | None = None) -> Path:
    """Both scripts, written into `folder`, which is returned.

    `before` (`module:function`, arguments) is called first in that of `launcher`, or in both.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for own, script in SCRIPTS.items():
        calls = list(before) if launcher in (None, own) else []
        text = _SCRIPT.format(root=str(ROOT), tests=str(ROOT / "tests"), script=script, before=calls)
        (folder / f"{script}.py").write_text(text)
    return folder


def write_mistake(folder: Path, name: str) -> Path:
    """Both scripts with a mistake of `MISTAKES`."""
    call = ("support.broken_scripts:put_in", [name])
    return write_scripts(folder, call, launcher=MISTAKES[name].launcher)


def put_in(name: str) -> None:
    """Put a mistake into this process for good."""
    mistake = MISTAKES[name]
    mistake.fault(Patch(), engine_class(mistake.launcher))
