"""Runs the trainings of a ladder side by side, decays after their stable runs, and measures the speed."""

from __future__ import annotations

import dataclasses
import shutil
import statistics
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from llm_pretrain.commands._launch_options import say
from llm_pretrain.commands._launching import (
    Job,
    LaunchContext,
    Machine,
    RunMonitor,
    RunningJob,
    last_error_lines,
    processes_of,
)
from llm_pretrain.config import Config, DistributedConfig, dump_yaml
from llm_pretrain.errors import PretrainError, ResourceError
from llm_pretrain.files import make_folder, replace_text
from llm_pretrain.ladder import (
    SIZE_COUNTS,
    Ladder,
    Progress,
    Run,
    Sizes,
    Speed,
    ladder_flops,
    longest_first,
    measured_points,
    member,
    read_progress,
    run_config,
    run_folder,
    tokens_per_step,
    used_flops,
    write_points,
)
from llm_pretrain.tracking import read_metrics

_POLL_SECONDS, _STOP_SECONDS = 0.1, 60
PROGRESS_SECONDS = 60.0
"""Between lines about the runs that train, where none ends."""
LOOK_SECONDS, BUSY_PERCENT = 0.5, 25.0
"""How long others are watched before a measurement, and from which share of the cores they are named."""
MEASURED_SECONDS, MEASURED_STEPS = 5.0, 6
"""How long, and how many steps at least, the speed is measured once all runs train."""
LOCK, MEASURING = ".lock", ".measuring"
"""In a ladder's folder: what the command in it holds, and where runs whose speed is measured write."""


