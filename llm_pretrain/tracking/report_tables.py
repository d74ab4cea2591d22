"""The tables of a report: a run in brief, its attempts, its skipped steps, its samples, its settings.

Everything is text, not yet escaped: the page's template escapes it.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from llm_pretrain.config import Config, to_dict
from llm_pretrain.tracking.report_data import training_seconds
from llm_pretrain.tracking.run_files import Row, RunRecord, number

SAMPLES = 12
"""Steps of which the samples are shown."""
SKIPPED = 50
"""Skipped steps that are listed."""
PLACES = {"run.name", "run.output_dir", "checkpoint.resume"}
"""Settings that say where a run lies and not what it does."""


@dataclasses.dataclass(frozen=True)
class Table:
    """Column heads and rows of text."""

    heads: list[str]
    rows: list[list[str]]


def brief(run: RunRecord) -> dict[str, str]:
    """What a run is and where it stands, by label; unknown entries are left out."""
    attempt = run.attempts[-1] if run.attempts else {}
    losses = _values(run.rows, "train/loss")
    evaluations = [(row["eval/loss"], row["step"]) for row in run.rows if _known(row, "eval/loss")]
    bits = _values(run.rows, "eval/bits_per_byte")
    speeds = sorted(_values(run.rows, "perf/tokens_per_second"))
    tokens = _values(run.rows, "train/tokens")
    seconds = training_seconds(run)
    best = min(evaluations, default=None)
    parameters, active = number(attempt.get("parameters")), number(attempt.get("active_parameters"))
    size = None if parameters is None else f"{quantity(parameters)}"
    if size and active and active != parameters:
        size += f" ({quantity(active)} active)"
    skipped = sum(bool(row.get("train/skipped")) for row in run.rows)
    entries = {
        "Step": _progress(run),
        "Parameters": size,
        "Tokens": quantity(tokens[-1]) if tokens else None,
        "Training time": duration(seconds) if seconds is not None else None,
        "Training loss": f"{losses[-1]:.4f}" if losses else None,
        "Best evaluation loss": f"{best[0]:.4f} at step {best[1]:,}" if best else None,
        "Bits per byte": f"{bits[-1]:.4f}" if bits else None,
        "Tokens per second": f"{quantity(speeds[len(speeds) // 2])} (median)" if speeds else None,
        "Skipped steps": f"{skipped:,}" if skipped else None,
        "Hardware": _hardware(attempt),
        "Versions": _versions(attempt),
    }
    return {label: text for label, text in entries.items() if text}


def state_of(run: RunRecord) -> str:
    """The run's state in a word."""
    return str(run.status.get("state") or "unknown")


def last_step(run: RunRecord) -> int | None:
    """The newest step that the run has told of."""
    steps = [run.rows[-1]["step"]] if run.rows else []
    steps += [step] if isinstance(step := run.status.get("step"), int) else []
    return max(steps, default=None)


def attempts_table(run: RunRecord) -> Table | None:
    """One row per attempt, None for a run without any."""
    rows: list[list[str]] = []
    before: Row = {}
    for attempt in run.attempts:
        found = attempt.get("versions")
        versions: Row = found if isinstance(found, dict) else {}
        changes = [
            f"{name} {before[name]} → {versions[name]}"
            for name in versions
            if name in before and before[name] != versions[name]
        ]
        rows.append(
            [
                moment(attempt.get("time")),
                _text(attempt.get("step")),
                _text(attempt.get("launcher")),
                _text(attempt.get("world_size")),
                _text(attempt.get("device")),
                "; ".join(changes) or "–",
            ]
        )
        before = versions
    heads = ["Started (UTC)", "From step", "Launcher", "Processes", "Device", "Changed since"]
    return Table(heads, rows) if rows else None


def skipped_table(run: RunRecord) -> Table | None:
    """The last skipped steps and logged spikes, None for a run without any."""
    skipped = [row for row in run.rows if row.get("train/skipped") or row.get("train/spike")]
    rows = [
        [f"{row['step']:,}", _reason(row), _number(row.get("train/loss_scale"))] for row in skipped[-SKIPPED:]
    ]
    return Table(["Step", "Reason", "Loss scale"], rows) if rows else None


