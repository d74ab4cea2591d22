"""Compares the rows and the checkpoint of a replayed segment with the run's, bit for bit or within bounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llm_pretrain.audit.comparison import (
    PARAMETERS,
    SAMPLES,
    Comparison,
    Difference,
    Rows,
    Tolerance,
    add_parameters_distance,
    compare_rows,
    exact_differences,
    manifest_differences,
    parameters_distance,
    tensor_differences,
    tolerance_of,
)
from llm_pretrain.audit.history_checks import spans
from llm_pretrain.audit.run_checks import checkpoint_problems
from llm_pretrain.audit.segments import Leg, Segment
from llm_pretrain.audit.variants import Variant
from llm_pretrain.checkpoints.manifest import read_manifest
from llm_pretrain.errors import PretrainError
from llm_pretrain.hardware import arithmetic_changes
from llm_pretrain.runs.record import HELD
from llm_pretrain.runs.rows import is_training_row

EXACT = (*SAMPLES, "train/tokens", "train/learning_rate")
"""Keys whose values are equal bit for bit on any hardware, mesh and number of processes."""
_NOT_COMPARED = ("extra.best", "extra.evaluation_owed", "extra.started_from")
"""Entries of a manifest that a replay cannot match: it keeps no best weights, and no stop signal ends its
evaluations."""
_EVALUATION = ("extra.evaluation", "extra.evaluation_step")
_NO_ARITHMETIC = ("cpu_threads", "timeout_seconds")
"""Settings of `distributed` that are no part of a mesh; the environment has the number of threads too."""


@dataclass(kw_only=True)
class SegmentResult(Comparison):
    """Result of replaying a segment, and of comparing it with the run.

    Args:
        segment: The planned segment.
        rows: Number of rows compared.
        columns: All keys that differ in the first differing row.
        other_rows: Steps of all rows that differ.
        facts: Entries of the checkpoint's manifest that differ, or the checkpoint's damage.
        tensors: Tensors that differ.
        compared: Number of tensors compared; None if only rows were compared.
        failure: Last lines of the log of a failed launch.
        seconds: Duration of all launches of the segment.
    """

    segment: Segment
    rows: int = 0
    columns: list[str] = field(default_factory=list)
    other_rows: list[int] = field(default_factory=list)
    facts: list[Difference] = field(default_factory=list)
    tensors: list[Difference] = field(default_factory=list)
    compared: int | None = None
    failure: tuple[str, ...] = ()
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        segment = self.segment
        legs = [
            {name: getattr(leg, name) for name in ("first", "last", "path", "world_size")}
            | {"attempt": leg.attempt.number}
            for leg in segment.legs
        ]
        names = ("rows", "columns", "other_rows", "compared", "failure")
        return {
            "start": segment.start,
            "end": segment.end,
            "legs": legs,
            **super().as_dict(),
            **{name: getattr(self, name) for name in names},
            "facts": [each.text for each in self.facts],
            "tensors": [each.text for each in self.tensors],
            "seconds": round(self.seconds, 1),
        }


def compare_segment(
    segment: Segment, replayed: Rows, found: Rows, folder: Path, environments: Sequence[Mapping[str, Any]]
) -> SegmentResult:
    """Compare a replayed segment with the run.

    Args:
        segment: The segment, with its legs.
        replayed, found: Rows of the segment's steps, from the replay and from the run.
        folder: Folder of the replay.
        environments: Environments of the replay's launches, one for each leg.

    Raises:
        PretrainError: a file of the replay cannot be read.
    """
    lost = segment.target if segment.target and not segment.target.exists() else None
    if lost:  # compare as if the checkpoint had not been kept
        segment = dataclasses.replace(segment, target=None)
    result = _compare_kept(segment, replayed, found, folder, environments)
    if lost and result.verdict in HELD:
        result.verdict = "not compared"
    elif result.verdict == "identical" and not (replayed or result.compared):
        result.verdict, result.note = "not compared", "no row and no checkpoint of these steps is kept"
    if lost:
        note = f"{lost} was deleted meanwhile: rows alone are compared"
        result.note = "; ".join(filter(None, [result.note, note]))
    return result


def _compare_kept(
    segment: Segment, replayed: Rows, found: Rows, folder: Path, environments: Sequence[Mapping[str, Any]]
) -> SegmentResult:
    """Compare a segment with no target, or with a target that exists."""
    result = SegmentResult("identical", segment=segment, rows=len(replayed))
    target = segment.target
    problems = checkpoint_problems(target, segment.end) if target else []
    facts = read_manifest(target) if target and not problems else None
    owed = segment.end if facts and facts.run.extra.get("evaluation_owed") else None
    result.first = next(exact_differences(replayed, found, owed=owed, steps=segment.end), None)
    for step in sorted({*replayed, *found}) if result.first else ():
        left, right = replayed.get(step, {}), found.get(step, {})
        differing = {each.key for each in exact_differences({step: left}, {step: right}, owed=owed)}
        if columns := [key for key in {**left, **right} if key in differing]:
            result.columns = result.columns or columns
            result.other_rows.append(step)
    if problems:
        text = f"{target} is damaged: {'; '.join(problems)}"
        result.facts = [Difference(segment.end, "checkpoint", text=text)]
    elif facts and target:
        left_out = (*_NOT_COMPARED, *(() if owed is None else _EVALUATION))
        own = folder / "checkpoints" / target.name
        saved = read_manifest(own)
        result.facts = list(manifest_differences(saved, facts, left_out))
        result.compared = len({**saved.tensors, **facts.tensors})
        result.tensors = list(tensor_differences(own, target, saved, facts))
    if not (result.first or result.facts or result.tensors):
        return result
    result.verdict = "differs"
    reasons = [
        reason
        for leg, environment in zip(segment.legs, environments, strict=True)
        for reason in inexact_because(leg, environment)
    ]
    if reasons and not problems:
        kinds = {
            _is_of_gpu(each) for each in (*environments, *(leg.attempt.environment for leg in segment.legs))
        }
        reasons = list(dict.fromkeys(reasons))
        _compare_within_bounds(result, replayed, found, folder, reasons, on_other_device=len(kinds) > 1)
    return result


def inexact_because(leg: Leg, environment: Mapping[str, Any]) -> list[str]:
    """Why identical bits are not promised for a leg; empty if they are.

    `environment` is the environment of the leg's replay.
    """
    then, config = leg.attempt, leg.config
    assert then.config is not None
    reasons = arithmetic_changes(then.environment, environment, "in the run")
    if then.world_size != leg.world_size:
        reasons.append(f"the run had {then.world_size} processes, the replay {leg.world_size}")
    meshes = [
        {
            name: value
            for name, value in dataclasses.asdict(each.distributed).items()
            if name not in _NO_ARITHMETIC
        }
        for each in (then.config, config)
    ]
    reasons += [
        f"distributed.{name} was {value} in the run and is {meshes[1][name]}"
        for name, value in meshes[0].items()
        if value != meshes[1][name]
    ]
    sizes = [each.training.micro_batch_size for each in (then.config, config)]
    if sizes[0] != sizes[1]:
        reasons.append(f"training.micro_batch_size was {sizes[0]} in the run and is {sizes[1]}")
    if _is_of_gpu(environment) and not then.config.training.deterministic:
        reasons.append("training.deterministic was false in the run, on a GPU")
    return reasons


def _is_of_gpu(environment: Mapping[str, Any]) -> bool:
    return environment.get("cpu_capability") is None


def _compare_within_bounds(
    result: SegmentResult,
    replayed: Rows,
    found: Rows,
    folder: Path,
    reasons: Sequence[str],
    *,
    on_other_device: bool,
) -> None:
    """Compare again, within the bounds for another split of the batch, and change `result` accordingly."""
    segment = result.segment
    steps = segment.end - segment.start
    tolerance = _tolerance(segment, steps)
    model = segment.legs[0].config.model
    if on_other_device and (model.attention_dropout or model.hidden_dropout):
        tolerance = Tolerance(SAMPLES, note="another kind of device draws another dropout")
    tolerance = dataclasses.replace(tolerance, start=segment.start + 1)
    rows = [{step: row for step, row in each.items() if is_training_row(row)} for each in (replayed, found)]
    due = sorted({*rows[0], *rows[1]})
    comparison = compare_rows(rows[0], rows[1], segment.end, tolerance, due=due)
    exact = [
        {step: {key: row[key] for key in EXACT if key in row} for step, row in each.items()} for each in rows
    ]
    first = next(exact_differences(*exact, steps=segment.end), None)
    if segment.target is not None and first is None:
        try:
            distance = parameters_distance(folder, segment.target.parent.parent, segment.end)
            add_parameters_distance(comparison, distance, segment.end, tolerance)
        except PretrainError as error:
            text = f"parameters of step {segment.end}: {error}"
            first = Difference(segment.end, PARAMETERS, text=text)
    result.first = first = first or comparison.first
    result.largest = comparison.largest
    result.columns, result.other_rows = [], []
    result.facts, result.tensors, result.compared = [], [], None
    is_bounded = bool(tolerance.bounds)
    result.verdict = "differs" if first else "within bound" if is_bounded else "not compared"
    result.note = "; ".join(filter(None, [*reasons, result.note, comparison.note]))


def _tolerance(segment: Segment, steps: int) -> Tolerance:
    """The tolerance between the run's split of the batch and the replay's, by the segment's first leg."""
    leg = segment.legs[0]
    assert leg.attempt.config is not None
    then, now = (
        Variant(
            leg.path,
            size,
            config.gradient_accumulation_steps(size),
            config.training.micro_batch_size,
            config.training.precision,
            mesh,
        )
        for config, size, mesh in (
            (leg.attempt.config, leg.attempt.world_size, "run"),
            (leg.config, leg.world_size, "replay"),
        )
    )
    return tolerance_of(now, then, leg.config, steps)


