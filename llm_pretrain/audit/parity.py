"""Launches a configuration in every way, and compares the runs bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from llm_pretrain.audit.comparison import (
    Attempt,
    Comparison,
    InterruptedResult,
    Result,
    Run,
    compare_interrupted,
    compare_runs,
)
from llm_pretrain.audit.kills import run_or_kill
from llm_pretrain.audit.variants import ParityPlan, Variant
from llm_pretrain.checkpoints.folders import folder_name, newest_step
from llm_pretrain.errors import PretrainError
from llm_pretrain.launch.jobs import Job, LaunchContext, RunningJob, last_error_lines, run_until
from llm_pretrain.launch.options import say
from llm_pretrain.runs.monitor import RunMonitor
from llm_pretrain.runs.rows import read_rows


def launch_and_compare(plan: ParityPlan, context: LaunchContext) -> list[Result]:
    """Run every variant, and compare the runs; in the order of the plan."""
    runs = _run_variants(plan, context)
    return compare_runs(runs, plan.config, plan.steps, partial(_find_ties, plan, context))


def _job(plan: ParityPlan, variant: Variant, name: str, *more: str) -> Job:
    """A launch of a variant in the folder of this name, with `more` options."""
    folder, log, options = plan.output / name, plan.output / f"{name}.log", plan.options_of(variant)
    strategy = plan.strategy_of(variant)
    return Job(variant.path, variant.world_size, folder, log, (*options, *more), plan.threads, strategy)


def _run_variants(plan: ParityPlan, context: LaunchContext) -> list[Run]:
    """Launch every variant, with a line of progress for each; in the order of the table."""
    variants: dict[Job, Variant] = {}
    for each in plan.variants:
        variants[_job(plan, each, each.name)] = each
    ended: dict[Variant, Run] = {}

    def on_end(started: RunningJob, exit_code: int) -> None:
        job, variant, seconds = started.job, variants[started.job], started.seconds
        ended[variant] = Run(variant, job.folder, job.log, exit_code, seconds, started.timed_out)
        how = f"{plan.steps} steps in {seconds:.0f} s" if exit_code == 0 else f"FAILED, {job.log}"
        say(f"[{len(ended)}/{len(variants)}] {variant}: {how}")

    # small jobs first, since several of them fit at a time
    jobs = sorted(variants, key=lambda job: job.world_size)
    run_until(jobs, context, on_start=lambda job: say(f"start {variants[job]}"), on_end=on_end)
    return [ended[variant] for variant in plan.variants]


def _find_ties(plan: ParityPlan, context: LaunchContext, reference: Run, run: Run, step: int) -> str:
    """As `FindTies`: both are launched again, for their parameters before the step."""
    from llm_pretrain.audit.ties import find_ties
    from llm_pretrain.checkpoints.opening import open_model

    before, kept = str(step - 1), str(max(2, plan.steps))
    if step == 1 or context.machine.gpus:  # the same parameters; a CPU's passes do not choose as a GPU's
        return ""
    say(f"again  {reference.variant} and {run.variant}, whose choices of experts differ at step {step}")
    options = ("--checkpoint.save_steps", before, "--checkpoint.keep_last", kept)
    variants = [reference.variant, run.variant]
    jobs = [_job(plan, each, f"{each.name}-step-{before}", *options) for each in variants]
    run_until([job for job in jobs if not job.folder.exists()], context)
    folders = [job.folder / "checkpoints" / folder_name(step - 1) for job in jobs]
    rows = [each.rows[step] for each in (reference, run)]
    try:
        models = [open_model(folder, average=False).model for folder in folders]
        return find_ties(models, rows, variants, plan.config, step)
    except PretrainError as error:
        say(f"note   {error}")
        return ""


def _run_interrupted(
    plan: ParityPlan, context: LaunchContext, option: str, reference: Result
) -> InterruptedResult | None:
    """Run the first variant again with its interruptions, and compare it with the uninterrupted run."""
    if not plan.interruptions:
        return None
    first, save = plan.variants[0], ("--checkpoint.save_steps", str(plan.save_steps))
    jobs = []
    for each in (first, *plan.interruptions):
        variant = dataclasses.replace(first, path=each.path, world_size=each.world_size)
        jobs.append(_job(plan, variant, "interrupted", *save))
    folder, log = jobs[0].folder, jobs[0].log
    attempts, failure = run_attempts(jobs, [each.step for each in plan.interruptions], context)
    if failure:
        comparison = Comparison("failed")
    elif reference.run.exit_code != 0:
        comparison = Comparison("not compared", note="the first variant failed")
    else:
        comparison = compare_interrupted(reference.run, folder, attempts, plan.config, plan.steps)
    return InterruptedResult(option, folder, log, comparison, attempts, failure)


def run_attempts(
    jobs: Sequence[Job], kills: Sequence[int], context: LaunchContext
) -> tuple[list[Attempt], tuple[str, ...]]:
    """Run the jobs one after another, each but the last killed as soon as the row of its step is written.

    Args:
        jobs: All with the same folder and log.
        kills: Steps, one less than jobs.
        context: Where to start them.

    Returns:
        The attempts, and why one did not run as planned (with the end of its log), or nothing.
    """

    def has_row(monitor: RunMonitor, saving: int | None, *, step: int) -> bool:
        return (monitor.last_step or 0) >= step

    def written_steps(job: Job) -> list[int]:
        file = job.folder / "metrics.jsonl"
        return [row["step"] for row in read_rows(file)] if file.exists() else []

    attempts: list[Attempt] = []
    for number, job in enumerate(jobs):
        step = kills[number] if number < len(kills) else None
        checkpoint, rows_before = newest_step(job.folder / "checkpoints"), len(written_steps(job))
        done = run_or_kill(job, context, None if step is None else partial(has_row, step=step))
        problem = done.failure
        if step is not None and not done.killed and not problem:
            problem = f"was done before it could be killed after step {step}; ask for more --steps"
        if problem:
            return [], (f"{job.path} W={job.world_size} {problem}", *last_error_lines(job.log))
        steps = written_steps(job)[rows_before:]
        first, last = (steps[0], steps[-1]) if steps else (None, None)
        attempts.append(Attempt(job.path, job.world_size, checkpoint, first, last, done.killed))
        how = f"killed after step {last}" if done.killed else "to its end"
        say(f"attempt {number + 1} of {len(jobs)}: {job.path} W={job.world_size}, from step {first}, {how}")
    return attempts, ()


def is_violated(results: Sequence[Result], interrupted: InterruptedResult | None) -> bool:
    """Whether a launch failed or a difference exceeds its tolerance."""
    return any(each.comparison.violated for each in [*results, *([interrupted] if interrupted else [])])


def result_content(
    facts: Mapping[str, Any], results: Sequence[Result], interrupted: InterruptedResult | None
) -> dict[str, Any]:
    """Content of parity.json; `facts` are those of the call."""
    cells = [
        {
            **dataclasses.asdict(each.run.variant),
            "folder": str(each.run.folder),
            "log": str(each.run.log),
            "exit_code": each.run.exit_code,
            "seconds": round(each.run.seconds, 1),
            "reference": each.is_reference,
            "compared_with": each.against.name if each.against else None,
            **each.comparison.as_dict(),
            "failure": each.failure,
        }
        for each in results
    ]
    attempts = interrupted and {
        "interrupt": interrupted.option,
        "folder": str(interrupted.folder),
        "log": str(interrupted.log),
        "attempts": [dataclasses.asdict(each) for each in interrupted.attempts],
        **interrupted.comparison.as_dict(),
        "failure": interrupted.failure,
    }
    verdict = "violated" if is_violated(results, interrupted) else "holds"
    return {"verdict": verdict, **facts, "cells": cells, "interrupted": attempts}