def _reason(row: Mapping[str, Any]) -> str:
    """Why a step was skipped, and of what it was a spike."""
    reason = str(row.get("train/skipped") or "not skipped")
    return f"{reason} (spike in {row['train/spike']})" if row.get("train/spike") else reason


def samples(run: RunRecord) -> list[dict[str, Any]]:
    """`{step, texts: [{prompt, text}]}` of evenly chosen steps, newest first."""
    by_step: dict[int, dict[str, str]] = {}
    for row in run.samples:
        if isinstance(row.get("step"), int):
            by_step.setdefault(row["step"], {})[_text(row.get("prompt"))] = _text(row.get("text"))
    steps = sorted(by_step)
    if len(steps) > SAMPLES:
        steps = sorted({steps[round(i * (len(steps) - 1) / (SAMPLES - 1))] for i in range(SAMPLES)})
    return [
        {"step": step, "texts": [{"prompt": prompt, "text": text} for prompt, text in by_step[step].items()]}
        for step in reversed(steps)
    ]


def settings_table(runs: Sequence[RunRecord], names: Sequence[str]) -> Table | None:
    """What differs: one run's settings from the defaults, several runs' from each other."""
    flat = [_flat(run.config) for run in runs]
    if not any(flat):
        return None
    if len(runs) == 1:
        defaults = _flat(to_dict(Config()))
        rows = [
            [name, _setting(value), _setting(defaults[name]) if name in defaults else "–"]
            for name, value in flat[0].items()
            if name not in PLACES and (name not in defaults or defaults[name] != value)
        ]
        return Table(["Setting", "This run", "Default"], rows)
    rows = []
    for name in dict.fromkeys(name for settings in flat for name in settings):
        values = [_setting(settings[name]) if name in settings else "–" for settings in flat]
        if name not in PLACES and len(set(values)) > 1:
            rows.append([name, *values])
    return Table(["Setting", *names], rows)


def quantity(value: float) -> str:
    """`12.3k`, `4.56M`."""
    for unit in ("", "k", "M", "B"):
        if abs(value) < 1000:
            return f"{value:.3g}{unit}" if unit else f"{value:.4g}"
        value /= 1000
    return f"{value:.3g}T"


def duration(seconds: float) -> str:
    """`1 h 05 min`, `12 min 30 s`, `45 s`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours:
        return f"{hours:,} h {minute:02d} min"
    return f"{minute} min {second:02d} s" if minute else f"{second} s"


def moment(seconds: object) -> str:
    """A Unix time as `2030-01-31 12:00:00`, UTC."""
    known = number(seconds)
    try:
        return "–" if known is None else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(known))
    except (OverflowError, ValueError, OSError):
        return "–"


def _progress(run: RunRecord) -> str | None:
    step, most = last_step(run), run.number("training", "max_steps")
    if step is None:
        return None
    return f"{step:,} of {most:,.0f}" if most else f"{step:,}"


def _hardware(attempt: Row) -> str | None:
    if not attempt:
        return None
    processes, device, launcher = (_text(attempt.get(key)) for key in ("world_size", "device", "launcher"))
    return f"{processes} × {device}, {launcher}"


def _versions(attempt: Row) -> str | None:
    versions = attempt.get("versions")
    if not isinstance(versions, Mapping):
        return None
    known = [f"{name} {versions[name]}" for name in ("llm_pretrain", "torch", "python") if versions.get(name)]
    revision = versions.get("git_revision")
    if isinstance(revision, str):
        known.append(f"git {revision[:10]}{'-dirty' if revision.endswith('-dirty') else ''}")
    return ", ".join(known)


def _values(rows: Sequence[Row], key: str) -> list[float]:
    return [row[key] for row in rows if _known(row, key)]


def _known(row: Row, key: str) -> bool:
    return number(row.get(key)) is not None


def _flat(tree: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{section}.{name}": value for section, fields in tree.items() for name, value in fields.items()}


def _setting(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False, default=str)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _number(value: object) -> str:
    known = number(value)
    return "–" if known is None else f"{known:,.6g}"


def _text(value: object) -> str:
    return "–" if value is None else str(value)
