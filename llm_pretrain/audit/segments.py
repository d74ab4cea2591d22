"""What a replay launches: segments of a run between kept checkpoints, each launched as in the run."""

from __future__ import annotations

import dataclasses
import random
import secrets
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from llm_pretrain.checkpoints.folders import committed_folders
from llm_pretrain.checkpoints.manifest import StartPoint, read_manifest
from llm_pretrain.checkpoints.opening import is_checkpoint
from llm_pretrain.config.loading import dump_yaml, load_config, resolve_model
from llm_pretrain.config.tree import Config
from llm_pretrain.data.loader import open_stores
from llm_pretrain.errors import ConfigError, PretrainError
from llm_pretrain.hardware import environment
from llm_pretrain.launch.jobs import Machine
from llm_pretrain.launch.options import LaunchPlan, choose_output, find_scripts
from llm_pretrain.runs.attempts import Attempt, owner_of, read_attempts, row_starts
from llm_pretrain.runs.rows import Row, read_metrics
from llm_pretrain.runs.status import read_status
from llm_pretrain.training.progress import Progress


@dataclass(frozen=True)
class Leg:
    """Steps of a segment that one launch executes again.

    Args:
        first, last: First and last step.
        attempt: The run's attempt that trained these steps, or the first of several with equal launches.
        path, world_size: How the leg is launched.
        config: Settings of the leg, without those that depend on the segment.
    """

    first: int
    last: int
    attempt: Attempt
    path: str
    world_size: int
    config: Config

    def __str__(self) -> str:
        strategy = self.config.distributed.strategy
        return f"{self.path} W={self.world_size}{'' if strategy == 'ddp' else f' {strategy}'}"


@dataclass(frozen=True)
class Segment:
    """Steps between two states of the run.

    Args:
        start: Number of steps done before the segment.
        end: Last step.
        source: The checkpoint of step `start`; None for the initial values.
        target: The checkpoint of step `end`; None if it is not kept, and only rows are compared.
        legs: In order; empty if the segment cannot be replayed.
        missing: Why the segment cannot be replayed.
        started_from: `source` as the run's manifests name it, if the run started from it at step 0.
    """

    start: int
    end: int
    source: Path | None
    target: Path | None
    legs: tuple[Leg, ...] = ()
    missing: str = ""
    started_from: StartPoint | None = None

    @property
    def name(self) -> str:
        """Name of the segment's folder."""
        return f"steps-{self.start + 1}-{self.end}"

    def __str__(self) -> str:
        return f"steps {self.start + 1}-{self.end}"


@dataclass(kw_only=True)
class ReplayPlan(LaunchPlan):
    """The plan of a `llm-pretrain replay` call, with its options checked.

    Args:
        run: The run's folder, which is only read.
        attempts: All starts of the run.
        segments: Segments to replay, in order.
        of: Number of segments from which they were chosen.
        seed: Seed of the choice of segments; None if all are replayed.
    """

    run: Path
    attempts: list[Attempt]
    segments: list[Segment]
    of: int
    seed: int | None

    def rows(self, segment: Segment) -> dict[int, Row]:
        """The run's rows of a segment, by step, without lost work."""
        return rows_of_segment(self.run / "metrics.jsonl", segment, row_starts(self.attempts))


def make_plan(arguments: Namespace, machine: Machine) -> ReplayPlan:
    """Check the options of a call and plan its launches. Nothing is written.

    Raises:
        PretrainError: the folder is not a run's, no step can be replayed, or an option is wrong.
    """
    run: Path = arguments.run
    attempts, notes = read_attempts(run), list[str]()
    last = last_step(run, attempts)
    if last == attempts[0].start:
        raise ConfigError(f"{run}: expected steps that were trained, found none after step {last}")
    first, last, found = _choose_range(arguments, last)
    notes += found
    segments = make_segments(run, attempts, first, last)
    begin = segments[0].start
    if begin < first:
        notes.append(f"--from {first}: from step {begin}, the nearest earlier state that is kept")
    if begin > first:
        notes.append(f"the steps up to {begin} are another run's")
    known: dict[int, Config] = {}
    segments = [_with_legs(each, attempts, arguments, known) for each in segments]
    total, seed = len(segments), None
    if arguments.sample is not None:
        seed = secrets.randbelow(1 << 32) if arguments.seed is None else arguments.seed
        segments = choose_segments(segments, arguments.sample, seed)
        notes.append(f"{len(segments)} of {total} segments, picked with --seed {seed}")
    legs = [leg for segment in segments for leg in segment.legs]
    if arguments.output and Path(arguments.output).resolve().is_relative_to(run.resolve()):
        raise ConfigError(
            f"--output {arguments.output}: expected a folder outside of the run, found one in it"
        )
    if not legs:
        raise ConfigError(f"{run}: expected steps that can be replayed, found none: {segments[0].missing}")
    _check_launches(legs, machine)
    notes += _revisions(legs)
    config = legs[-1].config
    return ReplayPlan(
        config=config,
        steps=sum(each.end - each.start for each in segments if each.legs),
        options=[],
        scripts=find_scripts(sorted({leg.path for leg in legs})),
        output=choose_output(arguments.output, f"replay-{config.run.name}"),
        threads=config.distributed.cpu_threads or 1,
        notes=notes,
        run=run,
        attempts=attempts,
        segments=segments,
        of=total,
        seed=seed,
    )


