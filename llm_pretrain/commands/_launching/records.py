"""What runs have written: rows by step, their newest checkpoint, the words a log ends with.

Reads only, also while a run goes on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llm_pretrain.checkpoints import is_checkpoint
from llm_pretrain.errors import PretrainError
from llm_pretrain.tracking import read_metrics

_TAIL_LINES, _TAIL_CHARACTERS = 4, 300
_LAUNCHERS_ERRORS = ("ChildFailedError", "CalledProcessError")
"""What torchrun and accelerate raise about a script that failed."""
_NOISE = (
    "=====",
    "-----",
    "~~~~~",
    "<",
    "W1",
    "E1",
    "time ",
    "host ",
    "rank ",
    "exitcode",
    "error_file",
    "To enable",
)
"""How lines of torchrun's own summary begin, which says nothing about the cause."""


def newest_checkpoint(folder: Path) -> int:
    """Step of the newest committed checkpoint of a run; 0 without any."""
    found = [
        int(path.name.removeprefix("step-"))
        for path in (folder / "checkpoints").glob("step-*")
        if path.name.removeprefix("step-").isdecimal() and is_checkpoint(path)
    ]
    return max(found, default=0)


def row_steps(folder: Path) -> list[int]:
    """Steps of the rows in the order in which they were written, over all attempts; torn lines left out."""
    file = folder / "metrics.jsonl"
    if not file.exists():
        return []
    return [json.loads(line)["step"] for line in file.read_bytes().split(b"\n")[:-1]]


def rows_of(folder: Path) -> Mapping[int, Mapping[str, Any]]:
    """Step to row; the later attempt's where a step stands twice; empty where nothing can be read."""
    try:
        return {row["step"]: row for row in read_metrics(folder / "metrics.jsonl")}
    except PretrainError:
        return {}


def last_words(log: Path) -> list[str]:
    """The last lines of a log that name a cause; without such lines, the last ones."""
    try:
        lines = [line.rstrip() for line in log.read_text("utf-8", errors="replace").splitlines()]
    except OSError:
        return []
    lines = [line for line in lines if line.strip() and not line.strip().startswith(_NOISE)]
    causes = [line for line in lines if line.startswith("error: ")] or [
        line for line in lines if "Error: " in line and not any(name in line for name in _LAUNCHERS_ERRORS)
    ]
    last = list(dict.fromkeys(causes))[-_TAIL_LINES:] or lines[-_TAIL_LINES:]
    return [line[:_TAIL_CHARACTERS] for line in last]
