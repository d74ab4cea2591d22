"""The result, for people and as parity.json. Nothing is judged here."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llm_pretrain.commands._parity.comparison import Comparison, Difference
from llm_pretrain.commands._parity.contract import KEYS, PARAMETERS
from llm_pretrain.commands._parity.interruption import Attempt
from llm_pretrain.commands._parity.judging import Judged

_VIOLATIONS = ("differs", "failed")


@dataclasses.dataclass
class Interrupted:
    """The row of an interrupted run; `failure` says why an attempt did not go as planned."""

    text: str
    folder: Path
    log: Path
    comparison: Comparison
    attempts: list[Attempt] = dataclasses.field(default_factory=list)
    failure: tuple[str, ...] = ()


def is_violated(judged: Sequence[Judged], interrupted: Interrupted | None) -> bool:
    """Whether anything promised does not hold; a launch that failed is a violation."""
    comparisons = [each.comparison for each in judged]
    comparisons += [interrupted.comparison] if interrupted else []
    return any(each.verdict in _VIOLATIONS for each in comparisons)


def render(judged: Sequence[Judged], interrupted: Interrupted | None) -> str:
    """The table, and under it a line or more about each cell that does not hold or is not compared."""
    rows = [("path", "strategy", "W", "A", "B", "precision", "verdict", "against", "largest difference")]
    for each in judged:
        cell, against = each.run.cell, each.against
        rows.append(
            (
                *(
                    cell.path,
                    cell.strategy,
                    str(cell.world_size),
                    str(cell.accumulation),
                    str(cell.micro_batch_size),
                ),
                *(cell.precision, _verdict(each)),
                f"{against.path} {against.strategy} W={against.world_size} A={against.accumulation}"
                if against
                else "",
                _largest(each.comparison),
            )
        )
    if interrupted:
        shown = interrupted.comparison
        start = "interrupted"
        rows.append((start, "", "", "", "", "", shown.verdict, "the first cell", _largest(shown)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return "\n".join([*lines, *_details(judged, interrupted)])


def _verdict(each: Judged) -> str:
    return (
        "reference"
        if each.is_reference and each.comparison.verdict == "identical"
        else each.comparison.verdict
    )


def _largest(comparison: Comparison) -> str:
    """The largest difference of each kind, unless everything is the same."""
    if comparison.verdict == "identical":
        return ""
    shown = [
        f"{key.removeprefix('train/')} {comparison.largest[key]:.2g}"
        for key in (*KEYS, PARAMETERS)
        if comparison.largest.get(key)
    ]
    return ", ".join(shown)


def _details(judged: Sequence[Judged], interrupted: Interrupted | None) -> list[str]:
    lines = []
    for each in judged:
        name, log = str(each.run.cell), each.run.log
        lines += _explain(name, each.comparison, each.failure, log, f"exit code {each.run.exit_code}")
    if interrupted:
        for number, attempt in enumerate(interrupted.attempts, start=1):
            lines.append(
                f"attempt {number}: {attempt.path} W={attempt.world_size} from step {attempt.first_step} "
                f"(checkpoint {attempt.checkpoint or 'none'}) to {attempt.last_step}"
                f"{', killed' if attempt.killed else ''}"
            )
            if attempt.wrong_start:
                lines.append(f"interrupted differs: {attempt.wrong_start}")
        shown = interrupted.comparison
        lines += _explain("interrupted", shown, interrupted.failure, interrupted.log, "not as planned")
    return lines


def _explain(name: str, comparison: Comparison, failure: Sequence[str], log: Path, ended: str) -> list[str]:
    """Why a cell does not hold, or what of it is not judged."""
    lines = []
    if comparison.verdict == "failed":
        lines.append(f"{name} failed, {ended}; its output: {log}")
        lines += [f"    {line}" for line in failure]
    if comparison.first is not None and comparison.first.key != "attempt":
        lines.append(f"{name} differs first at {comparison.first}")
    if comparison.note:
        lines.append(f"{name}: {comparison.note}")
    return lines


def write_json(
    file: Path, facts: Mapping[str, Any], judged: Sequence[Judged], interrupted: Interrupted | None
) -> None:
    """Write parity.json, whole or not at all."""
    violated = is_violated(judged, interrupted)
    content = {
        "verdict": "violated" if violated else "holds",
        **facts,
        "cells": [_cell(each) for each in judged],
        "interrupted": _interrupted(interrupted) if interrupted else None,
    }
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_text(json.dumps(_plain(content), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(temporary, file)


def _cell(each: Judged) -> dict[str, Any]:
    run = each.run
    return {
        **dataclasses.asdict(run.cell),
        "folder": str(run.folder),
        "log": str(run.log),
        "exit_code": run.exit_code,
        "seconds": round(run.seconds, 1),
        "reference": each.is_reference,
        "compared_with": each.against.name if each.against else None,
        **_compared(each.comparison),
        "failure": list(each.failure),
    }


def _interrupted(interrupted: Interrupted) -> dict[str, Any]:
    return {
        "interrupt": interrupted.text,
        "folder": str(interrupted.folder),
        "log": str(interrupted.log),
        "attempts": [dataclasses.asdict(each) for each in interrupted.attempts],
        **_compared(interrupted.comparison),
        "failure": list(interrupted.failure),
    }


def _compared(comparison: Comparison) -> dict[str, Any]:
    first: Difference | None = comparison.first
    return {
        "verdict": comparison.verdict,
        "first_difference": dataclasses.asdict(first) if first else None,
        "largest_differences": comparison.largest,
        "note": comparison.note,
        "routing_parted_at_step": comparison.parted,
    }


def _plain(value: Any) -> Any:
    """JSON has no infinity: as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
