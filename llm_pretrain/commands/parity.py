"""`llm-pretrain parity`: launch a configuration in every way, and compare the runs bit for bit."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from llm_pretrain.audit.comparison import KEYS, PARAMETERS, Comparison
from llm_pretrain.audit.parity import VariantResult, is_violated, launch_and_compare, result_content
from llm_pretrain.audit.variants import make_plan
from llm_pretrain.launch.jobs import exit_on_signals, this_machine
from llm_pretrain.launch.options import (
    add_configuration,
    add_run_options,
    call_facts,
    create_output,
    say,
    write_result,
)
from llm_pretrain.text import as_table

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
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options, and every setting of the configuration."""
    add_configuration(parser, "parity")
    add_run_options(parser, "parity", "a launch")
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


def run(arguments: argparse.Namespace) -> int:
    """Launch, compare, print the table and write parity.json; returns 0 if all runs agree, else 1."""
    started, machine = time.time(), this_machine()
    plan = make_plan(arguments, machine)
    context = create_output(plan, arguments, machine)
    threads = f"{plan.threads} {'thread' if plan.threads == 1 else 'threads'} per process"
    say(f"{len(plan.variants)} runs of {plan.steps} steps in {plan.output}, {threads}")
    for note in plan.notes:
        say(f"note   {note}")
    with exit_on_signals():
        results = launch_and_compare(plan, context)
    violated = is_violated(results)
    file = plan.output / "parity.json"
    facts = call_facts(plan, arguments, machine, started)
    write_result(file, result_content(facts, results))
    say("\n" + render(results))
    held = "what is promised does NOT hold" if violated else "everything promised holds"
    say(f"{held}; {file}, {time.time() - started:.0f} s")
    return 1 if violated else 0


def render(results: Sequence[VariantResult]) -> str:
    """The table, then one or more lines about each run that differs, failed or was not compared."""
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
        details += _details(str(variant), each.comparison, each.run.error_lines, each.run.log, ended)
    return "\n".join([as_table(rows), *details])


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
    """Why a run failed or differs, and what was not compared."""
    lines = []
    if comparison.verdict == "failed":
        lines = [f"{name} failed, {ended}; its output: {log}", *(f"    {line}" for line in failure)]
    if comparison.first is not None:
        lines.append(f"{name} differs first at {comparison.first.text}")
    if comparison.note:
        lines.append(f"{name}: {comparison.note}")
    return lines
