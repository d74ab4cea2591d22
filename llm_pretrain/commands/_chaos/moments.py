"""When and how a run is killed: drawn from a seed before it starts, and aimed where each attempt begins.

Pure: the same seed gives the same deaths. Nothing is started, looked at or killed here.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from llm_pretrain.errors import ConfigError

KINDS = ("group", "rank", "launcher", "term")
"""SIGKILL of launcher and workers at once, of one worker, of the launcher alone; SIGTERM to the launcher."""
STOPPING = ("launcher", "term")
"""After these the workers are told to stop: they save, and leave."""
WITHOUT_PROGRESS = 2
"""So many attempts in a row may be killed before they commit anything, but no more."""


@dataclass(frozen=True)
class Kind:
    """A way to die; `rank` says which worker, None a drawn one."""

    name: str
    rank: int | None = None


@dataclass(frozen=True)
class Kill:
    """One death as drawn.

    Args:
        number: From 1 on.
        path: Launcher of the attempt.
        kind: Of `KINDS`.
        rank: The worker that dies, for kind `rank`.
        where: `start-up`, `step`, `save` or `evaluation`.
        commits: Whether the attempt is to commit a checkpoint first.
        place: In [0, 1), chooses among the steps.
        delay: In [0, 1), share of the start-up, step, save or evaluation that passes before it.
    """

    number: int
    path: str
    kind: str
    rank: int | None
    where: str
    commits: bool
    place: float
    delay: float

    @property
    def progresses(self) -> bool:
        """Whether the next attempt begins further on: workers that are told to stop save where they are."""
        return self.commits or (self.kind in STOPPING and self.where != "start-up")


@dataclass(frozen=True)
class Target:
    """A death aimed: `step` is that of the row waited for, or of the save or evaluation hit."""

    where: str
    step: int = 0

    def __str__(self) -> str:
        if self.where == "start-up":
            return self.where
        return f"after step {self.step}" if self.where == "step" else f"{self.where} of step {self.step}"


def parse_kinds(text: str, world_size: int) -> list[Kind]:
    """`group,rank,rank:1` as kinds.

    Raises:
        ConfigError: an unknown one, or a rank that the run does not have.
    """
    kinds = []
    for word in text.split(","):
        match = re.fullmatch(r"(\w+)(?::(\d+))?", word.strip())
        if match is None or match[1] not in KINDS or (match[2] and match[1] != "rank"):
            raise ConfigError(
                f"--kinds: expected some of {', '.join(KINDS)} (rank:1 for that rank), found {word.strip()!r}"
            )
        rank = int(match[2]) if match[2] else None
        if rank is not None and rank >= world_size:
            raise ConfigError(f"--kinds: expected ranks below the world size {world_size}, found {rank}")
        kinds.append(Kind(match[1], rank))
    return list(dict.fromkeys(kinds))


def draw_kills(
    count: int,
    seed: int,
    *,
    paths: Sequence[str],
    kinds: Sequence[Kind],
    in_save: int,
    world_size: int,
    evaluates: bool,
) -> list[Kill]:
    """All deaths of a run: kinds in equal shares, launchers in turn, half of them after a new checkpoint.

    Args:
        count: Deaths.
        seed: Of everything drawn.
        paths: Launchers, in their order.
        kinds: Ways to die.
        in_save: So many fall into a save.
        world_size: Processes; a rank is drawn among them.
        evaluates: Whether there are evaluations to fall into.
    """
    draw = random.Random(seed)
    shares = [kinds[number % len(kinds)] for number in range(count)]
    draw.shuffle(shares)
    saves = set(draw.sample(range(count), in_save))
    commits = _commits(count, draw)
    kills = []
    for number in range(count):
        kind, where = shares[number], "save"
        if number not in saves:
            places = ["step", "step", "evaluation"] if evaluates else ["step"]
            where = draw.choice(places if commits[number] else [*places, "start-up"])
        rank = kind.rank if kind.rank is not None else draw.randrange(world_size)
        kills.append(
            Kill(
                number + 1, paths[number % len(paths)], kind.name, rank if kind.name == "rank" else None,
                where, commits[number], draw.random(), draw.random(),
            )
        )  # fmt: skip
    return kills


def _commits(count: int, draw: random.Random) -> list[bool]:
    """Which attempts commit something: half of them, and never more than `WITHOUT_PROGRESS` idle in a row."""
    half = (count + 1) // 2
    chosen = [True] * half + [False] * (count - half)
    draw.shuffle(chosen)
    idle = 0
    for number, commits in enumerate(chosen):
        idle = 0 if commits else idle + 1
        if idle > WITHOUT_PROGRESS:
            chosen[number], idle = True, 0
    return chosen


def least_saves(kills: Sequence[Kill]) -> int:
    """Saves that a run must have for every death to find its place: one each that goes on, and the last."""
    return sum(kill.progresses for kill in kills) + 1


def aim(
    kill: Kill, *, checkpoint: int, steps: int, save_steps: int, eval_steps: int, going_on: int
) -> Target:
    """Where in an attempt its death falls.

    Args:
        kill: As drawn.
        checkpoint: Step that the attempt goes on from.
        steps, save_steps, eval_steps: The run's.
        going_on: Later deaths after which the run is further on; as many saves are left to them.
    """
    if checkpoint >= steps - 1:  # stop signals have brought it here sooner than was drawn
        return Target("start-up")
    ahead = [step for step in range(save_steps, steps, save_steps) if step > checkpoint]
    new = 0
    if kill.commits and ahead:
        spare = max(0, len(ahead) - 1 - going_on)
        new = 1 + int(kill.place * (spare // (going_on + 1) + 1))
    last = ahead[new - 1] if new else checkpoint
    following = ahead[new] if new < len(ahead) else steps
    if kill.where == "save":  # the last save only where there is no other: after it the run is done
        return Target("save", ahead[-1] if following == steps and ahead else following)
    if kill.where == "evaluation":
        first = last + 2  # the row before it must be this attempt's
        found = [s for s in range(first, min(following, steps - 1) + 1) if eval_steps and s % eval_steps == 0]
        if found:
            return Target("evaluation", found[int(kill.place * len(found))])
    rows = range(last + 1, following)
    if kill.where == "start-up" or not rows:
        return Target("start-up")
    return Target("step", rows[int(kill.place * len(rows))])
