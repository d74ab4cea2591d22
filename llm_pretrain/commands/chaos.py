"""`llm-pretrain chaos`: kill a run again and again, and say whether it ends as the run that nobody killed.

It starts the real scripts as a user would and judges by what they wrote. It trains nothing in this process.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llm_pretrain.commands._chaos.plan import Plan
    from llm_pretrain.commands._launching.launching import Place

HELP = "kill a run again and again; it must end as the run that nobody killed, bit for bit"

EXAMPLES = """\
Every other option is a setting, --section.field VALUE, and goes to every launch.

deaths: group, SIGKILL of launcher and workers at once; rank, of one worker (rank:1, of that one), after
which the launcher must end within 60 s; launcher, of the launcher alone, after which no worker may live on
for 30 s; term, a stop signal. Rows, sample digests, parameters, every tensor of the last checkpoint and every
file of the weights must be the other run's; every attempt must begin right after the newest checkpoint.
exit code: 0 where this holds, 1 where it does not or less was shown than asked for, 2 or 65 for wrong input

examples:
  llm-pretrain chaos --config configs/tiny-dense.yaml --kills 3 --steps 12
  llm-pretrain chaos --config configs/tiny-moe.yaml --kills 50 --seed 1 --in-save 10
  llm-pretrain chaos --config configs/tiny-moe.yaml --paths torchrun --world-size 2 --kinds rank:1,launcher
  llm-pretrain chaos --config configs/tiny-moe.yaml --kinds group,term --async-save --model.hidden_dropout 0.1
  llm-pretrain chaos --config configs/tiny-moe.yaml --seed 2 --reference runs/chaos-tiny-moe/reference
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options, and every setting of the configuration."""
    from llm_pretrain.commands._launching.options import add_place, add_settings

    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "llm-pretrain chaos --config FILE [options] [--section.field VALUE ...]"
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add(
        "--config",
        action="append",
        required=True,
        metavar="FILE",
        help="as for the scripts; the later file wins",
    )
    add("--kills", type=int, default=10, metavar="N", help="how often it is killed (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="S",
        help="of moments and kinds of death (default: %(default)s)")  # fmt: skip
    add("--kinds", default="group,rank,launcher", metavar="LIST",
        help="of group, rank, rank:R, launcher, term (default: %(default)s)")  # fmt: skip
    add("--in-save", "--in_save", type=int, metavar="K",
        help="at least so many fall into a save (default: a quarter)")  # fmt: skip
    add("--paths", default="torchrun,accelerate", metavar="LIST",
        help="launchers, taking turns (default: %(default)s)")  # fmt: skip
    add("--world-size", "--world_size", metavar="W", help="processes of every attempt (default: 2)")
    add("--steps", type=int, metavar="K", help="optimizer steps (default: so many that all kills have room)")
    add("--save-steps", "--save_steps", type=int, metavar="K",
        help="steps between saves (default: 4, or fewer in a short run)")  # fmt: skip
    add("--async-save", "--async_save", action="store_true",
        help="save while training goes on (checkpoint.async_save)")  # fmt: skip
    add("--reference", metavar="FOLDER", help="a finished run of the same settings to compare with again")
    add_place(parser, "chaos", "an attempt")
    add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    """Launch, kill, compare, print a line per kill and write chaos.json; 0 where all that was asked holds."""
    from llm_pretrain.commands._chaos.plan import make_plan
    from llm_pretrain.commands._chaos.running import Result, run_chaos
    from llm_pretrain.commands._chaos.table import attempt_line, heading, summary, write_json
    from llm_pretrain.commands._launching.launching import ending_on_sigterm
    from llm_pretrain.commands._launching.machine import call_facts, this_machine
    from llm_pretrain.commands._launching.options import check_timeout

    check_timeout(arguments)
    started, machine = time.time(), this_machine()
    plan = make_plan(arguments, machine)
    # a name of our own choice that another call took a moment ago must not be shared with it
    plan.output.mkdir(parents=True, exist_ok=arguments.output is not None)
    place = _place(plan, machine, arguments.timeout)
    _say(
        f"{len(plan.kills)} kills in {plan.steps} steps, a save every {plan.save_steps}, "
        f"seed {arguments.seed}; W={plan.world_size}, in {plan.output}"
    )
    for note in plan.notes:
        _say(f"note   {note}")
    result = Result(plan.reference or plan.output / "reference", plan.output / "killed")
    try:
        with ending_on_sigterm():
            first = [heading(plan)]
            run_chaos(
                plan, place, result, say=_say,
                on_attempt=lambda death: _say("\n".join([*_taken(first), attempt_line(death, plan)])),
            )  # fmt: skip
    finally:
        facts = call_facts(
            arguments, machine, started=started, threads=plan.threads, scripts=plan.scripts, steps=plan.steps,
            notes=plan.notes, config=plan.config,
        )  # fmt: skip
        write_json(plan.output / "chaos.json", {"seed": arguments.seed, **facts}, result, plan)
    for line in ["", *summary(result, plan)]:
        _say(line)
    held = {
        "holds": "it ended as the run that nobody killed",
        "violated": "what is promised does NOT hold",
        "not shown": "nothing wrong was seen, and not all was shown",
    }[result.verdict]
    _say(f"{held}; {plan.output / 'chaos.json'}, {time.time() - started:.0f} s")
    return 0 if result.verdict == "holds" else 1


def _taken(lines: list[str]) -> list[str]:
    """The lines, the first time that they are asked for."""
    taken, lines[:] = list(lines), []
    return taken


def _place(plan: Plan, machine: Any, timeout_seconds: float) -> Place:
    from llm_pretrain.commands._launching.accelerate_files import settings_for, write_settings
    from llm_pretrain.commands._launching.launching import Place

    files, distributed = {}, plan.config.distributed
    if "accelerate" in plan.paths:
        settings = settings_for(
            distributed.strategy, distributed.zero_stage, plan.world_size, on_gpu=machine.gpus > 0,
            scripts=plan.scripts,
        )  # fmt: skip
        file = write_settings(settings, plan.output / "accelerate.yaml")
        files[distributed.strategy, plan.world_size] = file
    return Place(plan.scripts, machine, files, timeout_seconds)


def _say(line: str) -> None:
    print(line, flush=True)