def threads_of(machine: Machine) -> int:
    """CPU threads of each run: the cores are divided among the GPUs, or among the sizes."""
    return max(1, machine.cores // (machine.gpus or SIZE_COUNTS[0]))


def slots_of(machine: Machine, threads: int) -> int:
    """Runs side by side: one a GPU, or as many as there are cores for their threads."""
    return machine.gpus or max(1, machine.cores // threads)


class Runner:
    """Runs trainings of a ladder on all slots, with a line for each that ends.

    Args:
        ladder: With its rungs; what it has measured is read from its runs.
        context: Where to launch.
        slots: Runs side by side: one per GPU, or as many as there are cores for their threads.
    """

    def __init__(self, ladder: Ladder, context: LaunchContext, slots: int):
        self.ladder, self.context, self.slots = ladder, context, slots
        self.sizes = Sizes(ladder.base)

    def run_all(self, runs: Sequence[Run]) -> None:
        """Run those that have not ended yet; of one that has diverged, no decays.

        Raises:
            PretrainError: a run failed.
        """
        self._restart_incomplete(runs)
        flops = {run: run.trained_steps * self.sizes.of(run.hidden_size).step_flops for run in runs}
        waiting = [run for run in longest_first(flops) if not self._progress(run).has_ended(run.end)]
        running: list[tuple[RunningJob, Run, int]] = []
        free, said = list(range(self.slots)), time.monotonic()
        try:
            while waiting or running:
                unfinished = [*waiting, *(run for _, run, _ in running)]
                for run in [each for each in waiting if not any(map(each.follows, unfinished))]:
                    if not free:
                        break
                    waiting.remove(run)
                    if any(run.follows(each) and self._progress(each).has_diverged for each in runs):
                        continue
                    slot = free.pop(0)
                    running.append((self._launch(run, slot), run, slot))
                time.sleep(_POLL_SECONDS)
                if time.monotonic() - said > PROGRESS_SECONDS:
                    steps = ((run, self._progress(run).last_step) for _, run, _ in running)
                    say(", ".join(f"{run.name} at step {step:,} of {run.end:,}" for run, step in steps))
                    said = time.monotonic()
                for entry in list(running):
                    job, run, slot = entry
                    if (code := job.poll()) is not None:
                        said = time.monotonic()
                        running.remove(entry)
                        free = sorted([*free, slot])
                        self._ended(job, run, code)
        except BaseException:
            stop([job for job, _, _ in running])
            raise

    def _restart_incomplete(self, runs: Sequence[Run]) -> None:
        """Delete stable runs that lack the checkpoint of a decay which has not ended: its files were lost."""
        for decay in runs:
            for stable in [each for each in runs if decay.follows(each)]:
                progress = self._progress(stable)
                is_over = self._progress(decay).has_ended(decay.end) or progress.has_diverged
                checkpoint = run_config(self.ladder, decay).checkpoint.resume
                if progress.has_ended(stable.end) and not is_over and not Path(checkpoint).is_dir():
                    say(f"{stable.name} is trained again: {decay.name} needs {checkpoint}, found none")
                    shutil.rmtree(self._folder(stable))

    def _launch(self, run: Run, slot: int) -> RunningJob:
        folder = self._folder(run)
        file = folder.with_suffix(".yaml")
        make_folder(folder.parent)
        replace_text(file, dump_yaml(run_config(self.ladder, run)))
        return launch(file, folder, self.ladder.threads, self.context, [slot])

    def _ended(self, job: RunningJob, run: Run, code: int) -> None:
        progress = self._progress(run)
        if not progress.has_ended(run.end):
            raise failure(job, run.name, code)
        write_points(self.ladder.folder, measured_points(self.ladder))
        say(self._line(run, progress))
        if run.begin and not progress.has_diverged:
            self.clean([run])

    def _line(self, run: Run, progress: Progress) -> str:
        """What a run has reached at its end, and what the ladder has used."""
        tokens, seconds = tokens_per_step(self.ladder.base), progress.step_seconds
        evaluation = progress.evaluations.get(run.end)
        if progress.has_diverged:
            result = "DIVERGED"
        else:
            result = f"loss {evaluation.loss:.4f}" if evaluation and evaluation.loss is not None else ""
        speed = f"{tokens / seconds:>9,.0f} tokens/s" if seconds else ""
        used = used_flops(self.ladder)
        share = used / ladder_flops(self.sizes, self.ladder.rungs)
        return (
            f"{run.name:<16} {run.end * tokens:>13,} tokens  {result:<11} {speed}  "
            f"used {share:.0%} ({used:.2g} FLOPs)"
        )

    def clean(self, runs: Iterable[Run]) -> None:
        """Delete the checkpoints of runs that have ended with all that follow; of decays the weights stay.

        None follows a run that has diverged.
        """
        runs = list(runs)
        for run in runs:
            following = [each for each in runs if each.follows(run)]
            needed = [run] if self._progress(run).has_diverged else [run, *following]
            if all(self._progress(each).has_ended(each.end) for each in needed):
                for name in ("checkpoints",) if run.begin else ("checkpoints", "weights"):
                    shutil.rmtree(self._folder(run) / name, ignore_errors=True)

    def _folder(self, run: Run) -> Path:
        return run_folder(self.ladder, run)

    def _progress(self, run: Run) -> Progress:
        return read_progress(self._folder(run))


def launch(
    file: Path, folder: Path, threads: int, context: LaunchContext, slots: Sequence[int]
) -> RunningJob:
    """Start a training of the configuration in `file`, one process for each of the slots."""
    options, log = ("--config", str(file)), folder.with_name(f"{folder.name}.log")
    return RunningJob(Job("torchrun", len(slots), folder, log, options, threads), context, slots)


def failure(job: RunningJob, name: str, code: int) -> PretrainError:
    """The error of a run that ended without being finished, with the run's own exit code."""
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    lines = last_error_lines(job.job.log)
    error = PretrainError(f"{name} {how}: {lines[-1] if lines else 'no output'}; {job.job.log} has all of it")
    error.exit_code = code if 0 < code < 128 else ResourceError.exit_code if code else 1
    return error


def stop(jobs: Sequence[RunningJob]) -> None:
    """Let runs save and end, then kill those that are left."""
    try:
        for job in jobs:
            if job.poll() is None:
                job.process.terminate()
        deadline = time.monotonic() + _STOP_SECONDS
        while time.monotonic() < deadline and any(job.poll() is None for job in jobs):
            time.sleep(_POLL_SECONDS)
    finally:  # also at a second signal
        for job in jobs:
            job.kill()


def end_orphans(folders: Iterable[Path]) -> None:
    """End runs that a ladder left when it was killed itself: they save, and hold their folders until then."""
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
    """The speed of runs of a size on all slots at once; deletes what it wrote into `folder`.

    Raises:
        PretrainError: a run failed.
    """
    configs = [measured_config(member(base, hidden_size), threads)] * slots
    steps, start_ups = zip(*measure_steps(configs, folder, context), strict=True)
    rate = Sizes(base).of(hidden_size).step_flops / statistics.mean(steps)
    return Speed(rate, statistics.mean(start_ups), slots, evaluated_tokens(base))


def evaluated_tokens(base: Config) -> int:
    """Tokens of one evaluation."""
    from llm_pretrain.data import evaluation_batches

    return sum(evaluation_batches(base).sequences) * base.training.sequence_length


def measure_steps(
    configs: Sequence[Config], folder: Path, context: LaunchContext, world_size: int = 1
) -> list[tuple[float, float]]:
    """(median seconds of a step, seconds to the first step) of runs side by side.

    Args:
        configs: Of runs with a row for each step and no end, as `measured_config` makes them.
        folder: Emptied first; deleted at the end, or kept with its logs where a run failed.
        context: Where to launch.
        world_size: Processes of each.

    Raises:
        PretrainError: a run failed.
    """
    jobs, folder, is_kept = list[RunningJob](), folder.resolve(), False  # the folder finds the processes
    end_orphans(folder / f"{number}" for number in range(len(configs)))  # of a measurement that was killed
    shutil.rmtree(folder, ignore_errors=True)
    make_folder(folder)
    if (busy := psutil.cpu_percent(LOOK_SECONDS)) > BUSY_PERCENT:
        say(f"other processes take {busy:.0f} % of this machine's cores: the speed is measured beside them")
    try:
        monitors = []
        for number, config in enumerate(configs):
            own, file = folder / f"{number}", folder / f"{number}.yaml"
            replace_text(file, dump_yaml(config))
            monitors.append(RunMonitor(own))
            slots = range(number * world_size, (number + 1) * world_size)
            jobs.append(launch(file, own, config.distributed.cpu_threads or 1, context, slots))
        since, begun = 0.0, list[int]()
        while (
            not since or time.time() - since < MEASURED_SECONDS or _fewest(monitors, begun) < MEASURED_STEPS
        ):
            time.sleep(_POLL_SECONDS)
            for monitor, job in zip(monitors, jobs, strict=True):
                monitor.update()
                if (code := job.poll()) is not None:
                    raise failure(job, "the measurement of the speed", code)
            if not since and all(monitor.last_step for monitor in monitors):
                since, begun = time.time(), [monitor.last_step or 0 for monitor in monitors]
        found = []
        for monitor in monitors:
            rows = [row for row in read_metrics(monitor.folder / "metrics.jsonl") if row["time"] > since]
            seconds = statistics.median(row["perf/step_seconds"] for row in rows)
            found.append((seconds, max(0.0, (monitor.first_row_seconds or 0.0) - seconds)))
    except PretrainError:
        is_kept = True  # the message names a log there
        raise
    finally:
        for job in jobs:
            job.kill()
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)
    return found


def _fewest(monitors: Sequence[RunMonitor], begun: Sequence[int]) -> int:
    """Steps since `begun` of the slowest run."""
    return min((monitor.last_step or 0) - first for monitor, first in zip(monitors, begun, strict=True))


def measured_config(config: Config, threads: int) -> Config:
    """Of a run whose steps are measured: a row for each, and nothing else."""
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
