"""The runs of a ladder: per size a stable run (constant learning rate), and decays from its checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llm_pretrain.config.distributed_config import DistributedConfig
from llm_pretrain.config.tree import Config, SourceConfig
from llm_pretrain.forecast.family import member
from llm_pretrain.forecast.points import RUNS_FOLDER, Ladder, Rung

_KEEP_ALL = 1000
"""More checkpoints than a run has (at its branches and at stops), so that it keeps all of them."""


@dataclass(frozen=True)
class LadderRun:
    """One training process of a ladder.

    Args:
        hidden_size: Hidden size of the model.
        begin: Step of the stable run's checkpoint at which a decay begins; 0 for a stable run.
        end: Last step.
    """

    hidden_size: int
    begin: int
    end: int

    @property
    def name(self) -> str:
        """Name of the run and its folder."""
        return f"{self.stable_name}-{self.end}" if self.begin else self.stable_name

    @property
    def stable_name(self) -> str:
        """Name of the stable run of this size."""
        return f"h{self.hidden_size}"

    def follows(self, run: LadderRun) -> bool:
        """Whether this is a decay that begins at a checkpoint of `run`."""
        return self.begin > 0 and self.stable_name == run.name

    @property
    def trained_steps(self) -> int:
        """Number of optimizer steps that this run itself trains."""
        return self.end - self.begin


def rung_runs(rung: Rung) -> list[LadderRun]:
    """The stable run of a size, then its decays."""
    stable = LadderRun(rung.hidden_size, 0, rung.branches[-1])
    pairs = zip(rung.branches, rung.steps, strict=True)
    return [stable, *(LadderRun(rung.hidden_size, begin, end) for begin, end in pairs)]


def ladder_runs(rungs: Sequence[Rung]) -> list[LadderRun]:
    """The runs of all sizes."""
    return [run for rung in rungs for run in rung_runs(rung)]


def run_folder(ladder: Ladder, run: LadderRun) -> Path:
    """Folder of a run."""
    return ladder.folder.resolve() / RUNS_FOLDER / run.name


def run_config(ladder: Ladder, run: LadderRun) -> Config:
    """The whole configuration of a run: the family's member with the run's schedule and length.

    Whatever affects a number of points.jsonl comes from the base or from ladder.json. The run keeps the
    checkpoints of all branches, and turns off trackers, samples and its report.
    """
    base = member(ladder.base, run.hidden_size)
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
    """Warm-up steps of a run of `steps` steps: at most a tenth; the base's warm-up is for longer runs."""
    return min(config.schedule.warmup_steps, steps // 10)


def with_store(config: Config, store: Path) -> Config:
    """The configuration with one store as its data."""
    data = dataclasses.replace(config.data, sources=[SourceConfig(str(store))], weight_changes=[])
    return dataclasses.replace(config, data=data)


def longest_first(costs: Mapping[LadderRun, float]) -> list[LadderRun]:
    """The runs by descending cost (seconds, say) of the run and of the costliest run that follows it."""

    def until_end(run: LadderRun) -> float:
        return costs[run] + max((costs[each] for each in costs if each.follows(run)), default=0.0)

    return sorted(costs, key=until_end, reverse=True)


def makespan(order: Sequence[LadderRun], costs: Mapping[LadderRun, float], slots: int) -> float:
    """Cost (seconds, say) until all runs have ended; a free slot takes the first run that can start."""
    waiting, running, now = list(order), list[tuple[float, LadderRun]](), 0.0
    while waiting or running:
        unfinished = [*waiting, *(run for _, run in running)]
        for run in [each for each in waiting if not any(map(each.follows, unfinished))]:
            if len(running) < slots:
                waiting.remove(run)
                running.append((now + costs[run], run))
        running.sort(key=lambda pair: pair[0])
        now, _ = running.pop(0)
    return now
