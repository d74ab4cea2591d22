"""Reads a run's folder, its replays included, for the report and `top`, and formats its numbers."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from llm_pretrain.config.yaml_text import read_yaml_file
from llm_pretrain.errors import ConfigError
from llm_pretrain.files import read_json
from llm_pretrain.runs.rows import Row, finite_number, read_metrics, readable_rows, without_lost_work
from llm_pretrain.text import first_line

_RUN_FILES = ("metrics.jsonl", "status.json", "config.yaml", "attempts.jsonl")
"""A folder with any of these is a run's."""
REPLAYS_FILE = "replays.jsonl"
HELD = ("identical", "within bound")
"""Verdicts of a segment whose steps follow from the run's settings, data and seed."""


def this_host() -> str:
    """Name of the machine and, on Linux, of the container: a process id means something in both alone."""
    namespace = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()} {namespace.stat().st_ino}" if namespace.exists() else socket.gethostname()


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
    def last_loss(self) -> float | None:
        """The loss of an ended run's last step, which may have no row."""
        return finite_number(self.status.get("loss"))

    @property
    def state(self) -> str:
        """`state` of `status.json`; `killed` for a `running` process of this machine that is no more."""
        state, pid = str(self.status.get("state") or "unknown"), self.status.get("pid")
        is_here = self.status.get("host") == this_host()
        is_gone = is_here and isinstance(pid, int) and not psutil.pid_exists(pid)
        return "killed" if state == "running" and is_gone else state


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


def read_replays(folder: Path, problems: list[str] | None = None) -> list[Row]:
    """The recorded replays of a run, oldest first; each line that is no replay is added to `problems`."""
    problems = [] if problems is None else problems
    found = readable_rows(folder / REPLAYS_FILE, problems, _parsed_replay, "a replay")
    return [replay for _, replay in found]


def _parsed_replay(line: bytes) -> Row | None:
    """The replay in a line; None if the line has none."""
    try:
        replay = json.loads(line)
        time.gmtime(replay["time"])  # verify shows the time
        segments = replay["segments"]
        is_sound = all(0 <= each["start"] < each["end"] and each["verdict"] for each in segments)
    except (ValueError, TypeError, KeyError, OverflowError, OSError, RecursionError):
        return None
    return replay if is_sound else None


def replay_differences(replays: Iterable[Mapping[str, Any]]) -> list[Row]:
    """The segments in which a replay and the run differ, oldest first.

    If a later replay finds all steps of such a segment identical, the earlier replay was wrong. The later one
    must have compared a checkpoint too if the earlier one did.
    """
    found: list[Row] = []
    for segment in _segments(replays):
        if segment["verdict"] == "identical":
            found = [each for each in found if not _clears(segment, each)]
        elif segment["verdict"] == "differs":
            found.append(segment)
    return found


def difference_lines(replays: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line for each segment of `replay_differences`, with the first step and number that differ."""
    lines = []
    for each in replay_differences(replays):
        first = each.get("first")
        at = f", first at step {first.get('step')}: {first.get('name')}" if isinstance(first, dict) else ""
        lines.append(f"steps {each['start'] + 1}-{each['end']} differ{at}")
    return lines


def replay_summary(replays: Sequence[Mapping[str, Any]], last: int | None) -> str:
    """How many of the run's steps up to `last` were replayed, and with which verdicts, in words."""
    spans: list[tuple[int, int, str]] = []
    again = [*_segments(replays), *replay_differences(replays)]
    for new in (each for each in again if each["verdict"] in (*HELD, "differs")):
        start, end, kept = new["start"], new["end"], list[tuple[int, int, str]]()
        for a, b, verdict in spans:
            pieces = ((a, min(b, start), verdict), (max(a, end), b, verdict))
            kept += [piece for piece in pieces if piece[0] < piece[1]]
        spans = [*kept, (start, end, new["verdict"])]
    counts = {word: sum(b - a for a, b, verdict in spans if verdict == word) for word in (*HELD, "differs")}
    counts = {word: count for word, count in counts.items() if count}
    of = "" if last is None else f" of {last:,}"
    numbers = len(counts) > 1
    words = [f"{count:,} " * numbers + word.replace("differs", "differ") for word, count in counts.items()]
    return f"{sum(counts.values()):,}{of} steps replayed" + (f": {', '.join(words)}" if words else "")


def replay_status(replays: Sequence[Mapping[str, Any]]) -> Row:
    """The entries of `status.json` about recorded replays; empty if there are none."""
    if not replays:
        return {}
    last = {key: replays[-1].get(key) for key in ("time", "verdict")}
    return {"replays": {"count": len(replays), "last": last, "differences": difference_lines(replays)}}


def _segments(replays: Iterable[Mapping[str, Any]]) -> list[Row]:
    return [segment for replay in replays for segment in replay["segments"]]


def _clears(later: Row, found: Row) -> bool:
    covers = later["start"] <= found["start"] and found["end"] <= later["end"]
    return covers and (later.get("tensors") is not None or found.get("tensors") is None)
