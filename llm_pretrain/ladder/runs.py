"""The runs of a ladder: of each size one at a constant rate, and decays that begin at its checkpoints."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llm_pretrain.config import Config, DistributedConfig, SourceConfig
from llm_pretrain.ladder.family import member
from llm_pretrain.ladder.points import RUNS_FOLDER, Ladder, Rung

RANDOM_ORDERS = 60
"""That are tried beside the usual one, so that slots are idle for less time at the end."""
_KEEP_ALL = 1000
"""Checkpoints of a run; its branches, and those of stops, are far fewer."""


@dataclass(frozen=True)
class Run:
    """One training process of a ladder.

    Args:
        hidden_size: Of the model.
        factor: On the base's learning rates.
        begin: Step of the stable run's checkpoint that a decay begins at; 0 for a stable run.
        end: Last step.
    """

    hidden_size: int
    factor: float
    begin: int
    end: int

    @property
    def name(self) -> str:
        """Name of the run and its folder; a stable run that is continued keeps it."""
        return f"{self.stable_name}-{self.end}" if self.begin else self.stable_name

    @property
    def stable_name(self) -> str:
        """Name of its size's stable run at this rate."""
        return f"h{self.hidden_size}-x{self.factor:g}"

    @property
    def after(self) -> str | None:
        """Name of the stable run that a decay follows."""
        return self.stable_name if self.begin else None

    @property
    def trained_steps(self) -> int:
        """Optimizer steps of its own."""
        return self.end - self.begin


def check_runs(rung: Rung, factors: Iterable[float]) -> list[Run]:
    """The shortest training of a size at each factor on the learning rates."""
    begin, end = rung.branches[0], rung.steps[0]
    pairs = [
        (Run(rung.hidden_size, factor, 0, begin), Run(rung.hidden_size, factor, begin, end))
        for factor in factors
    ]
    return [run for pair in pairs for run in pair]


def rung_runs(rung: Rung, factor: float) -> list[Run]:
    """The stable run of a size, and its decays."""
    decays = zip(rung.branches, rung.steps, strict=True)
    stable = Run(rung.hidden_size, factor, 0, rung.branches[-1])
    return [stable, *(Run(rung.hidden_size, factor, begin, end) for begin, end in decays)]


def ladder_runs(rungs: Sequence[Rung], factor: float, checked: Iterable[float] = ()) -> list[Run]:
    """The runs of all sizes at a factor, and those of the check of others.

    Each name once: of a check and the stable run that continues it, the latter.
    """
    runs = [*check_runs(rungs[0], checked), *(run for rung in rungs for run in rung_runs(rung, factor))]
    return list({run.name: run for run in runs}.values())


def run_folder(ladder: Ladder, run: Run) -> Path:
    """Folder of a run."""
    return ladder.folder.resolve() / RUNS_FOLDER / run.name


def run_config(ladder: Ladder, run: Run) -> Config:
    """The whole configuration of a run: the family's member at the run's rate, schedule and length.

    Everything that decides a number of points.jsonl is the base's or in ladder.json; the run keeps every
    checkpoint at a branch, and draws, prints and exports as little as it can.
    """
    base = at_rate(member(ladder.base, run.hidden_size), run.factor)
    rung = next(each for each in ladder.rungs if each.hidden_size == run.hidden_size)
    stable = run_folder(ladder, run).with_name(run.stable_name)
    resume = str(stable / "checkpoints" / f"step-{run.begin:08d}") if run.begin else "auto"
    return dataclasses.replace(
        base,
        run=dataclasses.replace(base.run, name=run.name, output_dir=None),
        schedule=dataclasses.replace(
            base.schedule,
            name="wsd" if run.begin else "constant",
            warmup_steps=warmup_of(base, rung.steps[0]),
            decay_steps=run.trained_steps if run.begin else None,
        ),
        training=dataclasses.replace(base.training, max_steps=run.end),
        checkpoint=dataclasses.replace(
            base.checkpoint, save_steps=rung.save_steps, keep_last=_KEEP_ALL, keep_best=False, resume=resume
        ),
        evaluation=dataclasses.replace(
            base.evaluation,
            eval_steps=run.end if run.begin else rung.save_steps,
            sample_prompts=[],
            prediction=[],
        ),
        logging=dataclasses.replace(
            base.logging, wandb_mode="disabled", tensorboard=False, report=False, parameters_sha256=False
        ),
        distributed=DistributedConfig(
            cpu_threads=ladder.threads, timeout_seconds=base.distributed.timeout_seconds
        ),
    )


def warmup_of(config: Config, steps: int) -> int:
    """Steps of warm-up of a run of `steps` steps: at most a tenth, since the base's is for longer runs."""
    return min(config.schedule.warmup_steps, steps // 10)


def at_rate(config: Config, factor: float) -> Config:
    """The configuration with its learning rates times a factor."""
    optimizer, schedule = config.optimizer, config.schedule
    optimizer = dataclasses.replace(
        optimizer,
        learning_rate=optimizer.learning_rate * factor,
        muon_learning_rate=optimizer.muon_learning_rate * factor,
    )
    schedule = dataclasses.replace(schedule, min_learning_rate=schedule.min_learning_rate * factor)
    return dataclasses.replace(config, optimizer=optimizer, schedule=schedule)


def with_store(config: Config, store: Path) -> Config:
    """The configuration with one store as its data."""
    data = dataclasses.replace(config.data, sources=[SourceConfig(str(store))], weight_changes=[])
    return dataclasses.replace(config, data=data)


def best_order(
    waiting: Sequence[Run], costs: Mapping[str, float], slots: int, running: Sequence[Run] = ()
) -> tuple[list[Run], float]:
    """(order, cost until all runs have ended): the best of the longest way to the end first and
    `RANDOM_ORDERS` random ones.

    Args:
        waiting: Not begun.
        costs: Of each run that waits or runs, by name, such as its seconds.
        slots: Runs side by side.
        running: In slots already.
    """
    following: dict[str, float] = {}
    for run in waiting:
        if run.after:
            following[run.after] = max(following.get(run.after, 0.0), costs[run.name])
    longest_first = sorted(waiting, key=lambda run: -(costs[run.name] + following.get(run.name, 0.0)))
    others = (random.Random(seed).sample(longest_first, len(waiting)) for seed in range(RANDOM_ORDERS))
    orders = [longest_first, *others]
    spans = [makespan([*running, *order], costs, slots) for order in orders]
    best = spans.index(min(spans))
    return orders[best], spans[best]


def makespan(order: Sequence[Run], costs: Mapping[str, float], slots: int) -> float:
    """Cost until all runs have ended: a free slot takes the first that need not wait for another."""
    waiting, running, now = list(order), list[tuple[float, str]](), 0.0
    unfinished = {run.name for run in order}
    while waiting or running:
        for run in list(waiting):
            if len(running) < slots and run.after not in unfinished:
                waiting.remove(run)
                running.append((now + costs[run.name], run.name))
        running.sort()
        now, name = running.pop(0)
        unfinished.discard(name)
    return now
