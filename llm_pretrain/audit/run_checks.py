"""Checks that a run's folder is whole, began at the right step, and equals another run's bit for bit."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from llm_pretrain.audit.comparison import Difference, manifest_differences, tensor_differences
from llm_pretrain.checkpoints.folders import committed_folders, folder_name, newest_step
from llm_pretrain.checkpoints.manifest import file_digest, find_damage, read_manifest
from llm_pretrain.errors import PretrainError
from llm_pretrain.export.huggingface import TensorFiles, read_config
from llm_pretrain.runs.monitor import temporary_folders
from llm_pretrain.runs.rows import is_training_row, read_rows
from llm_pretrain.runs.status import read_status


class FolderState(NamedTuple):
    """A run's folder before an attempt.

    Args:
        checkpoint: Step of the newest committed checkpoint, 0 without any.
        rows, starts: Number of lines of metrics.jsonl and attempts.jsonl.
    """

    checkpoint: int
    rows: int
    starts: int


def scan_folder(folder: Path) -> FolderState:
    """The present state of a run's folder; the folder need not exist."""
    rows, starts = (len(_lines(folder / name)) for name in ("metrics.jsonl", "attempts.jsonl"))
    return FolderState(newest_step(folder / "checkpoints"), rows, starts)


def _lines(file: Path) -> list[dict[str, Any]]:
    return list(read_rows(file)) if file.exists() else []


def steps_of_attempt(folder: Path, before: FolderState) -> tuple[list[int], list[int]]:
    """(steps of the training rows since `before`, first steps that attempts.jsonl records since then)."""
    rows, starts = _lines(folder / "metrics.jsonl"), _lines(folder / "attempts.jsonl")
    written = [row["step"] for row in rows[before.rows :] if is_training_row(row)]
    return written, [start["step"] + 1 for start in starts[before.starts :]]


def check_start(folder: Path, before: FolderState) -> Difference | None:
    """Check that an attempt began right after the newest checkpoint, and that its rows omit no step."""
    written, declared = steps_of_attempt(folder, before)
    expected, newest = before.checkpoint + 1, before.checkpoint
    after = f"after the checkpoint of step {newest}" if newest else "without a checkpoint"
    for found in [*declared, *written[:1]]:
        if found != expected:
            return Difference(found, "step", text=f"began at step {found}, expected {expected} {after}")
    for step, due in enumerate(written, start=expected):
        if due != step:
            return Difference(step, "step", text=f"wrote step {due} where step {step} was due")
    return None


def postponed_evaluation(folder: Path) -> int | None:
    """Step of the newest checkpoint if a stop signal left its evaluation to the next attempt, else None."""
    committed = committed_folders(folder / "checkpoints")
    if not committed:
        return None
    run = read_manifest(committed[max(committed)]).run
    return run.step if run.extra.get("evaluation_owed") else None


def check_committed(folder: Path) -> Difference | None:
    """Check that every committed checkpoint and weights folder of a run is whole."""
    for step, path in committed_folders(folder / "checkpoints").items():
        if problems := checkpoint_problems(path, step):
            return Difference(step, "checkpoint", text=f"{path} is damaged: {'; '.join(problems)}")
    for step, path in committed_folders(folder / "weights").items():
        try:
            read_config(path)
            with TensorFiles(path):
                pass
        except PretrainError as error:
            return Difference(step, "weights", text=f"{path} is damaged: {error}")
    return None


def checkpoint_problems(path: Path, step: int) -> list[str]:
    """The reasons why a folder is not a sound checkpoint of `step`, one line each."""
    try:
        content = read_manifest(path)
    except PretrainError as error:
        return [str(error)]
    if content.run.step != step:
        return [f"its manifest says step {content.run.step}"]
    return find_damage(path, content)


def check_end(reference: Path, folder: Path, steps: int) -> Difference | None:
    """Check that a run finished at `steps`, with the reference's checkpoint and weights, tensor by tensor."""
    status = read_status(folder / "status.json")
    found = status.get("state"), status.get("exit_code"), status.get("step")
    if found != ("finished", 0, steps):
        text = f"status.json: expected finished, 0, step {steps}, found {', '.join(map(str, found))}"
        return Difference(steps, "status", text=text)
    if left := temporary_folders(folder):
        return Difference(steps, "temporary", text=f"{folder / left[0]} is left over at the end")
    name = folder_name(steps)
    try:
        violation = _compare_checkpoints(reference / "checkpoints" / name, folder / "checkpoints" / name)
    except PretrainError as error:
        violation = Difference(steps, "checkpoint", text=str(error))
    return violation or _compare_weights(reference / "weights", folder / "weights", steps)


def _compare_checkpoints(reference: Path, found: Path) -> Difference | None:
    left, right = read_manifest(reference), read_manifest(found)
    every = chain(manifest_differences(left, right), tensor_differences(reference, found, left, right))
    if first := next(every, None):
        return replace(first, text=f"{found}: {first.text}, bit for bit")
    return None


def _compare_weights(reference: Path, found: Path, steps: int) -> Difference | None:
    for folder in (folder_name(steps), "best"):
        left, right = (
            {file.name: file for file in path.iterdir()} if path.is_dir() else {}
            for path in (reference / folder, found / folder)
        )
        if not left and not right and folder == "best":
            continue
        if left.keys() != right.keys() or not left:
            name = min(left.keys() ^ right.keys(), default=folder)
            text = f"{found / folder}: expected the reference's files, {name} differs"
            return Difference(steps, "weights", text=text)
        for name, file in left.items():
            if file_digest(file) != file_digest(right[name]):
                text = f"{right[name]}: expected the reference's bytes, found others"
                return Difference(steps, f"weights/{folder}/{name}", text=text)
    return None
