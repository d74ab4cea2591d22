"""A run's folder, read for people: the report and `top` draw from this.

Reading is forgiving where a running process may be writing, and strict where the truth would be bent:
a damaged line in the midst of metrics.jsonl is an error. Nothing is written here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llm_pretrain.config import YamlError, read_yaml_file
from llm_pretrain.errors import ConfigError
from llm_pretrain.tracking.metrics import read_metrics

Row = dict[str, Any]

_MARKS = ("metrics.jsonl", "status.json", "config.yaml", "attempts.jsonl")
"""Any of these makes a folder a run's."""


@dataclass
class RunRecord:
    """What a run's folder holds.

    Args:
        path: The folder.
        name: The run's name, or the folder's where the configuration does not say.
        config: `config.yaml` by section and field; empty where it is missing or cannot be read.
        status: `status.json`; empty likewise.
        attempts: Rows of `attempts.jsonl`, in the order in which the attempts began.
        rows: Rows of `metrics.jsonl` by step; `moe/load` is an array [layers, experts].
        samples: Rows of `samples.jsonl`.
        problems: What could not be read, one line each.
    """

    path: Path
    name: str
    config: dict[str, dict[str, Any]] = field(default_factory=dict)
    status: Row = field(default_factory=dict)
    attempts: list[Row] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    samples: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def number(self, section: str, name: str) -> float | None:
        """A setting that is a finite number, else None."""
        return number(self.config.get(section, {}).get(name))


def read_run(path: Path, *, metrics: bool = True) -> RunRecord:
    """Everything that a run's folder tells; what is missing stays empty.

    Args:
        path: The run's folder.
        metrics: Whether to read `metrics.jsonl` and `samples.jsonl`, which grow with the run.

    Raises:
        ConfigError: there is no such folder, or it is no run's.
        CheckpointError: a line in the midst of `metrics.jsonl` is damaged, or the file cannot be read.
    """
    check_run_folder(path)
    run = RunRecord(path, path.resolve().name)
    run.config = _config(path / "config.yaml", run.problems)
    name = run.config.get("run", {}).get("name")
    run.name = name if isinstance(name, str) and name else run.name
    run.status = _json(path / "status.json", run.problems)
    run.attempts = _lines(path / "attempts.jsonl", run.problems)
    if metrics:
        if (path / "metrics.jsonl").exists():
            run.rows = read_metrics(path / "metrics.jsonl", convert=_compact)
        run.samples = _lines(path / "samples.jsonl", run.problems)
    return run


def check_run_folder(path: Path) -> None:
    """Raises ConfigError unless `path` is a run's folder."""
    if not path.is_dir():
        found = "a file" if path.exists() else "nothing there"
        raise ConfigError(f"{path}: expected a run's folder, such as runs/NAME, found {found}")
    if not is_run_folder(path):
        raise ConfigError(
            f"{path}: expected a run's folder (with {' or '.join(_MARKS[:3])}), found none of these; "
            "name the folder that run.output_dir says"
        )


def is_run_folder(path: Path) -> bool:
    """Whether a training run has left anything in the folder."""
    return any((path / name).is_file() for name in _MARKS)


def number(value: object) -> float | None:
    """A finite number, else None."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value if abs(value) < 1 << 63 else None  # JSON has larger ones, no column of ours has
    return value if isinstance(value, float) and math.isfinite(value) else None


def expert_loads(value: object) -> np.ndarray | None:
    """`moe/load` as float32 [layers, experts], NaN for null; None where it is no such table."""
    try:
        loads = np.array(value, dtype=np.float32)
    except (TypeError, ValueError):
        return None
    return loads if loads.ndim == 2 and loads.size else None


def _compact(row: Row) -> Row:
    """A row whose expert loads take 4 bytes each instead of 32."""
    if "moe/load" in row:
        row["moe/load"] = expert_loads(row["moe/load"])
    return row


def _config(path: Path, problems: list[str]) -> dict[str, dict[str, Any]]:
    try:
        tree = read_yaml_file(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, YamlError) as error:
        problems.append(f"{path.name} cannot be read: {str(error).splitlines()[0]}")
        return {}
    sections = tree if isinstance(tree, Mapping) else {}
    return {str(name): dict(fields) for name, fields in sections.items() if isinstance(fields, Mapping)}


def _json(path: Path, problems: list[str]) -> Row:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} cannot be read: {str(error).splitlines()[0]}")
        return {}
    return content if isinstance(content, dict) else {}


def _lines(path: Path, problems: list[str]) -> list[Row]:
    """The objects of a file of JSON lines; a torn last line goes unmentioned, another bad line does not."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror}")
        return []
    rows = []
    for index, line in enumerate(lines[:-1], start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            problems.append(f"{path.name}: line {index} is no JSON object and is left out")
    return rows
