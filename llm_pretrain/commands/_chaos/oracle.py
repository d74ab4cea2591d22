"""What must hold of a run that is killed and started again, however it died: found in its files alone.

It knows rows, checkpoints and folders; it starts and ends no process. Each check returns the first thing that
does not hold, or None.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llm_pretrain.checkpoints import committed_folders, find_damage, read_manifest
from llm_pretrain.commands._chaos.watching import FOLDERS, leftovers, training_steps
from llm_pretrain.commands._parity.contract import SAMPLES
from llm_pretrain.errors import PretrainError
from llm_pretrain.tracking import read_metrics, read_rows

Rows = Mapping[int, Mapping[str, Any]]
_NOT_COMPARED = ("time", "perf/")
"""How keys begin that measure the machine."""


@dataclass(frozen=True)
class Violation:
    """Something that does not hold: what, and where.

    Args:
        text: One line.
        step, key: Where there is one.
    """

    text: str
    step: int | None = None
    key: str | None = None


@dataclass
class Before:
    """A run's folder as an attempt finds it.

    Args:
        checkpoint: Step of the newest committed checkpoint, 0 without.
        weights: Steps of the committed weights.
        rows, starts: Lines of metrics.jsonl and attempts.jsonl.
        leftovers: Temporary folders.
    """

    checkpoint: int = 0
    weights: set[int] = field(default_factory=set)
    rows: int = 0
    starts: int = 0
    leftovers: list[str] = field(default_factory=list)


def look_at(folder: Path) -> Before:
    """What stands in a run's folder now; empty where there is none."""
    steps = [set(committed_folders(folder / name)) for name in FOLDERS]
    return Before(
        checkpoint=max(steps[0], default=0),
        weights=steps[1],
        rows=len(lines_of(folder / "metrics.jsonl")),
        starts=len(lines_of(folder / "attempts.jsonl")),
        leftovers=leftovers(folder),
    )


def lines_of(file: Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl or attempts.jsonl as they were appended; empty where there is no file."""
    return list(read_rows(file)) if file.exists() else []


def began_at(folder: Path, before: Before) -> tuple[int | None, list[int]]:
    """First step of an attempt, and the steps of all of its rows; None where it died before it knew."""
    steps = training_steps(lines_of(folder / "metrics.jsonl")[before.rows :])
    starts = lines_of(folder / "attempts.jsonl")[before.starts :]
    if steps:
        return steps[0], steps
    return (starts[0]["step"] + 1 if starts else None), steps


def check_start(folder: Path, before: Before) -> Violation | None:
    """The attempt goes on right after the newest checkpoint, and its rows leave out no step."""
    first, steps = began_at(folder, before)
    expected = before.checkpoint + 1
    newest = before.checkpoint
    after = f"after the checkpoint of step {newest}" if newest else "without a checkpoint"
    starts = lines_of(folder / "attempts.jsonl")[before.starts :]
    said = [start["step"] + 1 for start in starts] + ([first] if first is not None else [])
    for found in said:
        if found != expected:
            return Violation(f"began at step {found}, expected {expected} {after}", found, "step")
    for number, step in enumerate(steps):
        if step != expected + number:
            text = f"wrote step {step} where step {expected + number} was due"
            return Violation(text, expected + number, "step")
    return None


def check_rows(
    reference: Rows, found: Rows, *, owed: int | None = None, steps: int | None = None
) -> Violation | None:
    """Rows merged by step are the reference's, bit for bit; only times and speeds are left out.

    Of a row's keys the samples come first: what goes in before what comes out.

    Args:
        reference: The run that nobody killed.
        found: The killed one's so far.
        owed: Step whose evaluation a stop signal put off to the next attempt.
        steps: All of them must be there; None: those up to the last.
    """
    last = steps if steps is not None else max(found, default=-1)
    for step in sorted(step for step in {*reference, *found} if step <= last):
        if step not in found or step not in reference:
            where = "there" if step in found else "missing"
            return Violation(f"step {step}: a row is {where}, the reference's is not", step, "row")
        left, right = reference[step], found[step]
        for key in dict.fromkeys([*(key for key in SAMPLES if key in left), *left, *right]):
            if key.startswith(_NOT_COMPARED) or (step == owed and key not in right):
                continue
            expected, value = left.get(key, "missing"), right.get(key, "missing")
            if json.dumps(expected) != json.dumps(value):
                text = f"step {step} {key}: expected {_shown(expected)}, found {_shown(value)}"
                return Violation(text, step, key)
    return None


def rows_of(folder: Path) -> Rows:
    """Rows merged by step, the last attempt's where a step stands twice; empty without a file."""
    file = folder / "metrics.jsonl"
    return {row["step"]: row for row in read_metrics(file)} if file.exists() else {}


def owed_evaluation(folder: Path) -> int | None:
    """Step of the newest checkpoint where its evaluation is still to be made up for."""
    committed = committed_folders(folder / "checkpoints")
    if not committed:
        return None
    run = read_manifest(committed[max(committed)]).run
    return run.step if run.extra.get("evaluation_owed") else None


class Soundness:
    """Whether committed folders are whole; remembers those that it has read."""

    def __init__(self) -> None:
        self._sound: set[tuple[str, int, int]] = set()

    def check(self, folder: Path, *, again: bool = False) -> Violation | None:
        """Every committed checkpoint and every folder of weights; `again` reads known ones once more."""
        for step, path in committed_folders(folder / "checkpoints").items():
            file = path / "manifest.json"
            known = (str(path), file.stat().st_ino, file.stat().st_mtime_ns) if file.exists() else None
            if known in self._sound and not again:
                continue
            problems = _checkpoint_problems(path, step)
            if problems:
                return Violation(f"{path} is damaged: {'; '.join(problems)}", step, "checkpoint")
            if known:
                self._sound.add(known)
        for step, path in committed_folders(folder / "weights").items():
            if problem := _weights_problem(path):
                return Violation(f"{path} is damaged: {problem}", step, "weights")
        return None


def _checkpoint_problems(path: Path, step: int) -> list[str]:
    try:
        content = read_manifest(path)
    except PretrainError as error:
        return [str(error)]
    if content.run.step != step:
        return [f"its manifest says step {content.run.step}"]
    return find_damage(path, content)


def _weights_problem(path: Path) -> str:
    from safetensors import SafetensorError, safe_open

    files = sorted(path.glob("*.safetensors"))
    if not files or not (path / "config.json").is_file():
        return "model.safetensors or config.json is missing"
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            return f"{file.name}: {error}"
    return ""


def check_leftovers(folder: Path, before: Before) -> Violation | None:
    """What an earlier attempt was writing when it died is gone once this one has saved again."""
    now = set(leftovers(folder))
    after = look_at(folder)
    saved = {"checkpoints": after.checkpoint > before.checkpoint, "weights": after.weights - before.weights}
    for name in before.leftovers:
        if name in now and saved[name.split("/")[0]]:
            return Violation(
                f"{folder / name} is of an earlier attempt, and outlived a save", key="temporary"
            )
    return None


def newest(folder: Path) -> int:
    """Step of the newest committed checkpoint, 0 without."""
    return max(committed_folders(folder / "checkpoints"), default=0)


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, float) else str(value)
    return text if len(text) <= 24 else f"{text[:16]}…"
