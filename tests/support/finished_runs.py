"""Six finished runs, made once for all test processes on forked ranks. Tests read them, and change copies."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from support.launching import Finished, launch, run_options

SETTINGS = (
    "model.hidden_size=32 training.max_steps=4 training.global_batch_size=8 schedule.warmup_steps=1 "
    "checkpoint.save_steps=2 evaluation.eval_steps=2 evaluation.max_batches=1 "
)


class Recipe(NamedTuple):
    preset: str = "tiny-moe"
    settings: str = ""
    launcher: str = "torchrun"
    world_size: int = 1
    masked: bool = False


RECIPES = {
    "dense": Recipe("tiny-dense"),
    "mixture": Recipe(),
    "accelerate": Recipe(launcher="accelerate"),
    "fsdp": Recipe(settings="distributed.strategy=fsdp", world_size=2),
    "muon": Recipe(settings="optimizer.name=muon optimizer.ema_decay=0.5"),
    "masked": Recipe(masked=True),
}
"""`muon` averages its weights; `masked` has ragged loss masks."""


@dataclass
class FinishedRun(Finished):
    """Four steps: a row of each, checkpoints and weights of steps 2 and 4, an evaluation at both."""

    options: list[str]
    """Without the run's folder: a copy continues with them and more steps."""

    def copy(self, folder: Path) -> FinishedRun:
        """A copy at `folder`, to be changed or continued."""
        shutil.copytree(self.folder, folder)
        return FinishedRun(self.exit_code, self.output, folder, self.options)


def finish_run(recipe: Recipe, store: Path, folder: Path) -> FinishedRun:
    """Train by the recipe, into `folder`."""
    options = run_options(recipe.preset, store, SETTINGS + recipe.settings)
    ended = launch(recipe.launcher, recipe.world_size, folder, options)
    return FinishedRun(ended.exit_code, ended.output, folder, options)
