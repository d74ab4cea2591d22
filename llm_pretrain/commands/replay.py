"""`llm-pretrain replay`: execute a run's steps again from its checkpoints, and compare the results."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path

from llm_pretrain.audit.replay import replay_record, replay_segment, result_content, verdict_of
from llm_pretrain.audit.segment_comparison import SegmentResult, render_difference
from llm_pretrain.audit.segments import make_plan
from llm_pretrain.launch.jobs import RESUMABLE_PATHS, exit_on_signals, this_machine
from llm_pretrain.launch.options import (
    add_run_options,
    add_settings,
    call_facts,
    create_output,
    say,
    write_result,
)
from llm_pretrain.runs.status import record_replay
from llm_pretrain.text import as_table, reason_of

EXAMPLES = """\
RUN is only read, except that the verdict is added: a line of its replays.jsonl, and status.json once it has
ended. Every other option is a setting, --section.field VALUE, and replaces the run's: the stores' folders on
this machine, say. Of --checkpoint, resume alone can be given.

verdicts of a segment, the steps between two checkpoints that are kept: identical, every number of every row
and, where one is kept, of the checkpoint the same bits; within bound, where hardware, versions, mesh or
number of processes differ; differs, with the first step and number, and the tensors; not compared; failed;
not replayed
exit code: 0 where all that is promised holds, 1 where it does not or less was replayed than asked for, 2 or
65 for wrong input

examples:
  llm-pretrain replay runs/quickstart
  llm-pretrain replay runs/quickstart --from 300 --to 400
  llm-pretrain replay runs/quickstart --sample 2 --seed 1
  llm-pretrain replay copied/run --data.sources '[{store: data/stores/stdlib}]' --launcher accelerate
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options, and every setting of the configuration."""
    parser.usage = "llm-pretrain replay RUN [options] [--section.field VALUE ...]"
    parser.set_defaults(config=None)
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="folder of a run: finished, stopped, running, or copied")
    add("--from", dest="start", type=int, metavar="S",
        help="begin after step S, or at the nearest earlier checkpoint (default: 0)")  # fmt: skip
    add("--to", dest="end", type=int, metavar="T", help="end after step T (default: the run's last)")
    add("--sample", type=int, metavar="K", help="replay K of the segments, picked at random")
    add("--seed", type=int, metavar="N", help="of --sample (default: drawn, and printed)")
    add("--launcher", choices=RESUMABLE_PATHS, help="for all steps (default: as the run was launched)")
    add("--world-size", "--world_size", type=int, metavar="W",
        help="processes for all steps (default: as many as the run had)")  # fmt: skip
    add("--no-record", action="store_true", help="do not write the verdict into RUN")
    add_run_options(parser, "replay", "a launch", timeout=math.inf)
    add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    """Launch, compare, print the table and write replay.json; returns 0 if every segment holds."""
    started, machine = time.time(), this_machine()
    plan = make_plan(arguments, machine)
    context = create_output(plan, arguments, machine)
    say(f"{len(plan.segments)} of {plan.of} segments, {plan.steps} steps, of {plan.run} in {plan.output}")
    for note in plan.notes:
        say(f"note   {note}")
    results: list[SegmentResult] = []
    file = plan.output / "replay.json"
    try:
        with exit_on_signals():
            for segment in plan.segments:
                results.append(replay_segment(plan, segment, context))
                result = results[-1]
                done = f"[{len(results)}/{len(plan.segments)}]"
                say(f"{done} {segment}: {result.verdict}, {result.seconds:.0f} s")
    finally:
        facts = call_facts(plan, arguments, machine, started)
        write_result(file, result_content(facts, plan, results))
        if results and not arguments.no_record:
            try:
                record_replay(plan.run, replay_record(facts, plan, results))
            except OSError as error:
                say(f"note   {plan.run}: the verdict cannot be written there: {reason_of(error)}")
    say("\n" + render(results))
    bounds = " within the bounds named" if any(each.largest for each in results) else ""
    verdict = verdict_of(plan, results)
    conclusion = {
        "holds": f"the steps replayed are what the run says{bounds}",
        "violated": "the run is NOT what its settings, data and seed give",
        "not shown": "nothing wrong was found, but less was replayed than asked for",
    }[verdict]
    say(f"{conclusion}; {file}, {time.time() - started:.0f} s")
    return 0 if verdict == "holds" else 1


def render(results: Sequence[SegmentResult]) -> str:
    """The table, then lines about each segment that is not identical."""
    rows: list[Sequence[str]] = [("steps", "launched as", "rows", "checkpoint", "verdict")]
    details: list[str] = []
    for each in results:
        segment = each.segment
        legs = ", ".join(dict.fromkeys(map(str, segment.legs)))
        steps = f"{segment.start + 1}-{segment.end}"
        rows.append((steps, legs, str(each.rows or ""), _checkpoint_cell(each), each.verdict))
        details += render_difference(each)
    return "\n".join([as_table(rows), *details])


def _checkpoint_cell(result: SegmentResult) -> str:
    if result.segment.target is None:
        return "none kept"
    if result.compared is None:
        return ""
    if result.tensors:
        return f"{len(result.tensors)} of {result.compared} tensors differ"
    return f"{result.compared} tensors"
