"""`llm-pretrain parity`: launch a configuration in every way, compare the runs, and say what holds.

It starts the real scripts as a user would and judges by what they wrote; the contract is in
`_parity/contract.py`. It trains nothing in this process.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llm_pretrain.commands._launching.launching import Place
    from llm_pretrain.commands._parity.judging import Judged, Run
    from llm_pretrain.commands._parity.plan import Plan
    from llm_pretrain.commands._parity.table import Interrupted

HELP = "launch a configuration in every way, and compare the runs bit for bit"

EXAMPLES = """\
Every other option is a setting, --section.field VALUE, and goes to every cell.

verdicts: identical, every number at every step the same bits; within bound, the largest differences shown;
differs, with the first step and number; not compared, with the reason; failed, with the end of the output
exit code: 0 where all that is promised holds, 1 where it does not or a launch failed, 2 or 65 for wrong input

examples:
  llm-pretrain parity --config configs/tiny-dense.yaml
  llm-pretrain parity --config configs/quickstart.yaml --precision fp32,bf16 --steps 20
  llm-pretrain parity --config configs/tiny-dense.yaml --accumulation 1,3 --model.hidden_dropout 0.1
  llm-pretrain parity --config configs/tiny-dense.yaml --paths torchrun,accelerate,trainer --world-size 2
  llm-pretrain parity --config configs/tiny-dense.yaml --world-size 2 --strategies ddp,fsdp,deepspeed
  llm-pretrain parity --config configs/tiny-moe.yaml --world-size 1 --interrupt torchrun@2:17,accelerate@1:31
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options, and every setting of the configuration."""
    from llm_pretrain.commands._launching.options import add_place, add_settings

    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "llm-pretrain parity --config FILE [options] [--section.field VALUE ...]"
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add(
        "--config",
        action="append",
        required=True,
        metavar="FILE",
        help="as for the scripts; the later file wins",
    )
    add("--paths", default="torchrun,accelerate", metavar="LIST",
        help="of torchrun, accelerate, trainer (default: %(default)s)")  # fmt: skip
    add("--world-size", "--world_size", metavar="LIST", help="numbers of processes (default: 1,2)")
    add("--accumulation", metavar="LIST",
        help="accumulation steps; the micro batch size follows (default: it follows from the configuration's "
             "micro batch size)")  # fmt: skip
    add("--precision", metavar="LIST", help="of fp32, bf16, fp16 (default: the configuration's)")
    add("--strategies", metavar="LIST",
        help="of ddp, fsdp, deepspeed (default: the configuration's)")  # fmt: skip
    add(
        "--steps",
        type=int,
        metavar="K",
        help="optimizer steps of each run (default: 20, or the configuration's)",
    )
    add("--interrupt", metavar="PATH@W:STEP,...",
        help="also kill a run of the first cell after STEP, and go on with PATH on W processes")  # fmt: skip
    add_place(parser, "parity", "a launch")
    add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    """Launch, compare, print the table and write parity.json; 0 where all that is promised holds, else 1."""
    from llm_pretrain.commands._launching.launching import ending_on_sigterm
    from llm_pretrain.commands._launching.machine import call_facts, this_machine
    from llm_pretrain.commands._launching.options import check_timeout
    from llm_pretrain.commands._parity.judging import judge
    from llm_pretrain.commands._parity.plan import make_plan
    from llm_pretrain.commands._parity.table import is_violated, render, write_json

    check_timeout(arguments)
    started, machine = time.time(), this_machine()
    plan = make_plan(arguments, machine)
    # a name of our own choice that another call took a moment ago must not be shared with it
    plan.output.mkdir(parents=True, exist_ok=arguments.output is not None)
    place = _place(plan, machine, arguments.timeout)
    _say(
        f"{len(plan.cells)} runs of {plan.steps} steps in {plan.output}, {plan.threads} "
        f"{'thread' if plan.threads == 1 else 'threads'} per process"
    )
    for note in plan.notes:
        _say(f"note   {note}")
    with ending_on_sigterm():
        judged = judge(_run_cells(plan, place), plan.config, plan.steps)
        interrupted = _interrupted(plan, place, arguments.interrupt, judged) if plan.interruptions else None
    facts = call_facts(
        arguments, machine, started=started, threads=plan.threads, scripts=plan.scripts, steps=plan.steps,
        notes=plan.notes, config=plan.config,
    )  # fmt: skip
    write_json(plan.output / "parity.json", facts, judged, interrupted)
    violated = is_violated(judged, interrupted)
    _say("\n" + render(judged, interrupted))
    held = "what is promised does NOT hold" if violated else "everything promised holds"
    _say(f"{held}; {plan.output / 'parity.json'}, {time.time() - started:.0f} s")
    return 1 if violated else 0


def _run_cells(plan: Plan, place: Place) -> list[Run]:
    """Launch every cell, with a line of progress for each; in the order of the table."""
    from llm_pretrain.commands._launching.launching import Job, Launched, run_side_by_side
    from llm_pretrain.commands._parity.judging import Run

    jobs = {
        cell: Job(
            cell.path, cell.world_size, plan.output / cell.name, plan.output / f"{cell.name}.log",
            plan.options_of(cell), plan.threads, cell.strategy,
        )
        for cell in plan.cells
    }  # fmt: skip
    cell_of = {job: cell for cell, job in jobs.items()}
    ended: dict[Any, Run] = {}

    def on_end(launched: Launched, exit_code: int) -> None:
        job, seconds = launched.job, time.monotonic() - launched.started
        cell = cell_of[job]
        ended[cell] = Run(cell, job.folder, job.log, exit_code, seconds, launched.timed_out)
        how = f"{plan.steps} steps in {seconds:.0f} s" if exit_code == 0 else f"FAILED, {job.log}"
        _say(f"[{len(ended)}/{len(jobs)}] {cell}: {how}")

    # Few processes first, so that they lie side by side.
    in_order = sorted(jobs.values(), key=lambda job: job.world_size)
    run_side_by_side(in_order, place, on_start=lambda job: _say(f"start {cell_of[job]}"), on_end=on_end)
    return [ended[cell] for cell in plan.cells]


def _interrupted(plan: Plan, place: Place, text: str, judged: list[Judged]) -> Interrupted:
    """Run the first cell again with its interruptions, and compare it with the run that nobody stopped."""
    from llm_pretrain.commands._launching.launching import Job
    from llm_pretrain.commands._parity.comparison import Comparison
    from llm_pretrain.commands._parity.interruption import LaunchError, run_interrupted
    from llm_pretrain.commands._parity.judging import judge_interrupted, last_words
    from llm_pretrain.commands._parity.table import Interrupted

    first, folder, log = plan.cells[0], plan.output / "interrupted", plan.output / "interrupted.log"
    options = (*plan.options_of(first), "--checkpoint.save_steps", str(plan.save_steps))
    starts = [(first.path, first.world_size), *((each.path, each.world_size) for each in plan.interruptions)]
    jobs = [Job(path, size, folder, log, options, plan.threads, first.strategy) for path, size in starts]
    reference = judged[0].run
    try:
        attempts = run_interrupted(jobs, [each.step for each in plan.interruptions], place, _say)
    except LaunchError as error:
        return Interrupted(text, folder, log, Comparison("failed"), failure=(str(error), *last_words(log)))
    if reference.failed:
        comparison = Comparison("not compared", note="the first cell failed")
    else:
        comparison = judge_interrupted(reference, folder, attempts, plan.config, plan.steps)
    return Interrupted(text, folder, log, comparison, attempts)


def _place(plan: Plan, machine: Any, timeout_seconds: float) -> Place:
    from llm_pretrain.commands._launching.accelerate_files import settings_for, write_settings
    from llm_pretrain.commands._launching.launching import Place

    files = {}
    stage, on_gpu = plan.config.distributed.zero_stage, machine.gpus > 0
    for strategy, size in plan.accelerate_launches:
        settings = settings_for(strategy, stage, size, on_gpu=on_gpu, scripts=plan.scripts)
        file = plan.output / f"accelerate-{strategy}-w{size}.yaml"
        files[strategy, size] = write_settings(settings, file)
    return Place(plan.scripts, machine, files, timeout_seconds)


def _say(line: str) -> None:
    print(line, flush=True)
