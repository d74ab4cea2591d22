"""Chooses the sizes of a ladder by this machine's speed, and runs the ladder's trainings in parallel."""

from __future__ import annotations

import dataclasses
import shutil
import statistics
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from llm_pretrain.config.distributed_config import DistributedConfig
from llm_pretrain.config.loading import dump_yaml
from llm_pretrain.config.tree import Config
from llm_pretrain.data.loader import evaluation_batches
from llm_pretrain.errors import ConfigError, DivergedError, PretrainError, ResourceError
from llm_pretrain.files import make_folder, replace_text
from llm_pretrain.forecast.budget import (
    SIZE_COUNTS,
    Speed,
    choose_rungs,
    ladder_flops,
    ladder_seconds,
    read_budget,
    rungs_within,
)
from llm_pretrain.forecast.family import Size, Sizes, member
from llm_pretrain.forecast.ladder_report import write_ladder_report
from llm_pretrain.forecast.ladder_runs import LadderRun, ladder_runs, longest_first, run_config, run_folder
from llm_pretrain.forecast.measurements import (
    LadderProgress,
    diverged_sizes,
    measured_points,
    read_progress,
    shortcomings,
    used_flops,
)
from llm_pretrain.forecast.points import POINTS_FILE, RUNS_FOLDER, Ladder, Rung, write_points
from llm_pretrain.forecast.scaling_law import LEAST_SIZES
from llm_pretrain.launch.jobs import (
    Job,
    LaunchContext,
    Machine,
    RunningJob,
    last_error_lines,
    processes_of,
    run_until,
)
from llm_pretrain.launch.options import say
from llm_pretrain.text import duration, quantity

GUESSED_FLOPS = {"core": 4e10, "gpu": 1e14}
"""Guessed FLOPs per second, which choose the size whose speed is measured first."""
MEASURE_AGAIN = 2.0
"""If the FLOPs per token of a ladder's middle size and of the measured size differ by this factor, the middle
size is measured too, once."""
_POLL_SECONDS, _STOP_SECONDS = 0.1, 60
MEASURED_SECONDS, MEASURED_STEPS = 5.0, 6
"""Least seconds and least steps over which the speed of each run is measured."""
LOCK, MEASURING = ".lock", ".measuring"
"""In a ladder's folder: the lock of a command that uses the ladder, and the folder of measured runs."""


