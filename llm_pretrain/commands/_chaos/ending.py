"""Whether two finished runs ended the same: status, tensors of the last checkpoint, files of the weights.

Memory is one tensor at a time. Rows are compared elsewhere.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from llm_pretrain.checkpoints import Manifest, read_manifest, read_tensors
from llm_pretrain.commands._chaos.oracle import Violation, newest
from llm_pretrain.commands._chaos.watching import leftovers
from llm_pretrain.errors import EXIT_PREEMPTED, PretrainError

_CARD = "README.md"
_NOT_COMPARED = ("launcher", "wandb_id")
"""Facts of a run in its checkpoint that say who trained it, not what came of it."""


def check_end(reference: Path, folder: Path, steps: int, *, same_call: bool) -> Violation | None:
    """The first thing in which a killed run's end is not the reference's; None where there is none.

    Args:
        reference, folder: The two runs.
        steps: Of both.
        same_call: Whether both ran with the same settings; else the model card may say another name.
    """
    status = read_status(folder)
    found = (status.get("state"), status.get("exit_code"), status.get("step"))
    if found != ("finished", 0, steps):
        text = f"status.json: expected finished, 0, step {steps}, found {', '.join(map(str, found))}"
        return Violation(text, steps, "status")
    if left := leftovers(folder):
        return Violation(f"{folder / left[0]} is left over at the end", steps, "temporary")
    name = f"step-{steps:08d}"
    return _compare_checkpoints(
        reference / "checkpoints" / name, folder / "checkpoints" / name, steps
    ) or _compare_weights(reference / "weights", folder / "weights", steps, cards=same_call)


def check_stop(folder: Path, last_step: int | None) -> Violation | None:
    """A stop signal loses nothing: the last step that has a row is in a checkpoint, and status.json says so.

    Args:
        folder: The run's, that a signal stopped.
        last_step: Of the attempt's rows; without any it had not begun, and promises nothing.
    """
    if last_step is None:
        return None
    saved = newest(folder)
    if saved != last_step:
        text = f"a stop signal after step {last_step} left step {saved} as the newest checkpoint"
        return Violation(f"{text}; is a step and its save longer than a launcher waits?", last_step, "step")
    status = read_status(folder)
    found = (status.get("state"), status.get("exit_code"), status.get("step"))
    if found not in (("preempted", EXIT_PREEMPTED, last_step), ("finished", 0, last_step)):
        text = f"status.json: expected preempted, 75, step {last_step}, found {', '.join(map(str, found))}"
        return Violation(text, last_step, "status")
    return None


def read_status(folder: Path) -> dict[str, Any]:
    """What status.json says; empty where it cannot be read."""
    try:
        return dict(json.loads((folder / "status.json").read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _compare_checkpoints(reference: Path, found: Path, steps: int) -> Violation | None:
    try:
        left, right = read_manifest(reference), read_manifest(found)
        if problem := _different_facts(left, right):
            return Violation(f"{found}: {problem}", steps, "checkpoint")
        if left.files == right.files:  # the same bytes, whose digests were compared with the files
            return None
        if tensor := _different_tensor(left, right, reference, found):
            text = f"step {steps}: the checkpoint's tensor {tensor} is not the reference's, bit for bit"
            return Violation(text, steps, tensor)
    except PretrainError as error:
        return Violation(str(error), steps, "checkpoint")
    return None


def _different_facts(left: Manifest, right: Manifest) -> str:
    """The first thing that two manifests say differently of their state; empty where there is none."""
    pairs: dict[str, tuple[Any, Any]] = {
        "tensors": (left.tensors, right.tensors),
        "scalars": (left.scalars, right.scalars),
        "optimizer": (left.optimizer, right.optimizer),
        "scaler": (left.scaler, right.scaler),
        **{
            name: (value, getattr(right.run, name))
            for name, value in vars(left.run).items()
            if name not in _NOT_COMPARED
        },
    }
    for name, (expected, value) in pairs.items():
        if expected != value:
            return f"{name}: expected {_shown(expected)}, found {_shown(value)}"
    return ""


def _different_tensor(left: Manifest, right: Manifest, reference: Path, found: Path) -> str:
    import torch

    for name, facts in left.tensors.items():
        pair = []
        for path, content in ((reference, left), (found, right)):
            tensor = torch.empty(facts["shape"], dtype=getattr(torch, facts["dtype"]))
            read_tensors({name: tensor}, path, sorted(content.files), world_size=1)
            pair.append(tensor.contiguous().view(-1).view(torch.uint8))
        if not torch.equal(*pair):
            return name
    return ""


def _compare_weights(reference: Path, found: Path, steps: int, *, cards: bool) -> Violation | None:
    for folder in (f"step-{steps:08d}", "best"):
        left, right = reference / folder, found / folder
        files = [{f.name: f for f in path.iterdir()} if path.is_dir() else {} for path in (left, right)]
        if not files[0] and not files[1] and folder == "best":
            continue
        if files[0].keys() != files[1].keys() or not files[0]:
            names = sorted(files[0].keys() ^ files[1].keys()) or [folder]
            return Violation(f"{right}: expected the reference's files, {names[0]} differs", steps, "weights")
        for name, file in files[0].items():
            if (cards or name != _CARD) and _digest(file) != _digest(files[1][name]):
                text = f"{files[1][name]}: expected the reference's bytes, found others"
                return Violation(text, steps, f"weights/{folder}/{name}")
    return None


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