def rows_of_segment(file: Path, segment: Segment, starts: Sequence[tuple[int, int]] = ()) -> dict[int, Row]:
    """Rows of a segment's steps in a metrics file, by step; at the run's start also the row of step 0.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    first = segment.start + 1 if segment.start else 0

    def keep(row: Row) -> Row:  # `moe/load` of a long run would fill the memory
        if not first <= row["step"] <= segment.end:
            return {"step": row["step"]}
        # which steps are checked depends on where checkpoints are due, and a transient fault does not repeat
        return {name: value for name, value in row.items() if name != "train/check"}

    rows = read_metrics(file, convert=keep, starts=starts)
    return {row["step"]: row for row in rows if first <= row["step"] <= segment.end}


def last_step(run: Path, attempts: Sequence[Attempt]) -> int:
    """The last step that has a row or a checkpoint, without lost work."""
    rows = read_metrics(
        run / "metrics.jsonl", convert=lambda row: {"step": row["step"]}, starts=row_starts(attempts)
    )
    newest = attempts[-1]
    last = max([newest.start, *(row["step"] for row in rows)])
    every = newest.config.logging.logging_steps if newest.config else 1
    due = (last // every + 1) * every  # a checkpoint from this step on would be lost work
    if read_status(run / "status.json").get("state") == "finished" and newest.config:
        due = max(due, newest.config.training.max_steps + 1)
    kept = [step for step in committed_folders(run / "checkpoints") if step < due]
    return max([last, *kept])


def _choose_range(arguments: Namespace, last: int) -> tuple[int, int, list[str]]:
    """First and last step as asked for, and notes."""
    problems, notes = [], []
    begin = 0 if arguments.start is None else arguments.start
    end = last if arguments.end is None else arguments.end
    if begin < 0 or begin >= last:
        problems.append(f"--from: expected steps done before, 0 to {last - 1}, found {begin}")
    elif end <= begin:
        problems.append(f"--to: expected a step from {begin + 1} on, found {end}")
    if end > last:
        notes.append(f"--to {end}: to step {last}, the last that the run has")
        end = last
    if arguments.sample is not None and arguments.sample < 1:
        problems.append(f"--sample: expected 1 or more segments, found {arguments.sample}")
    if arguments.seed is not None and arguments.sample is None:
        problems.append("--seed: expected together with --sample")
    problems += [
        f"{name}: expected none but --checkpoint.resume, since replay chooses what is saved"
        for name in dict.fromkeys(arguments.settings[::2])
        if name.startswith("--checkpoint.") and name != "--checkpoint.resume"
    ]
    if arguments.seed is not None and arguments.seed < 0:
        problems.append(f"--seed: expected 0 or more, found {arguments.seed}")
    if problems:
        raise ConfigError(*problems)
    return begin, end, notes


def make_segments(run: Path, attempts: Sequence[Attempt], first: int, last: int) -> list[Segment]:
    """The segments from the nearest state before `first` to `last`, in order.

    A state is a kept checkpoint or the run's beginning. The last segment has no target if the checkpoint of
    `last` is not kept. The first segment has no source if it begins with the run's initial values.
    """
    origin, kept = attempts[0], committed_folders(run / "checkpoints")
    resume = origin.config.checkpoint.resume if origin.config else ""
    started = None if origin.start else _started_from(attempts, kept)
    sources = {origin.start: Path(started.path if started else resume) if started or origin.start else None}
    sources |= {step: path for step, path in kept.items() if step >= origin.start and _has_manifest(path)}
    begin = max((step for step in sources if step <= first), default=origin.start)
    ends = [step for step in kept if begin < step <= last]
    if not ends or ends[-1] < last:
        ends.append(last)
    segments = []
    for end in ends:
        start = max(step for step in sources if step < end)
        started_from = None if start else started
        segments.append(Segment(start, end, sources[start], kept.get(end), started_from=started_from))
    return segments


def _started_from(attempts: Sequence[Attempt], kept: Mapping[int, Path]) -> StartPoint | None:
    """What the run started from at step 0: by its newest manifest, else by its settings, without a digest."""
    for path in reversed([*kept.values()]):
        if _has_manifest(path):
            return Progress.resumed(read_manifest(path).run, path).started_from
    config = owner_of(1, attempts).config
    source = config and config.checkpoint.start_from
    return StartPoint(source, "unknown") if source else None


def _has_manifest(path: Path) -> bool:
    try:
        return read_manifest(path).run.step >= 0
    except PretrainError:
        return False


def choose_segments(segments: Sequence[Segment], count: int, seed: int) -> list[Segment]:
    """`count` segments, drawn at random with `seed`, in their order."""
    numbers = random.Random(seed).sample(range(len(segments)), min(count, len(segments)))
    return [segments[number] for number in sorted(numbers)]


def _with_legs(
    segment: Segment, attempts: Sequence[Attempt], arguments: Namespace, known: dict[int, Config]
) -> Segment:
    """The segment with its legs: one for each stretch of equal settings, launcher and number of processes.

    `known` caches the settings of each attempt by the attempt's number.
    """
    given = dict(zip(arguments.settings[::2], arguments.settings[1::2], strict=True))
    elsewhere = given.get("--checkpoint.resume")
    if elsewhere and segment.source is not None and segment.start == attempts[0].start:
        segment = dataclasses.replace(segment, source=Path(elsewhere))
    if segment.source is not None and not is_checkpoint(segment.source):
        missing = (
            f"it begins from another run's checkpoint, {segment.source}, which is not there; name it by "
            "--checkpoint.resume"
        )
        return dataclasses.replace(segment, missing=missing)
    if segment.started_from and (missing := segment.started_from.difference(segment.source or Path())):
        return dataclasses.replace(segment, missing=missing)
    starts = {each.start for each in attempts if segment.start < each.start < segment.end}
    cuts = [segment.start, *sorted(starts), segment.end]
    legs: list[Leg] = []
    for begin, end in pairwise(cuts):
        attempt = owner_of(end, attempts)
        if attempt.config is None:
            missing = f"the settings of attempt {attempt.number} are not on record"
            return dataclasses.replace(segment, missing=missing)
        path, size = arguments.launcher or attempt.path, arguments.world_size or attempt.world_size
        if attempt.number not in known:
            known[attempt.number] = replayed_config(attempt, size, arguments.settings)
        config = known[attempt.number]
        leg = Leg(begin + 1, end, attempt, path, size, config)
        if legs and (path, size, config) == (legs[-1].path, legs[-1].world_size, legs[-1].config):
            legs[-1] = dataclasses.replace(legs[-1], last=end)
        else:
            legs.append(leg)
    return dataclasses.replace(segment, legs=tuple(legs))


def replayed_config(attempt: Attempt, world_size: int, settings: Sequence[str]) -> Config:
    """An attempt's settings, overridden by `settings`; what does not change the training is turned off.

    Raises:
        ConfigError: settings contradict each other, for example with another number of processes.
        DataError: a store cannot be opened.
    """
    config, threads = attempt.config, attempt.environment.get("cpu_threads")
    assert config is not None
    resumes = config.checkpoint
    config = dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, output_dir=None),
        checkpoint=dataclasses.replace(
            resumes, resume="auto", start_from=None, keep_best=False, async_save=False, keep_last=_KEEP_ALL
        ),
        evaluation=dataclasses.replace(config.evaluation, sample_prompts=[]),
        logging=dataclasses.replace(config.logging, report=False, tensorboard=False, wandb_mode="disabled"),
    )
    if threads and threads.isdecimal():  # another number of threads would sum in another order
        distributed = dataclasses.replace(config.distributed, cpu_threads=int(threads))
        config = dataclasses.replace(config, distributed=distributed)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(dump_yaml(config))
        given = load_config(["--config", str(file), *settings], world_size=world_size)
    given = dataclasses.replace(given, checkpoint=config.checkpoint)
    sources = given.data.sources
    if len(sources) == len(config.data.sources):  # a moved store may have another name
        labels = [each.label for each in config.data.sources]
        named = [
            each if each.name or each.label == label else dataclasses.replace(each, name=label)
            for each, label in zip(sources, labels, strict=True)
        ]
        given = dataclasses.replace(given, data=dataclasses.replace(given.data, sources=named))
    return resolve_model(given, open_stores(given)[0].vocab_size)


_KEEP_ALL = 1 << 20


def _revisions(legs: Sequence[Leg]) -> list[str]:
    """A note for each other revision of this package that trained a leg: it may compute other bits."""
    here = environment(torch.device("cpu"))["git_revision"]
    trained = dict.fromkeys(leg.attempt.environment.get("git_revision") for leg in legs)

    def name(revision: str | None) -> str:
        return f"revision {revision}" if revision else "an installed package"

    return [f"trained by {name(each)}, replayed by {name(here)}" for each in trained if each != here]


def _check_launches(legs: Sequence[Leg], machine: Machine) -> None:
    """Raise ConfigError for launches that this machine or a launcher cannot start."""
    limit, problems = machine.max_world_size, list[str]()
    for leg in legs:
        if leg.world_size > limit:
            problems.append(
                f"--world-size: expected at most {limit} on this machine of {machine.gpus or machine.cores} "
                f"{'GPUs' if machine.gpus else 'cores'}, found {leg.world_size}, as attempt "
                f"{leg.attempt.number} ran; give a smaller one, which is compared within bounds"
            )
        if leg.path == "torchrun" and leg.config.distributed.strategy == "deepspeed":
            problems.append("--launcher: expected accelerate, which alone runs deepspeed, found torchrun")
        if leg.path == "accelerate" and leg.config.distributed.pp_size > 1:
            problems.append("--launcher: expected torchrun, which alone runs pipelines, found accelerate")
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
