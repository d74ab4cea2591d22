"""Reads a run's folder for the report and `top`, and formats its numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llm_pretrain.config.yaml_text import read_yaml_file
from llm_pretrain.errors import ConfigError
from llm_pretrain.files import read_json
from llm_pretrain.runs.rows import Row, finite_number, read_metrics, readable_rows, without_lost_work
from llm_pretrain.runs.status import read_replays
from llm_pretrain.text import first_line

_RUN_FILES = ("metrics.jsonl", "status.json", "config.yaml", "attempts.jsonl")
"""A folder with any of these is a run's."""


@dataclass
class RunRecord:
    """The content of a run's folder.

    Args:
        name: The run's name, or the folder's name if the configuration has none.
        config: `config.yaml` by section and field; empty if it is missing or cannot be read.
        status: `status.json`; empty if it is missing or cannot be read.
        attempts: Rows of `attempts.jsonl`, in the order in which the attempts began.
        rows: Rows of `metrics.jsonl` by step, without lost work (`read_metrics`); `moe/load` is an array
            [layers, experts].
        samples: Rows of `samples.jsonl`, without lost work.
        replays: Rows of `replays.jsonl`.
        problems: What could not be read, one line each.
    """

    path: Path
    name: str
    config: dict[str, dict[str, Any]] = field(default_factory=dict)
    status: Row = field(default_factory=dict)
    attempts: list[Row] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    samples: list[Row] = field(default_factory=list)
    replays: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def setting(self, section: str, name: str) -> float | None:
        """A setting that is a finite number, else None."""
        return finite_number(self.config.get(section, {}).get(name))

    @property
    def state(self) -> str:
        """`state` of `status.json`."""
        return str(self.status.get("state") or "unknown")


def fault_lines(status: Mapping[str, Any], *, undone: bool | None = None) -> list[str]:
    """A line for each fault that `training.check_every` has found, from the content of `status.json`.

    Args:
        status: The content.
        undone: True: only faults whose step a later attempt computed again; False: only others; None: all.
    """
    faults = status.get("faults")
    lines = []
    for fault in faults if isinstance(faults, list) else []:
        get = fault.get if isinstance(fault, dict) else {}.get
        ranks = get("ranks")
        shown = " or ".join(map(str, ranks)) if isinstance(ranks, list) else ranks
        is_undone = get("undone") is True
        outcome = ", once" if get("transient") else "; computed again by a later attempt" if is_undone else ""
        if undone is None or undone == is_undone:
            lines.append(f"step {get('step')}, rank {shown}: {get('found')}{outcome}")
    return lines


def read_run(path: Path, *, metrics: bool = True) -> RunRecord:
    """Read a run's folder, also while the run is writing to it; missing files leave their fields empty.

    Args:
        path: The run's folder.
        metrics: Whether to read `metrics.jsonl` and `samples.jsonl`, which grow with the run.

    Raises:
        ConfigError: there is no such folder, or it is not a run's.
        CheckpointError: a line of `metrics.jsonl` before the last is damaged, or the file cannot be read.
    """
    check_run_folder(path)
    run = RunRecord(path, path.resolve().name)
    sections = _read_mapping(path / "config.yaml", read_yaml_file, run.problems)
    run.config = {str(name): dict(each) for name, each in sections.items() if isinstance(each, Mapping)}
    name = run.config.get("run", {}).get("name")
    run.name = name if isinstance(name, str) and name else run.name
    run.status = dict(_read_mapping(path / "status.json", read_json, run.problems))
    run.attempts = [row for _, row in readable_rows(path / "attempts.jsonl", run.problems)]
    run.replays = read_replays(path, run.problems)
    if metrics:
        if (path / "metrics.jsonl").exists():
            starts = attempt_starts(run.attempts, "metrics_bytes")
            run.rows = read_metrics(path / "metrics.jsonl", convert=_compact, starts=starts)
        starts = attempt_starts(run.attempts, "samples_bytes")
        samples = readable_rows(path / "samples.jsonl", run.problems)
        run.samples = list(without_lost_work(samples, starts))
    return run


def attempt_starts(attempts: Iterable[Row], key: str) -> list[tuple[int, int]]:
    """The argument `starts` of `read_metrics`, for the file whose size attempts record as `key`."""
    begun = [(attempt.get(key), attempt.get("step")) for attempt in attempts]
    return [(size, step) for size, step in begun if isinstance(size, int) and isinstance(step, int)]


def check_run_folder(path: Path) -> None:
    """Raise ConfigError unless `path` is a run's folder."""
    if not is_run_folder(path):
        found = "none of these" if path.is_dir() else "a file" if path.exists() else "nothing there"
        files = " or ".join(_RUN_FILES[:3])
        raise ConfigError(f"{path}: expected a run's folder, such as runs/NAME, with {files}, found {found}")


def is_run_folder(path: Path) -> bool:
    """Whether the folder has any file of a training run."""
    return any((path / name).is_file() for name in _RUN_FILES)


def expert_loads(value: object) -> np.ndarray | None:
    """`moe/load` as float32 [layers, experts], NaN for values that are not finite; None if it is no table."""
    try:
        with np.errstate(over="ignore"):
            loads = np.array(value, dtype=np.float32)
    except (TypeError, ValueError, OverflowError):
        return None
    loads = np.where(np.isfinite(loads), loads, np.float32("nan"))
    return loads if loads.ndim == 2 and loads.size else None


def metric_values(rows: Iterable[Row], key: str) -> list[float]:
    """The finite numbers of a metric, oldest first."""
    return [value for row in rows if (value := finite_number(row.get(key))) is not None]


def _compact(row: Row) -> Row:
    """A row with its expert loads as float32: 4 bytes each instead of 32."""
    if "moe/load" in row:
        row["moe/load"] = expert_loads(row["moe/load"])
    return row


def _read_mapping(path: Path, parse: Callable[[Path], Any], problems: list[str]) -> Mapping[str, Any]:
    """The content of a file; empty if it is missing, no mapping or cannot be read."""
    try:
        content = parse(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} cannot be read: {first_line(error)}")
        return {}
    return content if isinstance(content, Mapping) else {}
