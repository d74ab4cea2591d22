"""`llm-pretrain parity`: launch a configuration in every way, and compare the runs bit for bit."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from llm_pretrain.commands._launch_options import (
    add_launch_options,
    call_facts,
    check_timeout,
    create_output,
    say,
    write_result,
)
from llm_pretrain.commands._launching import (
    Job,
    LaunchContext,
    RunMonitor,
    RunningJob,
    exit_on_signals,
    last_error_lines,
    newest_checkpoint,
    run_concurrently,
    run_until,
    this_machine,
)
from llm_pretrain.commands._parity_comparison import (
    KEYS,
    PARAMETERS,
    Attempt,
    Comparison,
    InterruptedResult,
    Result,
    Run,
    compare_interrupted,
    compare_runs,
)
from llm_pretrain.commands._parity_plan import ParityPlan, Variant, make_plan
from llm_pretrain.errors import PretrainError
from llm_pretrain.tracking import read_rows

EXAMPLES = """\
Every other option is a setting, --section.field VALUE, and applies to every variant.

verdicts: identical, every number at every step the same bits; within bound, with the largest differences;
differs, with the first step and number; not compared, with the reason; failed, with the end of the output
exit code: 0 where all that is promised holds, 1 where it does not or a launch failed, 2 or 65 for wrong input

examples:
  llm-pretrain parity --config configs/tiny-dense.yaml
  llm-pretrain parity --config configs/quickstart.yaml --precision fp32,bf16 --steps 20
  llm-pretrain parity --config configs/tiny-dense.yaml --accumulation 1,3 --model.hidden_dropout 0.1
  llm-pretrain parity --config configs/tiny-dense.yaml --paths torchrun,accelerate,trainer --world-size 2
  llm-pretrain parity --config configs/tiny-dense.yaml --world-size 2 --mesh ddp,fsdp,deepspeed
  llm-pretrain parity --config configs/tiny-moe.yaml --world-size 1,4 --mesh ddp,hsdp,ep,ep+hsdp
  llm-pretrain parity --config configs/tiny-moe.yaml --world-size 1 --interrupt torchrun@2:17,accelerate@1:31
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options, and every setting of the configuration."""
    add_launch_options(parser, "parity", "a launch")
    add = parser.add_argument
    add("--paths", metavar="LIST",
        help="of torchrun, accelerate, trainer (default: torchrun,accelerate)")  # fmt: skip
    add("--world-size", "--world_size", metavar="LIST", help="numbers of processes (default: 1,2)")
    add("--accumulation", metavar="LIST",
        help="accumulation steps; the micro batch size follows (default: from the configured "
             "micro batch size)")  # fmt: skip
    add("--precision", metavar="LIST", help="of fp32, bf16, fp16 (default: as configured)")
    add("--mesh", "--strategies", metavar="LIST",
        help="of ddp; fsdp; hsdp (two replicas); ep (all processes divide the experts); ep+fsdp, ep+hsdp "
             "(two neighbours do); deepspeed; or sizes RxS: distributed.dp_replicate_size, dp_shard_size, "
             "and others after them, as 2x2+ep2+cp2+tp2+pp2. Where a number of processes or the model has no "
             "such mesh it is left out (default: as configured)")  # fmt: skip
    add("--steps", type=int, metavar="K",
        help="optimizer steps of each run (default: 20, or fewer if configured)")  # fmt: skip
    add("--interrupt", metavar="PATH@W:STEP,...",
        help="also kill a run of the first variant after STEP, and resume it with PATH on W "
             "processes")  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Launch, compare, print the table and write parity.json; 0 if all runs agree, else 1."""
    check_timeout(arguments)
    started, machine = time.time(), this_machine()
    plan = make_plan(arguments, machine)
    context = create_output(plan, arguments, machine)
    threads = f"{plan.threads} {'thread' if plan.threads == 1 else 'threads'} per process"
    say(f"{len(plan.variants)} runs of {plan.steps} steps in {plan.output}, {threads}")
    for note in plan.notes:
        say(f"note   {note}")
    with exit_on_signals():
        results = launch_and_compare(plan, context)
        interrupted = _run_interrupted(plan, context, arguments.interrupt, results[0])
    violated = is_violated(results, interrupted)
    file = plan.output / "parity.json"
    facts = call_facts(plan, arguments, machine, started)
    write_result(file, result_content(facts, results, interrupted))
    say("\n" + render(results, interrupted))
    held = "what is promised does NOT hold" if violated else "everything promised holds"
    say(f"{held}; {file}, {time.time() - started:.0f} s")
    return 1 if violated else 0


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
    run_concurrently(jobs, context, on_start=lambda job: say(f"start {variants[job]}"), on_end=on_end)
    return [ended[variant] for variant in plan.variants]


