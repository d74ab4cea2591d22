"""`report.html`: one self-contained page about a run, or about several beside each other.

Autoescaping covers all text of a run, the charts' data is JSON in which no character can end a script, and a
content security policy forbids the page to load anything.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llm_pretrain.config.loading import to_dict
from llm_pretrain.config.tree import Config
from llm_pretrain.errors import OutputError
from llm_pretrain.files import check_replaceable, replace_text
from llm_pretrain.runs.record import (
    RunRecord,
    difference_lines,
    fault_lines,
    metric_values,
    read_run,
    replay_summary,
)
from llm_pretrain.runs.rows import Row, finite_number
from llm_pretrain.text import duration, quantity, reason_of, setting_text
from llm_pretrain.tracking.report_charts import (
    Axes,
    RunSeries,
    chart_sections,
    expert_maps,
    run_series,
    training_seconds,
)
from llm_pretrain.version import __version__

MAX_SAMPLES = 12
"""Largest number of steps whose samples are shown."""
MAX_SKIPPED = 50
"""Largest number of skipped steps that are listed."""
_LOCATIONS = {"run.name", "run.output_dir", "checkpoint.resume"}
"""Settings that say where a run is stored; they do not affect its results."""
_MARK = b'<meta name="generator" content="llm_pretrain '
"""Text in the head of every page that this module writes."""
_TEMPLATES = Path(__file__).parent / "templates"


def write_report(runs: Sequence[Path], output: Path) -> Path:
    """Write the page about some runs; an existing page is replaced only when the new one is complete.

    Args:
        runs: Run folders, at least one; they may still be running.
        output: The page's file, which is returned; its folder is created if missing.

    Raises:
        ConfigError: a folder is missing, or is not a run's.
        CheckpointError: a run's `metrics.jsonl` is damaged or cannot be read.
        OutputError: the page cannot be written, or would replace a file that is not such a page.
    """
    return write_page(output, lambda: _render([read_run(Path(run)) for run in runs]))


def write_page(output: Path, render: Callable[[], str]) -> Path:
    """Write a page of `render_page`, and return its path; `output` is checked before the page is rendered.

    Raises:
        OutputError: the page cannot be written, or would replace a file that is not such a page.
    """
    output = Path(output)
    if not output.is_dir():
        check_replaceable(output, _MARK)
    page = render()
    try:
        if output.is_dir():
            raise OutputError(f"{output}: expected a file to write, found a folder; name a file in it")
        output.parent.mkdir(parents=True, exist_ok=True)
        replace_text(output, page.encode(errors="replace").decode())
    except OSError as error:
        raise OutputError(f"{output}: cannot be written: {reason_of(error)}") from error
    return output


def _render(runs: Sequence[RunRecord]) -> str:
    names = _names(runs)
    series = [run_series(run, name) for run, name in zip(runs, names, strict=True)]
    maps = [(name, expert_maps(run.rows)) for run, name in zip(runs, names, strict=True)]
    sections = chart_sections(runs, series)
    data = {
        "runs": [vars(each) for each in series],
        "charts": [chart for section in sections for chart in section["charts"]],
        "experts": [{"name": name} | found for name, found in maps if found],
    }
    return render_page(
        "report.html",
        title=names[0] if len(runs) == 1 else f"{len(runs)} runs",
        runs=[_run_content(run, name) for run, name in zip(runs, names, strict=True)],
        sections=sections,
        maps=data["experts"],
        notes=_notes(runs, series),
        settings=_settings_table(runs, names),
        script="report.js",
        data=data,
    )


def render_page(template: str, *, data: Any, script: str, **values: Any) -> str:
    """A page from a template of this package.

    Args:
        template: File name of the template.
        data: Data that the page holds as JSON, for its scripts.
        script: File name of the template's script, which draws the charts. The template gets it, after the
            code that all charts share, as `script`, and plotly's code as `plotly`.
        values: Further values for the template; their text is escaped.
    """
    # imported here: a training run imports this module, but needs these packages only at its end
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    scripts = "\n".join((_TEMPLATES / name).read_text(encoding="utf-8") for name in ("charts.js", script))
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    style = (_TEMPLATES / "report.css").read_text(encoding="utf-8")
    return environment.get_template(template).render(
        version=__version__, written=_utc(time.time()), style=style, plotly=get_plotlyjs(), script=scripts,
        data=_script_json(data), **values,
    )  # fmt: skip


def _script_json(data: Any) -> str:
    """JSON that cannot end the script element in which it stands."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _names(runs: Sequence[RunRecord]) -> list[str]:
    """The runs' names, with the folder where two runs have the same name."""
    names = [run.name for run in runs]
    return [
        name if names.count(name) == 1 else f"{name} ({run.path})"
        for name, run in zip(names, runs, strict=True)
    ]


