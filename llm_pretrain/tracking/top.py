"""`llm-pretrain top`: a table of runs in the terminal, from the files in their folders."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from llm_pretrain.config.schema import Range
from llm_pretrain.errors import printable
from llm_pretrain.files import open_plain
from llm_pretrain.runs.record import check_run_folder, difference_lines, fault_lines, is_run_folder, read_run
from llm_pretrain.runs.rows import finite_number, parse_row
from llm_pretrain.text import duration, quantity
from llm_pretrain.tracking.trackers import source_parts

MIN_WIDTH = 24
"""Least width of the table in characters; a narrower terminal wraps the lines."""
TAIL_BYTES = 4 << 20
"""Most bytes read from the end of metrics.jsonl, so that a run of a million steps opens at once."""
KEYS = {"step", "time", "train/loss", "perf/tokens_per_second", "perf/step_seconds", "eval/loss"}
"""Metrics whose newest numbers are shown, `eval/loss` with that of each source."""
STYLES = {
    "running": "bold blue",
    "finished": "bold green",
    "preempted": "bold yellow",
    "failed": "bold red",
    "diverged": "bold red",
    "killed": "bold red",
}


def watch_runs(
    paths: Sequence[Path],
    *,
    once: bool = False,
    seconds: Annotated[float, Range(ge=0.1)] = 1.0,
    console: Console | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show runs until all have ended or the user interrupts; once, where the output is no terminal.

    Args:
        paths: Folders of runs, or folders of such folders.
        once: Show the table once and leave.
        seconds: Time between two looks.
        console: Output; by default standard output.
        sleep: Called with `seconds` between two looks.

    Raises:
        ConfigError: a path is no run's folder, nor a folder of runs.
    """
    console = console or Console(highlight=False)
    console.width = max(console.width, MIN_WIDTH)
    follows = not once and console.is_terminal
    runs = _look_at(paths)
    if follows and not all(run.ended for run in runs):
        try:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                while not all(run.ended for run in runs):
                    live.update(_table(runs, console.width), refresh=True)
                    sleep(seconds)
                    runs = _look_at(paths)
        except KeyboardInterrupt:
            pass
    console.print(_table(runs, console.width))


def runs_in(path: Path) -> list[Path]:
    """The folder if it is a run's, else the runs directly in it, by name; ConfigError if there are none."""
    inside = []
    if path.is_dir() and not is_run_folder(path):
        of_ladder = path / "runs"
        inside = sorted(each for each in path.iterdir() if is_run_folder(each))
        inside += sorted(each for each in of_ladder.glob("*") if is_run_folder(each))
    if not inside:
        check_run_folder(path)
    return inside or [path]


@dataclass(frozen=True)
class _Run:
    """One run's line of the table, and its remarks below the table."""

    name: str
    state: str
    step: str
    loss: str
    evaluation: str
    speed: str
    time_left: str
    age: str
    sources: str
    remarks: tuple[str, ...]

    @property
    def ended(self) -> bool:
        return self.state not in ("running", "unknown")


def _look_at(paths: Sequence[Path]) -> list[_Run]:
    return [_read(folder) for path in paths for folder in runs_in(path)]


def _read(folder: Path) -> _Run:
    record = read_run(folder, metrics=False)
    keys = KEYS - {"eval/loss"} if record.setting("evaluation", "eval_steps") == 0 else KEYS
    newest = newest_numbers(folder / "metrics.jsonl", record.problems, keys)
    loss, evaluation, speed, when = (
        newest.get(key) for key in ("train/loss", "eval/loss", "perf/tokens_per_second", "time")
    )
    loss = loss if record.last_loss is None else record.last_loss
    status, seconds = record.status.get("step"), newest.get("perf/step_seconds")
    step = max(status if isinstance(status, int) else 0, int(newest.get("step", 0)))
    max_steps, time_left = record.setting("training", "max_steps"), "-"
    if record.state == "running" and max_steps is not None and seconds is not None:
        time_left = duration(max(0.0, max_steps - step) * seconds)
    faults = [f"silent data corruption at {line}" for line in fault_lines(record.status)]
    replays = [f"not what a replay gave: {line}" for line in difference_lines(record.replays)]
    reason = record.status.get("reason")
    return _Run(
        printable(record.name),
        printable(record.state),
        f"{step:,}/{max_steps:,.0f}" if max_steps else f"{step:,}",
        "-" if loss is None else f"{loss:.4f}",
        "-" if evaluation is None else f"{evaluation:.4f}",
        "-" if speed is None else quantity(speed),
        time_left,
        "-" if when is None else f"{duration(max(0.0, time.time() - when))} ago",
        "  ".join(source_parts(newest)),
        tuple(map(str, [*([reason] if reason else []), *faults[-1:], *replays[-1:], *record.problems])),
    )


def newest_numbers(file: Path, problems: list[str], keys: Set[str] | None = None) -> dict[str, Any]:
    """The newest finite number of each key, from the end of metrics.jsonl; adds to `problems`.

    Only of `keys`, if given; with `eval/loss` come all values of its row that begin with `eval/source/`.
    """
    try:
        with open_plain(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            opened.seek(max(0, size - TAIL_BYTES))
            lines = opened.read(TAIL_BYTES).split(b"\n")[:-1]  # the last one is empty, or still being written
    except FileNotFoundError:
        return {}
    except OSError as error:
        problems.append(f"{file.name} cannot be read: {error.strerror}")
        return {}
    found: dict[str, Any] = {}
    damaged = 0
    for line in reversed(lines[1:] if size > TAIL_BYTES else lines):
        row = parse_row(line)
        if row is None:
            damaged += 1
            continue
        for key in (row.keys() if keys is None else keys) - found.keys():
            if (value := finite_number(row.get(key))) is not None:
                found[key] = value
                if key == "eval/loss":
                    found |= {name: row[name] for name in row if name.startswith("eval/source/")}
        if keys is not None and found.keys() >= keys:
            break
    if damaged:
        problems.append(f"{file.name}: {damaged} damaged lines are left out")
    return found


def _table(runs: Sequence[_Run], width: int) -> RenderableType:
    """The table with a line for each run, then the remarks, for a terminal of `width` columns."""
    table = Table(expand=True, header_style="dim", box=None, pad_edge=False)
    table.add_column("run", overflow="ellipsis", no_wrap=True, ratio=3)
    table.add_column("state", no_wrap=True)
    names = ["step", "loss", "eval", "left", "tok/s", "row"]
    cells = [[run.step, run.loss, run.evaluation, run.time_left, run.speed, run.age] for run in runs]
    columns = [[run.name for run in runs], [run.state for run in runs], *zip(names, *cells, strict=True)]
    widths = [2 + max(map(len, column)) for column in columns]
    while len(names) > 2 and sum(widths[: 2 + len(names)]) - 2 > width:  # a name is cut last
        names.pop()
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    notes = []
    for run, of_run in zip(runs, cells, strict=True):
        state = Text(run.state, style=STYLES.get(run.state, "dim"))
        table.add_row(Text(run.name), state, *of_run[: len(names)])
        notes += [(f"{run.name}, eval: {run.sources}", "dim")] if run.sources else []
        notes += [(f"! {run.name}: {printable(remark)}", "yellow") for remark in run.remarks[:4]]
    lines = (Text(text, style=style, overflow="ellipsis", no_wrap=True) for text, style in notes)
    return Group(table, *lines)
