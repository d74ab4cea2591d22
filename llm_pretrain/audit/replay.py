"""Executes a run's steps again from its checkpoints, and compares the results."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Mapping, Sequence
from typing import Any

from llm_pretrain.audit.segment_comparison import SegmentResult, compare_segment
from llm_pretrain.audit.segments import Leg, ReplayPlan, Segment, rows_of_segment
from llm_pretrain.checkpoints.folders import folder_name
from llm_pretrain.config.loading import dump_yaml
from llm_pretrain.errors import PretrainError
from llm_pretrain.launch.jobs import Job, LaunchContext, last_error_lines, run_until
from llm_pretrain.launch.options import as_options, say
from llm_pretrain.runs.attempts import read_attempts
from llm_pretrain.runs.monitor import RunMonitor
from llm_pretrain.runs.record import HELD

_NEVER = (1 << 31) - 1


def replay_segment(plan: ReplayPlan, segment: Segment, context: LaunchContext) -> SegmentResult:
    """Execute a segment's legs one after another, and compare what they wrote with the run."""
    began = time.monotonic()

    def not_replayed(note: str) -> SegmentResult:
        seconds = time.monotonic() - began
        return SegmentResult("not replayed", segment=segment, note=note, seconds=seconds)

    if not segment.legs:
        return not_replayed(segment.missing)
    found = plan.rows(segment)
    folder = plan.output / segment.name
    if back := [step for step, row in found.items() if row.get("train/skipped") == "rollback"]:
        # the replay saves at other steps, and would go back to another one
        return not_replayed(f"step {back[0]} was rolled back (training.spike_action)")
    for number, leg in enumerate(segment.legs, start=1):
        job = _job(plan, segment, leg, number)
        say(f"start  steps {leg.first}-{leg.last}: {leg}, as attempt {leg.attempt.number}")
        own = dataclasses.replace(context, zero_stage=leg.config.distributed.zero_stage)
        failure = run_leg(job, own, leg.last, saves=_is_saved(segment, leg))
        if failure:
            if segment.source is not None and not segment.source.exists():
                return not_replayed(f"{segment.source} was deleted meanwhile")
            seconds = time.monotonic() - began
            return SegmentResult("failed", segment=segment, failure=tuple(failure), seconds=seconds)
    try:
        environments = [attempt.environment for attempt in read_attempts(folder)][-len(segment.legs) :]
        replayed = rows_of_segment(folder / "metrics.jsonl", segment)
        result = compare_segment(segment, replayed, found, folder, environments)
    except PretrainError as error:
        result = SegmentResult("failed", segment=segment, failure=tuple(error.lines()))
    result.seconds = time.monotonic() - began
    if result.verdict in HELD:
        for name in ("checkpoints", "weights"):
            shutil.rmtree(folder / name, ignore_errors=True)
    return result


def _is_saved(segment: Segment, leg: Leg) -> bool:
    """Whether a leg ends with a checkpoint: it is compared, the next leg needs it, or no row is due."""
    is_needed = segment.target is not None or leg is not segment.legs[-1]
    return is_needed or leg.last % leg.config.logging.logging_steps != 0


def _job(plan: ReplayPlan, segment: Segment, leg: Leg, number: int) -> Job:
    """The launch of a leg; writes the leg's settings to a file beside its log."""
    folder = plan.output / segment.name
    file = plan.output / f"{segment.name}{'' if number == 1 else f'-{number}'}.yaml"
    file.write_text(dump_yaml(leg.config))
    options: dict[str, object] = {"checkpoint.save_steps": leg.last if _is_saved(segment, leg) else _NEVER}
    if segment.source is not None:  # the next leg continues from the checkpoint that this one saves
        options[f"checkpoint.{'resume' if segment.start else 'start_from'}"] = segment.source.resolve()
    return Job(
        leg.path, leg.world_size, folder, folder.with_suffix(".log"),
        ("--config", str(file), *as_options(options)), leg.config.distributed.cpu_threads or 1,
        leg.config.distributed.strategy,
    )  # fmt: skip


def run_leg(job: Job, context: LaunchContext, last: int, *, saves: bool) -> list[str]:
    """Launch a leg, and end all its processes once the state after step `last` is written.

    Left alone, the leg would train on: the schedule depends on `training.max_steps`, which stays unchanged.

    Args:
        job: What to launch.
        context: Where to launch it.
        last: The leg's last step.
        saves: Whether to wait for the checkpoint of step `last`; if False, for its row only.

    Returns:
        Why the leg ended before step `last`, with the end of its output; empty if it reached the step.
    """
    monitor, checkpoint = RunMonitor(job.folder), job.folder / "checkpoints" / folder_name(last)

    def is_done() -> bool:
        monitor.update()
        return checkpoint.is_dir() if saves else (monitor.last_step or 0) >= last

    ((started, code),) = run_until([job], context, lambda _: is_done())
    if is_done():
        return []
    how = f"no end after {started.seconds:.0f} s, killed" if started.timed_out else f"exit code {code}"
    return [f"{how} before step {last}; its output: {job.log}", *last_error_lines(job.log)]


def verdict_of(plan: ReplayPlan, results: Sequence[SegmentResult]) -> str:
    """`holds`, `violated` or `not shown`."""
    if any(each.violated for each in results):
        return "violated"
    held = [each for each in results if each.verdict in HELD]
    return "holds" if len(held) == len(plan.segments) else "not shown"


def replay_record(
    facts: Mapping[str, Any], plan: ReplayPlan, results: Sequence[SegmentResult]
) -> dict[str, Any]:
    """The line for the run's replays.jsonl; `facts` describe the call."""
    legs = [leg for each in results for leg in each.segment.legs]
    segments = []
    for each in results:
        first: dict[str, Any] | None = None
        if each.first is not None:
            step = each.segment.end if each.first.step is None else each.first.step
            first = {"step": step, "name": each.first.key or each.first.text}
        elif each.tensors or each.facts:
            other = each.tensors[0].key if each.tensors else each.facts[0].text
            first = {"step": each.segment.end, "name": other}
        facts_of = {"verdict": each.verdict, "first": first, "tensors": each.compared}
        segments.append({"start": each.segment.start, "end": each.segment.end, **facts_of})
    return {
        "time": time.time(),
        "verdict": verdict_of(plan, results),
        "segments": segments,
        "segments_of_run": plan.of,
        "seed": plan.seed,
        "launchers": sorted({leg.path for leg in legs}),
        "world_sizes": sorted({leg.world_size for leg in legs}),
        **{key: facts[key] for key in ("git_revision", "settings")},
    }


def result_content(
    facts: Mapping[str, Any], plan: ReplayPlan, results: Sequence[SegmentResult]
) -> dict[str, Any]:
    """Content of replay.json; `facts` describe the call."""
    return {
        "verdict": verdict_of(plan, results),
        "run": str(plan.run),
        "seed": plan.seed,
        "segments_of_run": plan.of,
        **facts,
        "segments": [each.as_dict() for each in results],
    }
