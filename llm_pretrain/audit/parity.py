"""Launches a configuration in every way, and compares the runs bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from llm_pretrain.audit.comparison import (
    EXACT,
    Comparison,
    Rows,
    compare_rows,
    compare_runs,
    rows_of_run,
    tolerance_of,
)
from llm_pretrain.audit.variants import ParityPlan, Variant
from llm_pretrain.checkpoints.folders import folder_name
from llm_pretrain.config.tree import Config
from llm_pretrain.errors import PretrainError
from llm_pretrain.launch.jobs import Job, LaunchContext, RunningJob, last_error_lines, run_until
from llm_pretrain.launch.options import say

FindTies = Callable[["VariantRun", "VariantRun", int], str]
"""(reference, run, step) -> the expert choices that differ there, in words, if all are ties; else empty."""


@dataclass
class VariantRun:
    """A finished launch.

    Args:
        variant: What was launched.
        folder, log: The run's folder, and the file with the launch's output.
        exit_code: The launcher's exit code.
        seconds: From start to end.
        timed_out: Whether it was killed at the time limit.
    """

    variant: Variant
    folder: Path
    log: Path
    exit_code: int = 0
    seconds: float = 0.0
    timed_out: bool = False

    @property
    def rows(self) -> Rows:
        """Rows by step; empty where they cannot be read."""
        return rows_of_run(self.folder)

    @property
    def error_lines(self) -> tuple[str, ...]:
        """Why the launch failed; empty if it did not."""
        if self.timed_out:
            return (f"no end after {self.seconds:.0f} s, killed",)
        return tuple(last_error_lines(self.log)) if self.exit_code else ()


@dataclass
class VariantResult:
    """A row of the table.

    Args:
        run: The variant's run.
        comparison: Of the run with `against`, or with itself if `against` is None.
        against: The variant that the run was compared with.
        is_reference: Whether other runs are compared with this run, and this run with no other.
    """

    run: VariantRun
    comparison: Comparison
    against: Variant | None = None
    is_reference: bool = False


def compare_variants(
    runs: Sequence[VariantRun],
    config: Config,
    steps: int,
    find_ties: FindTies = lambda reference, run, step: "",
) -> list[VariantResult]:
    """Compare each run with the run of the same precision that `choose_reference` selects."""
    finished = [run.variant for run in runs if run.exit_code == 0]
    by_variant = {run.variant: run for run in runs}
    results = []
    for run in runs:
        against = choose_reference(run.variant, finished, config, steps)
        reference = by_variant[against] if against else None
        tolerance = tolerance_of(run.variant, against, config, steps) if against else EXACT
        if run.exit_code != 0:
            comparison, rows = Comparison("failed"), run.rows
            if reference and rows:
                last = min(max(rows), steps)
                comparison.first = compare_rows(reference.rows, rows, last, tolerance).first
        elif reference:
            ties = partial(find_ties, reference, run)
            comparison = compare_runs(reference.folder, run.folder, steps, tolerance, ties)
        elif len(finished) == 1:
            comparison = Comparison("not compared", note="no other variant to compare it with")
        else:  # with itself, which finds missing rows and keys
            comparison = compare_rows(run.rows, run.rows, steps, tolerance)
        is_reference = against is None and run.exit_code == 0 and len(finished) > 1
        results.append(VariantResult(run, comparison, against, is_reference))
    return results


def choose_reference(
    variant: Variant, finished: Sequence[Variant], config: Config, steps: int
) -> Variant | None:
    """The variant to compare with; None for the first of its precision.

    The first choice is the first variant of the same split and mesh, on another path. Without such a variant
    the reference is the first earlier one for which there are bounds, or else the first of the precision.
    """
    pool = [each for each in finished if each.precision == variant.precision]
    candidates = [each for each in pool if each.path != "trainer"]
    if not candidates or candidates[0] == variant:
        return None
    kind = (variant.split, variant.mesh)
    same_kind = next((each for each in candidates if (each.split, each.mesh) == kind), variant)
    if same_kind != variant:
        return same_kind
    earlier = [each for each in takewhile(lambda each: each != variant, pool) if each in candidates]
    bounded = (each for each in earlier if tolerance_of(variant, each, config, steps).bounds)
    return next(bounded, candidates[0])


def launch_and_compare(plan: ParityPlan, context: LaunchContext) -> list[VariantResult]:
    """Run every variant, and compare the runs; returns the results in the order of the plan."""
    runs = _run_variants(plan, context)
    return compare_variants(runs, plan.config, plan.steps, partial(_find_ties, plan, context))


def _job(plan: ParityPlan, variant: Variant, name: str, *more: str) -> Job:
    """The launch of a variant into the subfolder `name` of the output, with `more` options."""
    folder, log, options = plan.output / name, plan.output / f"{name}.log", plan.options_of(variant)
    strategy = plan.strategy_of(variant)
    return Job(variant.path, variant.world_size, folder, log, (*options, *more), plan.threads, strategy)


def _run_variants(plan: ParityPlan, context: LaunchContext) -> list[VariantRun]:
    """Launch every variant and print a line of progress for each; returns them in the order of the table."""
    variants: dict[Job, Variant] = {}
    for each in plan.variants:
        variants[_job(plan, each, each.name)] = each
    ended: dict[Variant, VariantRun] = {}

    def on_end(started: RunningJob, exit_code: int) -> None:
        job, variant, seconds = started.job, variants[started.job], started.seconds
        ended[variant] = VariantRun(variant, job.folder, job.log, exit_code, seconds, started.timed_out)
        how = f"{plan.steps} steps in {seconds:.0f} s" if exit_code == 0 else f"FAILED, {job.log}"
        say(f"[{len(ended)}/{len(variants)}] {variant}: {how}")

    # small jobs first, since several of them fit at a time
    jobs = sorted(variants, key=lambda job: job.world_size)
    run_until(jobs, context, on_start=lambda job: say(f"start {variants[job]}"), on_end=on_end)
    return [ended[variant] for variant in plan.variants]


def _find_ties(
    plan: ParityPlan, context: LaunchContext, reference: VariantRun, run: VariantRun, step: int
) -> str:
    """A `FindTies` that launches both variants again, to get their parameters before the step."""
    from llm_pretrain.audit.ties import find_ties
    from llm_pretrain.checkpoints.opening import open_model

    before, kept = str(step - 1), str(max(2, plan.steps))
    if step == 1 or context.machine.gpus:  # equal parameters; CPU passes choose unlike a GPU's
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


def is_violated(results: Sequence[VariantResult]) -> bool:
    """Whether a launch failed or a difference exceeds its tolerance."""
    return any(each.comparison.violated for each in results)


def result_content(facts: Mapping[str, Any], results: Sequence[VariantResult]) -> dict[str, Any]:
    """Content of parity.json; `facts` describe the call."""
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
            "failure": each.run.error_lines,
        }
        for each in results
    ]
    verdict = "violated" if is_violated(results) else "holds"
    return {"verdict": verdict, **facts, "cells": cells}