def _notes(runs: Sequence[RunRecord], series: Sequence[RunSeries]) -> list[str]:
    notes = [f"{run.name}: {problem}" for run in runs for problem in run.problems[:20]]
    notes += [f"{run.name}: no metrics yet" for run in runs if not run.rows]
    for each in series:
        if each.rows_per_point > 1:
            notes.append(
                f"{each.name}: a point of its curves stands for up to {each.rows_per_point} rows of "
                "metrics.jsonl, of which it shows the mean (gradient norm, memory, largest load and dead "
                "experts: the largest)"
            )
    return notes


def _run_content(run: RunRecord, name: str) -> dict[str, Any]:
    """What the template shows of one run outside the charts."""
    return {
        "name": name,
        "folder": str(run.path),
        "state": run.state,
        "reason": run.status.get("reason"),
        "exit_code": run.status.get("exit_code"),
        "faults": fault_lines(run.status),
        "replays": difference_lines(run.replays),
        "summary": _summary(run),
        "attempts": _attempts_table(run),
        "skipped": _skipped_table(run),
        "samples": _samples(run),
    }


@dataclasses.dataclass(frozen=True)
class Table:
    """Column heads and rows of unescaped text."""

    heads: list[str]
    rows: list[list[str]]


def _summary(run: RunRecord) -> dict[str, str]:
    """Label -> text about a run and its progress; unknown entries are left out."""
    attempt = run.attempts[-1] if run.attempts else {}
    losses = metric_values(run.rows, "train/loss")
    loss = losses[-1] if run.last_loss is None and losses else run.last_loss
    evaluated = [row for row in run.rows if finite_number(row.get("eval/loss")) is not None]
    best = min(((row["eval/loss"], row["step"]) for row in evaluated), default=None)
    bits = metric_values(run.rows, "eval/bits_per_byte")
    speeds = sorted(metric_values(run.rows, "perf/tokens_per_second"))
    seconds = training_seconds(run)
    parameters = finite_number(attempt.get("parameters"))
    active = finite_number(attempt.get("active_parameters"))
    size = None if parameters is None else quantity(parameters)
    if size and active and active != parameters:
        size += f" ({quantity(active)} active)"
    skipped = sum(bool(row.get("train/skipped")) for row in run.rows)
    checked = run.status.get("checked")
    entries = {
        "Step": _progress(run),
        "Parameters": size,
        "Tokens": _tokens(run),
        "Training time": duration(seconds) if seconds is not None else None,
        "Training loss": None if loss is None else f"{loss:.4f}",
        "Best evaluation loss": f"{best[0]:.4f} at step {best[1]:,}" if best else None,
        "Bits per byte": f"{bits[-1]:.4f}" if bits else None,
        "Tokens per second": f"{quantity(speeds[len(speeds) // 2])} (median)" if speeds else None,
        "Skipped steps": f"{skipped:,}" if skipped else None,
        "Last step computed twice": f"{checked:,}" if isinstance(checked, int) else None,
        "Replay": replay_summary(run.replays, _last_step(run)) if run.replays else None,
        "Hardware": _hardware(attempt),
        "Versions": _versions(attempt),
    }
    return {label: text for label, text in entries.items() if text}


