"""The result, for people and as chaos.json. Nothing is judged here."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llm_pretrain.commands._chaos.plan import Plan
from llm_pretrain.commands._chaos.running import Death, Result

_COLUMNS = ("kill", "launcher", "death", "moment", "began at", "committed", "gone in", "verdict")


def heading(plan: Plan) -> str:
    """The columns' names."""
    return _line(_COLUMNS, plan)


def attempt_line(death: Death, plan: Plan) -> str:
    """One attempt as a row of the table."""
    kill, attempt = death.kill, death.attempt
    new = death.checkpoint_after > death.checkpoint_before
    return _line(
        (
            f"{death.number}/{len(plan.kills)}" if attempt.fired else "end",
            attempt.path,
            _death(death) if kill and attempt.fired else "",
            death.moment,
            "-" if death.began_at is None else str(death.began_at),
            f"step {death.checkpoint_after}" if new else "-",
            "" if attempt.ended_within is None else f"{attempt.ended_within:.1f} s",
            "VIOLATED" if death.violation else "ok",
        ),
        plan,
    )


def _line(cells: tuple[str, ...], plan: Plan) -> str:
    digits = len(str(plan.steps))
    widths = (2 * len(str(len(plan.kills))) + 1, 10, 8, 19 + digits, 8, 5 + digits, 7, 8)
    return "  ".join(cell.ljust(max(width, len(name))) for cell, width, name in
                     zip(cells, widths, _COLUMNS, strict=True)).rstrip()  # fmt: skip


def _death(death: Death) -> str:
    kill = death.kill
    assert kill is not None
    return f"rank {kill.rank}" if kill.kind == "rank" else kill.kind


def summary(result: Result, plan: Plan) -> list[str]:
    """What was shown, or the first thing that does not hold."""
    kinds = Counter(_death(death).split()[0] for death in result.killed)
    shares = ", ".join(f"{count} {name}" for name, count in sorted(kinds.items()))
    lines = [
        f"{len(result.killed)} of {len(plan.kills)} kills ({shares or 'none'}), {result.in_save} in a save, "
        f"{result.committing} after a new checkpoint"
    ]
    if result.violation:
        who, violation = result.violation
        lines.append(f"{who}: {violation.text}")
    if result.missing:
        lines.append(f"not shown: {result.missing}")
    return lines


def write_json(file: Path, facts: Mapping[str, Any], result: Result, plan: Plan) -> None:
    """Write chaos.json, whole or not at all."""
    violation = None
    if result.violation:
        who, what = result.violation
        violation = {"where": who, **dataclasses.asdict(what)}
    content = {
        "verdict": result.verdict,
        **facts,
        "world_size": plan.world_size,
        "paths": plan.paths,
        "save_steps": plan.save_steps,
        "eval_steps": plan.eval_steps,
        "reference": str(result.reference),
        "folder": str(result.folder),
        "kills_asked": len(plan.kills),
        "kills": len(result.killed),
        "in_save_asked": plan.in_save,
        "in_save": result.in_save,
        "after_a_new_checkpoint": result.committing,
        "violation": violation,
        "missing": result.missing,
        "attempts": [_attempt(death) for death in result.deaths],
    }
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
    os.replace(temporary, file)


def _attempt(death: Death) -> dict[str, Any]:
    attempt = death.attempt
    return {
        "number": death.number,
        "path": attempt.path,
        "killed": attempt.fired,
        "kill": dataclasses.asdict(death.kill) if death.kill else None,
        "aimed_at": str(death.target) if death.target else None,
        "moment": death.moment,
        "in_save": attempt.in_save,
        "began_at": death.began_at,
        "last_step": attempt.last_step,
        "checkpoint_before": death.checkpoint_before,
        "checkpoint_after": death.checkpoint_after,
        "exit_code": attempt.exit_code,
        "seconds": round(attempt.seconds, 2),
        "ended_within": attempt.ended_within,
        "verdict": "violated" if death.violation else "ok",
        "violation": dataclasses.asdict(death.violation) if death.violation else None,
    }
