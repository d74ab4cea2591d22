"""`llm-pretrain chaos`: kill a run repeatedly, and check that it ends bit for bit as an uninterrupted run."""

from __future__ import annotations

import argparse
import time

from llm_pretrain.audit.chaos import KILLS, ChaosResult, make_plan, result_content, run_chaos
from llm_pretrain.launch.jobs import exit_on_signals, this_machine
from llm_pretrain.launch.options import (
    add_configuration,
    add_run_options,
    call_facts,
    create_output,
    say,
    write_result,
)

EXAMPLES = """\
Every other option is a setting, --section.field VALUE, and applies to every launch.

The run is killed in a step, at its start-up and in a save, once under each launcher, and continued each time
by the next of --paths. --kill all: SIGKILL to launcher and workers at once; rank: to one worker, after which
the launcher must end within 60 s; launcher: to the launcher alone, after which all workers must end within
30 s. Rows, sample digests, parameters, every tensor of the last checkpoint and every file of the weights must
be those of the uninterrupted run; every attempt must begin right after the newest checkpoint.
exit code: 0 where this holds, 1 where it does not or a kill missed its place, 2 or 65 for wrong input

examples:
  llm-pretrain chaos --config configs/tiny-dense.yaml
  llm-pretrain chaos --config configs/tiny-moe.yaml --kill rank --checkpoint.async_save true
  llm-pretrain chaos --config configs/tiny-moe.yaml --paths torchrun --steps 12 --model.hidden_dropout 0.1
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options, and every setting of the configuration."""
    add_configuration(parser, "chaos")
    add_run_options(parser, "chaos", "an attempt")
    add = parser.add_argument
    add("--kill", choices=KILLS, default="all", help="what is killed (default: %(default)s)")
    add("--paths", default="torchrun,accelerate", metavar="LIST",
        help="launchers, used in turn (default: %(default)s)")  # fmt: skip
    add("--world-size", "--world_size", metavar="W", help="processes of every attempt (default: 2)")
    add("--steps", type=int, metavar="K", help="optimizer steps (default: 32, for one launcher 20)")


def run(arguments: argparse.Namespace) -> int:
    """Launch, kill, compare, print a line per attempt, write chaos.json; returns 0 if every check passed."""
    started, machine = time.time(), this_machine()
    plan = make_plan(arguments, machine)
    context, result = create_output(plan, arguments, machine), ChaosResult()
    say(
        f"{len(plan.places)} kills ({plan.kill}) in {plan.steps} steps, a save every {plan.save_steps}; "
        f"W={plan.world_size}, in {plan.output}"
    )
    for note in plan.notes:
        say(f"note   {note}")
    file = plan.output / "chaos.json"
    try:
        with exit_on_signals():
            run_chaos(plan, context, result, say=say)
    finally:
        write_result(file, result_content(call_facts(plan, arguments, machine, started), result, plan))
    say("\n".join(["", *result.summary]))
    held = {
        "holds": "the killed run ended as the uninterrupted run, bit for bit",
        "violated": "what is promised does NOT hold",
        "not shown": "nothing wrong was found, but less was shown than asked for",
    }[result.verdict]
    say(f"{held}; {file}, {time.time() - started:.0f} s")
    return 0 if result.verdict == "holds" else 1