def _find_ties(plan: ParityPlan, context: LaunchContext, reference: Run, run: Run, step: int) -> str:
    """As `FindTies`: both are launched again, for their parameters before the step."""
    from llm_pretrain.checkpoints import folder_name, open_model
    from llm_pretrain.commands._parity_ties import find_ties

    before, kept = str(step - 1), str(max(2, plan.steps))
    if step == 1 or context.machine.gpus:  # the same parameters; a CPU's passes do not choose as a GPU's
        return ""
    say(f"again  {reference.variant} and {run.variant}, whose choices of experts differ at step {step}")
    options = ("--checkpoint.save_steps", before, "--checkpoint.keep_last", kept)
    variants = [reference.variant, run.variant]
    jobs = [_job(plan, each, f"{each.name}-step-{before}", *options) for each in variants]
    missing = [job for job in jobs if not job.folder.exists()]
    run_concurrently(missing, context, on_start=lambda job: None, on_end=lambda started, exit_code: None)
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
        checkpoint, rows_before = newest_checkpoint(job.folder), len(written_steps(job))
        done = run_until(job, context, None if step is None else partial(has_row, step=step))
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


def render(results: Sequence[Result], interrupted: InterruptedResult | None) -> str:
    """The table, and below it a line or more about each run that differs, failed or was not compared."""
    rows: list[Sequence[str]] = [
        ("path", "mesh", "W", "A", "B", "precision", "verdict", "against", "largest difference")
    ]
    details: list[str] = []
    for each in results:
        variant, against, verdict = each.run.variant, each.against, each.comparison.verdict
        shown = "reference" if each.is_reference and verdict == "identical" else verdict
        name = (
            f"{against.path} {against.mesh} W={against.world_size} A={against.accumulation}"
            if against
            else ""
        )
        split = map(str, variant.split)
        largest = _largest(each.comparison)
        rows.append((variant.path, variant.mesh, *split, variant.precision, shown, name, largest))
        ended = f"exit code {each.run.exit_code}"
        details += _details(str(variant), each.comparison, each.failure, each.run.log, ended)
    if interrupted:
        comparison = interrupted.comparison
        empty = ("",) * 5
        rows.append(("interrupted", *empty, comparison.verdict, "the first variant", _largest(comparison)))
        for number, attempt in enumerate(interrupted.attempts, start=1):
            details.append(
                f"attempt {number}: {attempt.path} W={attempt.world_size} from step {attempt.first_step} "
                f"(checkpoint {attempt.checkpoint or 'none'}) to {attempt.last_step}"
                f"{', killed' if attempt.killed else ''}"
            )
            if attempt.wrong_start:
                details.append(f"interrupted differs: {attempt.wrong_start}")
        details += _details("interrupted", comparison, interrupted.failure, interrupted.log, "not as planned")
    return "\n".join([as_table(rows), *details])


def as_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _largest(comparison: Comparison) -> str:
    """The largest difference of each kind; empty for identical runs."""
    if comparison.verdict == "identical":
        return ""
    return ", ".join(
        f"{key.removeprefix('train/')} {comparison.largest[key]:.2g}"
        for key in (*KEYS, PARAMETERS)
        if comparison.largest.get(key)
    )


def _details(name: str, comparison: Comparison, failure: Sequence[str], log: Path, ended: str) -> list[str]:
    """Why a run failed or differs, and what of it was not compared."""
    lines = []
    if comparison.verdict == "failed":
        lines = [f"{name} failed, {ended}; its output: {log}", *(f"    {line}" for line in failure)]
    if comparison.first is not None and comparison.first.key != "attempt":
        lines.append(f"{name} differs first at {comparison.first}")
    if comparison.note:
        lines.append(f"{name}: {comparison.note}")
    return lines


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