def threads_of(machine: Machine) -> int:
    """CPU threads of each run: the cores are divided among the GPUs or, without GPUs, among the sizes."""
    return max(1, machine.cores // (machine.gpus or SIZE_COUNTS[0]))


def slots_of(machine: Machine, threads: int) -> int:
    """Number of runs at once: one per GPU or, without GPUs, cores ÷ threads of a run."""
    return machine.gpus or max(1, machine.cores // threads)


def new_ladder(
    given: str, folder: Path, base: Config, store: str, unique_tokens: int, context: LaunchContext
) -> Ladder:
    """Choose the rungs for a budget and write ladder.json; measures the speed if the budget is a time."""
    threads, sizes = threads_of(context.machine), Sizes(base)
    (flops, seconds), expected = read_budget(given), ""
    if seconds is None:
        assert flops is not None
        rungs = choose_rungs(sizes, flops, unique_tokens)
    else:
        rungs, seconds = measured_rungs(seconds, sizes, unique_tokens, folder, context, threads)
        expected = f", about {duration(seconds)}"
    ladder = Ladder(folder, base, store, unique_tokens, rungs, given, threads)
    ladder.write()
    say(
        f"{len(rungs)} sizes of {base.run.name} in {ladder_flops(sizes, rungs):.2g} FLOPs{expected}, "
        f"{slots_of(context.machine, threads)} side by side with {threads} thread{'s' * (threads > 1)} each, "
        f"in {folder}"
    )
    for rung in rungs:
        parameters = quantity(sizes.of(rung.hidden_size).active_parameters)
        tokens = ", ".join(quantity(steps * base.training.tokens_per_step) for steps in rung.steps)
        say(f"  hidden size {rung.hidden_size}, {parameters} active parameters: {tokens} tokens")
    return ladder


def measured_rungs(
    seconds: float, sizes: Sizes, unique_tokens: int, folder: Path, context: LaunchContext, threads: int
) -> tuple[tuple[Rung, ...], float]:
    """(rungs that this machine trains in the time left after measuring, seconds that they will take).

    Raises:
        ConfigError: at the measured speed, the time is too short for any ladder.
    """
    started, machine = time.monotonic(), context.machine
    slots = slots_of(machine, threads)

    def middle(rungs: tuple[Rung, ...]) -> Size:
        return sizes.of(rungs[len(rungs) // 2].hidden_size)

    def measured(size: Size) -> tuple[Speed, tuple[Rung, ...]]:
        say(f"measuring the speed of hidden size {size.hidden_size}")
        speed = measure_speed(
            sizes.base, size.hidden_size, folder / MEASURING, context, slots=slots, threads=threads
        )
        left = seconds - (time.monotonic() - started)
        return speed, rungs_within(sizes, left, unique_tokens, speed)

    guess = GUESSED_FLOPS["gpu"] if machine.gpus else GUESSED_FLOPS["core"] * machine.cores / slots
    size = middle(rungs_within(sizes, seconds, unique_tokens, Speed(guess, 0.0, slots, 0)))
    speed, rungs = measured(size)
    ratio = middle(rungs).flops_per_token / size.flops_per_token
    if not 1 / MEASURE_AGAIN < ratio < MEASURE_AGAIN:
        speed, rungs = measured(middle(rungs))
    expected, spent = ladder_seconds(sizes, rungs, speed), time.monotonic() - started
    if spent + expected > seconds:
        raise ConfigError(
            # the next measurement differs a little
            f"--budget: expected at least {duration(1.05 * (spent + expected))} for {len(rungs)} sizes of "
            f"this family on this machine, as busy as it is now, found {duration(seconds)}; raise it"
        )
    return rungs, expected


def train(ladder: Ladder, context: LaunchContext) -> int:
    """Run the trainings that have not ended yet, write the points and the report; returns the exit code."""
    started, folder = time.monotonic(), ladder.folder.resolve()
    files = [file for name in (RUNS_FOLDER, MEASURING) for file in (folder / name).glob("*.yaml")]
    end_orphans(file.with_suffix("") for file in files)  # a run's file exists before its folder
    Runner(ladder, context).run_all()
    points = measured_points(ladder)
    write_points(ladder.folder, points)
    say(f"report: {write_ladder_report(ladder.folder)}")
    for line in shortcomings(dataclasses.replace(ladder, points=tuple(points))):
        say(line)
    if (left := len(ladder.rungs) - len(diverged_sizes(ladder))) < LEAST_SIZES:
        raise DivergedError(
            f"{ladder.folder}: expected {LEAST_SIZES} sizes or more that do not diverge, found {left}; lower "
            "the base's learning rates"
        )
    say(
        f"{len(points)} points in {ladder.folder / POINTS_FILE}: {used_flops(ladder):.3g} FLOPs; this call "
        f"{duration(time.monotonic() - started)}"
    )
    return 0


class Runner:
    """Runs the trainings of a ladder on all slots, and prints a line for each that ends.

    Args:
        ladder: The ladder with its rungs; its measurements are read from the folders of its runs.
        context: Where to launch.
    """

    def __init__(self, ladder: Ladder, context: LaunchContext):
        self.ladder, self.context, self.sizes = ladder, context, Sizes(ladder.base)
        self.runs = ladder_runs(ladder.rungs)
        self._started, self._used = time.monotonic(), used_flops(ladder)

    def run_all(self) -> None:
        """Run the trainings that have not ended yet, except the decays of a diverged stable run.

        Raises:
            PretrainError: a run failed.
        """
        flops = {run: run.trained_steps * self.sizes.of(run.hidden_size).step_flops for run in self.runs}
        waiting = [run for run in longest_first(flops) if not self._progress(run).has_ended(run.end)]
        runs = {job_of(self._folder(run), self.ladder.threads): run for run in waiting}
        say(
            f"{len(waiting)} of {len(self.runs)} runs to train, each with a line here when it ends; "
            f"`llm-pretrain top {self.ladder.folder}` shows them meanwhile"
        )
        run_until(
            list(runs),
            self.context,
            after={
                job: [other for other, each in runs.items() if run.follows(each)] for job, run in runs.items()
            },
            on_start=lambda job: self._prepare(runs[job]),
            on_end=lambda started, code: self._ended(started, runs[started.job], code),
            stop_seconds=_STOP_SECONDS,
        )
        self._clean()

    def _prepare(self, run: LadderRun) -> bool:
        """Write the configuration of a run; returns False if it is a decay of a diverged run."""
        if any(run.follows(each) and self._progress(each).has_diverged for each in self.runs):
            return False
        file = self._folder(run).with_suffix(".yaml")
        make_folder(file.parent)
        replace_text(file, dump_yaml(run_config(self.ladder, run)))
        return True

    def _ended(self, job: RunningJob, run: LadderRun, code: int) -> None:
        progress = self._progress(run)
        if not progress.has_ended(run.end):
            raise failure(job, run.name, code)
        write_points(self.ladder.folder, measured_points(self.ladder))
        tokens, used = run.end * self.ladder.base.training.tokens_per_step, used_flops(self.ladder)
        planned, done = ladder_flops(self.sizes, self.ladder.rungs), used - self._used
        left = (time.monotonic() - self._started) * max(0.0, planned - used) / max(done, 1.0)
        result = "DIVERGED" if progress.has_diverged else f"loss {progress.evaluations[run.end].loss:.4f}"
        say(
            f"{run.name:<16} {tokens:>13,} tokens  {result:<11}  "
            f"used {used / planned:.0%} ({used:.2g} FLOPs), {duration(left)} left"
        )
        self._clean()

    def _clean(self) -> None:
        """Delete the checkpoints of ended runs whose decays have ended too; decays keep their weights.

        A diverged run has no decays to wait for.
        """
        for run in self.runs:
            following = [each for each in self.runs if each.follows(run)]
            needed = [run] if self._progress(run).has_diverged else [run, *following]
            if all(self._progress(each).has_ended(each.end) for each in needed):
                for name in ("checkpoints",) if run.begin else ("checkpoints", "weights"):
                    shutil.rmtree(self._folder(run) / name, ignore_errors=True)

    def _folder(self, run: LadderRun) -> Path:
        return run_folder(self.ladder, run)

    def _progress(self, run: LadderRun) -> LadderProgress:
        return read_progress(self._folder(run))


def job_of(folder: Path, threads: int, world_size: int = 1) -> Job:
    """A training in `folder`, with the configuration in the file `folder`.yaml beside it."""
    options, log = ("--config", str(folder.with_suffix(".yaml"))), folder.with_name(f"{folder.name}.log")
    return Job("torchrun", world_size, folder, log, options, threads)


def failure(job: RunningJob, name: str, code: int) -> PretrainError:
    """The error for a run that ended without being finished; it has the run's exit code."""
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    lines = last_error_lines(job.job.log)
    error = PretrainError(f"{name} {how}: {lines[-1] if lines else 'no output'}; {job.job.log} has all of it")
    error.exit_code = code if 0 < code < 128 else ResourceError.exit_code if code else 1
    return error


def end_orphans(folders: Iterable[Path]) -> None:
    """End the runs that a killed ladder command left; they hold their folders until they have saved."""
    found = [process for folder in folders for process in processes_of(folder)]
    for process in found:
        with suppress(psutil.Error):
            process.terminate()
    for process in psutil.wait_procs(found, timeout=_STOP_SECONDS)[1]:
        with suppress(psutil.Error):
            process.kill()


def measure_speed(
    base: Config, hidden_size: int, folder: Path, context: LaunchContext, *, slots: int, threads: int
) -> Speed:
    """Measure the speed of runs of a size on all slots at once; deletes `folder` afterwards.

    Raises:
        PretrainError: a run failed.
    """
    configs = [measured_config(member(base, hidden_size), threads)] * slots
    steps, start_ups = zip(*measure_steps(configs, folder, context), strict=True)
    rate = Sizes(base).of(hidden_size).step_flops / statistics.mean(steps)
    return Speed(rate, statistics.mean(start_ups), slots, evaluated_tokens(base))


def evaluated_tokens(base: Config) -> int:
    """Tokens of one evaluation."""
    return sum(evaluation_batches(base).sequences) * base.training.sequence_length


def measure_steps(
    configs: Sequence[Config], folder: Path, context: LaunchContext, world_size: int = 1
) -> list[tuple[float, float]]:
    """(median seconds of a step, seconds to the first step) of runs side by side.

    Args:
        configs: Configurations of runs with a row for each step and no end, as `measured_config` makes them.
        folder: Folder of the runs: emptied first, deleted at the end, but kept with its logs if a run failed.
        context: Where to launch.
        world_size: Processes of each run.

    Raises:
        PretrainError: a run failed.
    """
    folder, is_kept = folder.resolve(), False  # processes are found by the absolute name
    jobs = [
        job_of(folder / f"{number}", config.distributed.cpu_threads or 1, world_size)
        for number, config in enumerate(configs)
    ]
    rows: dict[Job, Sequence[dict[str, Any]]] = {job: [] for job in jobs}
    started = time.time()
    end_orphans(job.folder for job in jobs)  # a killed measurement may have left runs
    shutil.rmtree(folder, ignore_errors=True)
    make_folder(folder)

    def are_measured(running: RunningJob) -> bool:
        if not all(map(_is_measured, rows.values())):
            rows[running.job] = read_progress(running.job.folder).rows
        return all(map(_is_measured, rows.values()))

    def ended(running: RunningJob, code: int) -> None:
        if not running.done:
            raise failure(running, "the measurement of the speed", code)

    try:
        for job, config in zip(jobs, configs, strict=True):
            replace_text(job.folder.with_suffix(".yaml"), dump_yaml(config))
        run_until(jobs, context, are_measured, every=_POLL_SECONDS, on_end=ended)
    except PretrainError:
        is_kept = True  # the error message names a log in the folder
        raise
    finally:
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)
    found = []
    for measured in rows.values():
        seconds = statistics.median(row["perf/step_seconds"] for row in measured[1:])
        found.append((seconds, max(0.0, measured[0]["time"] - started - seconds)))
    return found


def _is_measured(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether these rows of metrics.jsonl, one for each step, are enough."""
    return len(rows) > MEASURED_STEPS and rows[-1]["time"] - rows[0]["time"] >= MEASURED_SECONDS


def measured_config(config: Config, threads: int) -> Config:
    """The configuration of a run whose steps are measured: a row for each step, no saves or evaluations."""
    return dataclasses.replace(
        config,
        schedule=dataclasses.replace(config.schedule, name="constant", warmup_steps=0, decay_steps=None),
        training=dataclasses.replace(config.training, max_steps=1_000_000, spike_action="log"),
        checkpoint=dataclasses.replace(config.checkpoint, save_steps=0, resume="auto"),
        evaluation=dataclasses.replace(config.evaluation, eval_steps=0, sample_prompts=[]),
        logging=dataclasses.replace(
            config.logging, logging_steps=1, wandb_mode="disabled", tensorboard=False, report=False
        ),
        distributed=DistributedConfig(
            cpu_threads=threads, timeout_seconds=config.distributed.timeout_seconds
        ),
    )
