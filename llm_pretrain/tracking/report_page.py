"""The page of a report: template, style, script and data in one file that asks no network for anything.

Text of the run is escaped by the template; numbers and labels for the charts travel as JSON in which no
character can end a script. A content security policy forbids the page to load anything.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llm_pretrain import __version__
from llm_pretrain.errors import OutputError
from llm_pretrain.tracking import report_tables as tables
from llm_pretrain.tracking.report_data import RunSeries, run_series
from llm_pretrain.tracking.report_experts import expert_maps
from llm_pretrain.tracking.report_plots import Charts
from llm_pretrain.tracking.run_files import RunRecord

_TEMPLATES = Path(__file__).parent / "templates"


def render(runs: Sequence[RunRecord]) -> str:
    """The whole page."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    names = _names(runs)
    series = [run_series(run, name) for run, name in zip(runs, names, strict=True)]
    maps = [(name, expert_maps(run.rows)) for run, name in zip(runs, names, strict=True)]
    sections = Charts(runs, series).sections()
    data = {
        "runs": [vars(each) for each in series],
        "charts": [chart.plain() for section in sections for chart in section.charts],
        "experts": [{"name": name} | found for name, found in maps if found],
    }
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("report.html").render(
        title=names[0] if len(runs) == 1 else f"{len(runs)} runs",
        version=__version__,
        written=tables.moment(time.time()),
        cards=[_card(run, name) for run, name in zip(runs, names, strict=True)],
        sections=sections,
        maps=data["experts"],
        notes=_notes(runs, series),
        settings=tables.settings_table(runs, names),
        style=(_TEMPLATES / "report.css").read_text(encoding="utf-8"),
        script=(_TEMPLATES / "report.js").read_text(encoding="utf-8"),
        plotly=get_plotlyjs(),
        data=_json(data),
    )


def write(page: str, output: Path) -> Path:
    """Writes beside `output` and renames; raises OutputError where that cannot be done."""
    temporary = None
    try:
        if output.is_dir():
            raise OutputError(f"{output}: expected a file to write, found a folder; name a file in it")
        output.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=output.parent, prefix=f".{output.name}.tmp-")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
            file.write(page)
        os.chmod(temporary, 0o644)
        os.replace(temporary, output)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise OutputError(f"{output}: cannot be written: {error.strerror or error}") from error
    return output


def _card(run: RunRecord, name: str) -> dict[str, Any]:
    """What the template shows of one run outside the charts."""
    return {
        "name": name,
        "folder": str(run.path),
        "state": tables.state_of(run),
        "reason": run.status.get("reason"),
        "exit_code": run.status.get("exit_code"),
        "brief": tables.brief(run),
        "attempts": tables.attempts_table(run),
        "skipped": tables.skipped_table(run),
        "samples": tables.samples(run),
    }


def _names(runs: Sequence[RunRecord]) -> list[str]:
    """Names that tell the runs apart: their own, or their folders where two runs share one."""
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


def _json(data: Any) -> str:
    """JSON that can stand inside a script element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
