"""Folders with copies of the two scripts, and of the package where needed, with one known mistake each."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from support.mutation import PACKAGE, ROOT, Edit, edited
from support.rank_plan import ACCELERATE, OBJECTIVE, PREPARED_SCHEDULE, SHARDED_TWICE, TORCHRUN


@dataclass(frozen=True)
class Mistake:
    """An edit of the scripts or the package, and what must notice it.

    Args:
        edits: The mistake.
        options: Of `parity`: the cheapest cells that show it.
        cell: The cell that is wrong.
        step, key: Where it is seen first.
    """

    edits: tuple[Edit, ...]
    options: tuple[str, ...]
    cell: str
    step: int
    key: str


ONE_PROCESS = ("--world-size", "1")
TWO_PROCESSES = ("--world-size", "2")
_OBJECTIVE = "loss = self.objective(output, counts.num_loss_tokens)\n"
_STEP = "self.optimizer.step()  # with a scaler: its step and its update"

MISTAKES = {
    "divided twice": Mistake(
        (Edit(ACCELERATE, _OBJECTIVE, _OBJECTIVE.rstrip() + " / len(micro_batches)\n"),),
        ONE_PROCESS,
        *("accelerate W=1 A=6 fp32", 1, "train/grad_norm"),
    ),
    "a gate of one's own": Mistake(
        (
            Edit(
                ACCELERATE,
                "if not result.skipped:\n",
                "if not result.skipped and (batch.step + 1) % len(micro_batches) == 0:\n",
            ),
        ),
        ONE_PROCESS,
        *("accelerate W=1 A=6 fp32", 1, "train/parameters_sha256"),
    ),
    "sharded twice": Mistake(
        SHARDED_TWICE, TWO_PROCESSES, *("accelerate W=2 A=3 fp32", 1, "data/batch_sha256")
    ),
    "a prepared scheduler": Mistake(
        (
            PREPARED_SCHEDULE[0],
            Edit(
                ACCELERATE,
                _STEP,
                "self.optimizer.param_groups[0]['lr'] = self.schedule.get_last_lr()[0]\n"
                "                        self.optimizer.step()\n"
                "                        self.schedule.step()",
            ),
        ),
        TWO_PROCESSES,
        *("accelerate W=2 A=3 fp32", 2, "train/parameters_sha256"),
    ),
    "counts that are not summed": Mistake(
        (Edit(OBJECTIVE, "= sum_integers(whole)", "= whole[0], *sum_integers(whole)[1:]"),),
        ("--paths", "torchrun", "--world-size", "1,2"),
        *("torchrun W=2 A=3 fp32", 1, "train/loss_tokens"),
    ),
}


def write_scripts(folder: Path, edits: Sequence[Edit] = ()) -> Path:
    """Copies of both scripts with their edits, and of the package where one is about it; returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for script in (TORCHRUN, ACCELERATE):
        (folder / script).write_text(edited(script, edits))
    in_package = {edit.file for edit in edits if edit.file.startswith(PACKAGE)}
    if in_package:
        shutil.copytree(ROOT / PACKAGE, folder / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    for file in in_package:
        (folder / file).write_text(edited(file, edits))
    return folder
