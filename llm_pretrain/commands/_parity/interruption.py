"""A run that is killed and continued by other launchers and on other numbers of processes, as asked for.

It says where each attempt began; what its rows must be is the contract's business.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llm_pretrain.commands._launching.launching import (
    POLL_SECONDS,
    Job,
    Launched,
    Place,
    killed_at_the_end,
)
from llm_pretrain.commands._launching.records import newest_checkpoint, row_steps
from llm_pretrain.errors import ConfigError

_PATHS = ("torchrun", "accelerate")
"""Those whose checkpoints the other continues."""


@dataclass(frozen=True)
class Interruption:
    """The run is killed once the row of `step` is written; `path` continues it on `world_size` processes."""

    path: str
    world_size: int
    step: int


@dataclass(frozen=True)
class Attempt:
    """One start of an interrupted run.

    Args:
        path, world_size: Who ran it.
        checkpoint: Step of the newest committed checkpoint when it was started; 0 where there was none.
        first_step, last_step: Of the rows that it wrote; None where it wrote none.
        killed: Whether it was killed, as planned.
    """

    path: str
    world_size: int
    checkpoint: int
    first_step: int | None
    last_step: int | None
    killed: bool

    @property
    def wrong_start(self) -> str:
        """How its start breaks the promise; empty where it does not."""
        if self.first_step == self.checkpoint + 1:
            return ""
        found = "wrote no row" if self.first_step is None else f"began at step {self.first_step}"
        return (
            f"{self.path} W={self.world_size} {found}, expected {self.checkpoint + 1} after the checkpoint "
            f"of step {self.checkpoint}"
        )


class LaunchError(Exception):
    """An attempt ended otherwise than planned."""


def parse_interruptions(text: str) -> list[Interruption]:
    """`torchrun@2:17,accelerate@1:31` as interruptions.

    Raises:
        ConfigError: another form, an unknown path, or steps that do not ascend.
    """
    interruptions = []
    for word in text.split(","):
        match = re.fullmatch(r"(\w+)@(\d+):(\d+)", word.strip())
        if match is None or match[1] not in _PATHS:
            raise ConfigError(
                f"--interrupt: expected PATH@PROCESSES:STEP,… with a path of {', '.join(_PATHS)}, "
                f"found {word.strip()!r}; e.g. torchrun@2:17,accelerate@1:31"
            )
        interruptions.append(Interruption(match[1], int(match[2]), int(match[3])))
    steps = [each.step for each in interruptions]
    if min(steps) < 2 or steps != sorted(set(steps)):
        raise ConfigError(
            f"--interrupt: expected ascending steps from 2 on, since a checkpoint must come before each, "
            f"found {', '.join(map(str, steps))}"
        )
    if any(each.world_size < 1 for each in interruptions):
        raise ConfigError("--interrupt: expected one process or more after each @, found 0")
    return interruptions


def choose_save_steps(configured: int, first_kill: int) -> int:
    """Steps between checkpoints: the configuration's where one lies before the first kill, else fewer."""
    return configured if 0 < configured < first_kill else max(1, min(5, first_kill // 2))


def run_interrupted(
    jobs: Sequence[Job], kills: Sequence[int], place: Place, say: Callable[[str], None]
) -> list[Attempt]:
    """Run the attempts one after another, each but the last killed once its step's row is written.

    Args:
        jobs: One per attempt, all with the same folder and log.
        kills: Steps, one less than jobs.
        place: Where.
        say: Takes a line of progress.

    Raises:
        LaunchError: an attempt failed, or was done before it could be killed.
    """
    attempts: list[Attempt] = []
    for number, job in enumerate(jobs):
        kill = kills[number] if number < len(kills) else None
        checkpoint, before = newest_checkpoint(job.folder), len(row_steps(job.folder))
        with killed_at_the_end(Launched(job, place)) as launched:
            _wait(launched, kill)
        steps = row_steps(job.folder)[before:]
        ends = (steps[0], steps[-1]) if steps else (None, None)
        attempts.append(Attempt(job.path, job.world_size, checkpoint, *ends, killed=kill is not None))
        how = f"killed after step {ends[1]}" if kill is not None else "to its end"
        say(f"attempt {number + 1} of {len(jobs)}: {job.path} W={job.world_size}, from step {ends[0]}, {how}")
    return attempts


def _wait(launched: Launched, kill: int | None) -> None:
    """Until the step's row is there, and kill then; or until the run's end."""
    metrics, known = launched.job.folder / "metrics.jsonl", False
    wanted = f'{{"step": {kill},'.encode()
    offset = metrics.stat().st_size if metrics.exists() else 0
    while (code := launched.exit_code) is None:
        if kill is not None and metrics.exists():
            with metrics.open("rb") as file:
                file.seek(offset)
                written = file.read()
            if written and not known:
                launched.remember_members()
                known = True
            if wanted in written:
                launched.kill()
                return
        time.sleep(POLL_SECONDS / 4)
    who = f"{launched.job.path} W={launched.job.world_size}"
    if launched.timed_out:
        raise LaunchError(f"{who} had no end within the time limit")
    if code != 0:
        raise LaunchError(f"{who} ended with exit code {code}")
    if kill is not None:
        raise LaunchError(f"{who} was done before it could be killed after step {kill}; ask for more --steps")