def render_difference(result: SegmentResult, shown: int = 4) -> list[str]:
    """Lines about a segment that differs, failed or was not replayed, and why bits are not promised."""
    segment = result.segment
    lines = []
    if result.verdict == "failed":
        lines += [f"{segment} failed:", *(f"    {line}" for line in result.failure)]
    if result.first is not None:
        lines.append(f"{segment} differ first at {result.first.text}")
        if result.other_rows:
            rows = f"rows that differ: {spans(result.other_rows)}, {len(result.other_rows)} of {result.rows}"
            more = len(result.columns) - shown
            columns = ", ".join(result.columns[:shown]) + (f" and {more} more" if more > 0 else "")
            lines.append(f"    {rows}; columns of the first: {columns}")
    if result.tensors:
        lines.append(
            f"checkpoint of step {segment.end}: {len(result.tensors)} of {result.compared} tensors differ"
        )
    for found in (result.facts, result.tensors):
        more = len(found) - shown
        lines += [f"    {each.text}" for each in found[:shown]]
        lines += [f"    and {more} more"] if more > 0 else []
    if result.note:
        lines.append(f"{segment}: {result.note}")
    if found := {key.removeprefix("train/"): each for key, each in result.largest.items() if each}:
        shares = ", ".join(f"{key} {each:.2g}" for key, each in found.items())
        lines.append(f"    largest relative differences: {shares}")
    return lines