def _last_step(run: RunRecord) -> int | None:
    steps = [run.rows[-1]["step"]] if run.rows else []
    steps += [step] if isinstance(step := finite_number(run.status.get("step")), int) else []
    return max(steps, default=None)


def _progress(run: RunRecord) -> str | None:
    step = _last_step(run)
    if step is None:
        return None
    max_steps = run.setting("training", "max_steps")
    return f"{step:,} of {max_steps:,.0f}" if max_steps else f"{step:,}"


def _tokens(run: RunRecord) -> str | None:
    """Number of tokens at the last step, estimated if the step's row does not have it."""
    step = _last_step(run)
    tokens = None if step is None else Axes(run).at(step)["tokens"]
    return None if tokens is None else quantity(tokens)


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


def _attempts_table(run: RunRecord) -> Table | None:
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
        columns = (attempt.get(key) for key in ("step", "launcher", "world_size", "device"))
        rows.append([_utc(attempt.get("time")), *map(_text, columns), "; ".join(changes) or "–"])
        before = versions
    heads = ["Started (UTC)", "From step", "Launcher", "Processes", "Device", "Changed since"]
    return Table(heads, rows) if rows else None


def _skipped_table(run: RunRecord) -> Table | None:
    """The last skipped steps and logged spikes."""
    rows = []
    for row in run.rows:
        spike, scale = row.get("train/spike"), finite_number(row.get("train/loss_scale"))
        if spike or row.get("train/skipped"):
            reason = str(row.get("train/skipped") or "not skipped") + (
                f" (spike in {spike})" if spike else ""
            )
            rows.append([f"{row['step']:,}", reason, "–" if scale is None else f"{scale:,.6g}"])
    return Table(["Step", "Reason", "Loss scale"], rows[-MAX_SKIPPED:]) if rows else None


def _samples(run: RunRecord) -> list[dict[str, Any]]:
    """`{step, texts: [{prompt, text}]}` of evenly chosen steps, newest first."""
    by_step: dict[int, dict[str, str]] = {}
    for row in run.samples:
        if isinstance(row.get("step"), int):
            by_step.setdefault(row["step"], {})[_text(row.get("prompt"))] = _text(row.get("text"))
    steps = sorted(by_step)
    if len(steps) > MAX_SAMPLES:
        last = len(steps) - 1
        steps = sorted({steps[round(i * last / (MAX_SAMPLES - 1))] for i in range(MAX_SAMPLES)})
    return [
        {"step": step, "texts": [{"prompt": prompt, "text": text} for prompt, text in by_step[step].items()]}
        for step in reversed(steps)
    ]


def _settings_table(runs: Sequence[RunRecord], names: Sequence[str]) -> Table | None:
    """The settings in which one run differs from the defaults, or several runs from each other."""
    trees = [run.config for run in runs]
    if not any(trees):
        return None
    if len(runs) == 1:
        trees, names = [*trees, to_dict(Config())], ["This run", "Default"]
    settings = [
        {f"{section}.{name}": value for section, fields in tree.items() for name, value in fields.items()}
        for tree in trees
    ]
    rows = []
    for name in dict.fromkeys(name for flat in settings[: len(runs)] for name in flat):
        values = [flat.get(name, "–") for flat in settings]
        if name not in _LOCATIONS and any(value != values[0] for value in values):
            rows.append([name, *map(_setting, values)])
    return Table(["Setting", *names], rows)


def _setting(value: Any) -> str:
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False, default=str)
    return f"{value:g}" if isinstance(value, float) else setting_text(value)


def _utc(seconds: object) -> str:
    """A Unix time as `2030-01-31 12:00:00`, UTC."""
    known = finite_number(seconds)
    try:
        return "–" if known is None else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(known))
    except (OverflowError, ValueError, OSError):
        return "–"


def _text(value: object) -> str:
    return "–" if value is None else str(value)
