"""`llm-pretrain top`: shows runs in a terminal while they train, from the files in their folders."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from llm_pretrain.errors import ConfigError, printable
from llm_pretrain.files import open_plain
from llm_pretrain.tracking.metrics import finite_number
from llm_pretrain.tracking.replays import difference_lines
from llm_pretrain.tracking.run_files import (
    Row,
    RunRecord,
    check_run_folder,
    duration,
    expert_loads,
    fault_lines,
    is_run_folder,
    metric_values,
    quantity,
    read_run,
)

MIN_WIDTH = 24
"""Columns that are drawn at least; a narrower terminal wraps the lines."""
TAIL_BYTES = 4 << 20
"""How much of the end of metrics.jsonl is read at first, so that a run of a million steps opens at once."""
MAX_ROWS = 5000
"""Number of last rows that are kept."""
RATE_ROWS = 50
"""Number of last rows from which the training rate is computed."""
STALLED_SECONDS = 60.0
"""A running run is reported as stalled after this time, and ten times its usual time, without a new row."""
MAX_LAYERS = 8
"""Layers whose experts are shown; of more layers, those with the largest loads."""
BLOCKS = "▁▂▃▄▅▆▇█"
STYLES = {
    "running": "bold blue",
    "finished": "bold green",
    "preempted": "bold yellow",
    "failed": "bold red",
    "diverged": "bold red",
}


def watch_runs(
    paths: Sequence[Path],
    *,
    once: bool = False,
    seconds: float = 1.0,
    console: Console | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show runs until all have ended or the user interrupts; once, where the output is no terminal.

    Args:
        paths: Run folders, which may be created later, or folders of run folders.
        once: Show one frame only.
        seconds: Time between two frames.
        console: Output; by default standard output.
        sleep: Called with `seconds` between two frames.

    Raises:
        ConfigError: a path is no run's folder, nor a place where a run may be about to start.
    """
    console = console or Console(highlight=False)
    console.width = max(console.width, MIN_WIDTH)
    follows = not once and console.is_terminal
    runs = _WatchedRuns(paths, may_start_later=follows)
    runs.refresh()
    if follows and not runs.ended:
        try:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                while not runs.ended:
                    live.update(runs.frame(console.width), refresh=True)
                    sleep(seconds)
                    runs.refresh()
        except KeyboardInterrupt:
            pass
    console.print(runs.frame(console.width))


class _WatchedRuns:
    """The runs in some paths, found again at every refresh."""

    def __init__(self, paths: Sequence[Path], *, may_start_later: bool):
        self._paths = list(paths)
        for path in self._paths:
            if not (_runs_in(path) or (may_start_later and _may_become_a_run(path))):
                check_run_folder(path)
        self._known: dict[Path, WatchedRun] = {}
        self._runs: list[WatchedRun] = []

    @property
    def ended(self) -> bool:
        return all(run.ended for run in self._runs)

    def refresh(self) -> None:
        folders = [
            folder
            for path in self._paths
            for folder in ([path] if is_run_folder(path) else _runs_in(path) or [path])
        ]
        self._runs = [self._known.setdefault(folder, WatchedRun(folder)) for folder in folders]
        for run in self._runs:
            try:
                run.refresh()
            except ConfigError:  # the folder was deleted after it was found
                run.exists = False

    def frame(self, width: int) -> RenderableType:
        return _run_panel(self._runs[0], width) if len(self._runs) == 1 else _runs_table(self._runs, width)


def _runs_in(path: Path) -> list[Path]:
    """The run folders directly in a folder, by name; empty if there are none."""
    try:
        return sorted(each for each in path.iterdir() if each.is_dir() and is_run_folder(each))
    except OSError:
        return []


def _may_become_a_run(path: Path) -> bool:
    """Whether a run may be about to start there: nothing yet, or a folder that has no more than its lock."""
    try:
        return all(each.name.startswith(".") for each in path.iterdir())
    except FileNotFoundError:
        return path.resolve().parent.is_dir()
    except OSError:
        return False


class WatchedRun:
    """One run's folder, read again at every `refresh`; it need not exist yet.

    Only new rows of metrics.jsonl are read, and at first only the end of the file.
    """

    def __init__(self, path: Path):
        self.path = path
        self.record = RunRecord(path, path.resolve().name)
        self.rows: list[Row] = []
        self.exists = False
        self._metrics = path / "metrics.jsonl"
        self._offset: int | None = None
        self._damaged = 0

    @property
    def state(self) -> str:
        """The run's state; `waiting` before its folder exists."""
        return printable(self.record.state) if self.exists else "waiting"

    @property
    def ended(self) -> bool:
        return self.state not in ("waiting", "running", "unknown")

    def refresh(self) -> None:
        """Read what is new; files may be missing or incomplete."""
        self.exists = is_run_folder(self.path)
        if not self.exists:
            return
        self.record = read_run(self.path, metrics=False)
        try:
            self._read_new_rows()
        except OSError as error:
            self.record.problems.append(f"{self._metrics.name} cannot be read: {error.strerror}")
        if self._damaged:
            self.record.problems.append(f"{self._metrics.name}: {self._damaged} damaged lines are left out")

    def last(self, key: str) -> Any:
        """The newest value of a metric that is not null."""
        return next((row[key] for row in reversed(self.rows) if row.get(key) is not None), None)

    def last_number(self, key: str) -> float | None:
        return finite_number(self.last(key))

    @property
    def step(self) -> int:
        """Optimizer steps done, by the status and the rows."""
        status = self.record.status.get("step")
        return max(status if isinstance(status, int) else 0, self.rows[-1]["step"] if self.rows else 0)

    @property
    def progress(self) -> str:
        """`40/100`, or `40` where the number of steps is unknown."""
        max_steps = self.record.setting("training", "max_steps")
        return f"{self.step:,}/{max_steps:,.0f}" if max_steps else f"{self.step:,}"

    @property
    def time_left(self) -> str | None:
        """At the rate of this attempt's last rows; None for a run that is not running or has no rate."""
        max_steps, seconds = self.record.setting("training", "max_steps"), self._seconds_per_step()
        if self.state != "running" or max_steps is None or seconds is None:
            return None
        return duration(max(0.0, max_steps - self.step) * seconds)

    def warnings(self, now: float | None = None) -> list[str]:
        """Problems of the run, newest first."""
        found = []
        if (reason := self.record.status.get("reason")) and self.ended:
            found.append(str(reason))
        found += [f"silent data corruption at {line}" for line in fault_lines(self.record.status)[:-4:-1]]
        found += [f"not what a replay gave: {line}" for line in difference_lines(self.record.replays)[:-4:-1]]
        age, logging_steps = self.age(now), self.record.setting("logging", "logging_steps") or 1
        usual = (self._seconds_per_step() or 0.0) * 10 * logging_steps
        if self.state == "running" and age is not None and age > max(STALLED_SECONDS, usual):
            found.append(f"no row of metrics for {age:.0f} s: it evaluates, saves, hangs or is gone")
        skipped = [row for row in self.rows if row.get("train/skipped")]
        found += [f"step {row['step']} was skipped: {row['train/skipped']}" for row in skipped[:-4:-1]]
        if len(skipped) > 3:
            found.append(f"{len(skipped)} steps were skipped in the last {len(self.rows)} rows")
        return found + self.record.problems

    def age(self, now: float | None = None) -> float | None:
        """Seconds since the newest row."""
        newest = finite_number(self.rows[-1].get("time")) if self.rows else None
        return None if newest is None else max(0.0, (time.time() if now is None else now) - newest)

    def _seconds_per_step(self) -> float | None:
        start = finite_number(self.record.attempts[-1].get("time")) if self.record.attempts else None
        timed = [
            (row["step"], when)
            for row in self.rows[-RATE_ROWS:]
            if (when := finite_number(row.get("time"))) is not None and when >= (start or 0.0)
        ]
        if len(timed) > 1 and timed[-1][0] > timed[0][0]:
            return (timed[-1][1] - timed[0][1]) / (timed[-1][0] - timed[0][0])
        return self.last_number("perf/step_seconds")

    def _read_new_rows(self) -> None:
        if not self._metrics.exists():
            return
        size = self._metrics.stat().st_size
        if self._offset is None or size < self._offset:  # shorter: a resumed run has cut a torn line
            self.rows, self._damaged = [], 0
            self._offset = max(0, size - TAIL_BYTES)
        with open_plain(self._metrics) as file:
            file.seek(self._offset)
            data = file.read(size - self._offset)
        whole = data.rfind(b"\n") + 1
        lines = data[:whole].split(b"\n")[:-1]
        if self._offset == size - TAIL_BYTES and size > TAIL_BYTES and not self.rows:
            lines = lines[1:]  # the tail began in the middle of a line
        self._offset += whole
        for line in lines:
            self._add(line)
        del self.rows[:-MAX_ROWS]

    def _add(self, line: bytes) -> None:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            self._damaged += 1
            return
        while self.rows and self.rows[-1]["step"] > row["step"]:
            self.rows.pop()  # a resumed run repeats these steps
        if self.rows and self.rows[-1]["step"] == row["step"]:
            row = self.rows.pop() | row
        self.rows.append(row)


def _run_panel(run: WatchedRun, width: int) -> RenderableType:
    """One run in full, in a terminal of `width` columns."""
    inner = max(20, width - 4)
    name = printable(run.record.name)
    title = Text.assemble((name, "bold"), "  ", (run.state, STYLES.get(run.state, "dim")))
    if not run.exists:
        waiting = Text(f"waiting for {printable(str(run.path))}", style="dim")
        return Panel(waiting, title=title, title_align="left")
    parts: list[Any] = [_progress_bar(run, inner)]
    if run.rows:
        parts += [Text(), _losses(run, inner), Text(), _figures(run, inner)]
        if experts := _experts(run, inner):
            parts += [Text(), *experts]
    else:
        parts += [Text("no metrics yet", style="dim")]
    parts += [Text(), *_checkpoint_and_attempt(run, inner)]
    for warning in run.warnings()[:4]:
        parts.append(Text(f"! {printable(warning)}", style="yellow", overflow="ellipsis", no_wrap=True))
    return Panel(Group(*parts), title=title, title_align="left")


def _runs_table(runs: Sequence[WatchedRun], width: int) -> RenderableType:
    """Several runs, one line each."""
    table = Table(expand=True, header_style="dim", box=None, pad_edge=False)
    table.add_column("run", overflow="ellipsis", no_wrap=True, ratio=3)
    table.add_column("state", no_wrap=True)
    for name in ("step", "loss", "eval", "tok/s", "left", "row"):
        if width >= 70 or name in ("step", "loss"):
            table.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        age, speed = run.age(), run.last_number("perf/tokens_per_second")
        cells = [
            run.progress,
            _formatted(run.last("train/loss"), ".4f"),
            _formatted(run.last("eval/loss"), ".4f"),
            "-" if speed is None else quantity(speed),
            run.time_left or "-",
            "-" if age is None else f"{duration(age)} ago",
        ]
        state = Text(run.state, style=STYLES.get(run.state, "dim"))
        table.add_row(Text(printable(run.record.name)), state, *cells[: len(table.columns) - 2])
    return table


def sparkline(values: Sequence[float], width: int) -> str:
    """A line chart of at most `width` block characters, each the mean of consecutive values."""
    count = min(width, len(values))
    if count <= 0:
        return ""
    edges = [len(values) * index // count for index in range(count + 1)]
    # half of each mean, as the difference of two finite means may overflow
    means = [sum(value / 2 / (end - start) for value in values[start:end]) for start, end in pairwise(edges)]
    low, high = min(means), max(means)
    height = high - low or 1.0
    return "".join(BLOCKS[round((mean - low) / height * (len(BLOCKS) - 1))] for mean in means)


def _progress_bar(run: WatchedRun, width: int) -> RenderableType:
    max_steps = run.record.setting("training", "max_steps")
    text = f"{run.progress}  {run.step / max_steps:.0%}" if max_steps else f"step {run.progress}"
    if run.time_left is not None:
        text += f"  {run.time_left} left"
    bar = ProgressBar(
        total=max_steps or 1,
        completed=min(run.step, max_steps or 0),
        width=max(8, width - len(text) - 2),
        complete_style="blue",
        finished_style="green",
    )
    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_row(bar, Text(text))
    return row


def _losses(run: WatchedRun, width: int) -> RenderableType:
    """Training and evaluation loss, each with a sparkline over the rows that were read."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    labels = {"train/loss": "loss", "eval/loss": "eval loss", "eval/bits_per_byte": "bits/byte"}
    for key, label in labels.items():
        if values := metric_values(run.rows, key):
            line = Text(sparkline(values, max(8, width - 24)), style="blue", no_wrap=True)
            grid.add_row(Text(label, style="dim"), Text(f"{values[-1]:.4f}", style="bold"), line)
    return grid


def _figures(run: WatchedRun, width: int) -> RenderableType:
    memory, mfu = run.last_number("perf/memory_bytes"), run.last_number("perf/mfu")
    speed, tokens = run.last_number("perf/tokens_per_second"), run.last_number("train/tokens")
    scale = run.last_number("train/loss_scale")
    entries = {
        "lr": _formatted(run.last("train/learning_rate"), ".3g"),
        "grad": _formatted(run.last("train/grad_norm"), ".3g"),
        "tok/s": "-" if speed is None else quantity(speed),
        "step": f"{_formatted(run.last('perf/step_seconds'), '.3g')} s",
        "tokens": "-" if tokens is None else quantity(tokens),
        "memory": "-" if memory is None else f"{memory / 2**30:.2f} GiB",
        "MFU": None if mfu is None else f"{mfu:.1%}",
        "scale": None if scale is None else f"{scale:g}",
    }
    cells = [Text.assemble((f"{label} ", "dim"), text) for label, text in entries.items() if text is not None]
    return Columns(cells, padding=(0, 3), width=min(width, 17))


def _experts(run: WatchedRun, width: int) -> list[Text]:
    """One line per layer: each expert's load as a block, where half the height is an even load."""
    loads = expert_loads(run.last("moe/load"))
    if loads is None:
        return []
    layers, experts = loads.shape
    ratios = loads * experts
    order = sorted(range(layers), key=lambda layer: -float(ratios[layer].max()))[:MAX_LAYERS]
    which = " by layer" if len(order) == layers else f", most loaded layers of {layers}"
    lines = [Text(f"load of {experts} experts{which}", style="dim")]
    room = max(8, width - 32)
    per_block = -(-experts // room)
    for layer in sorted(order):
        line = Text(f"{layer:>3}  ", style="dim", no_wrap=True, overflow="ellipsis")
        shares = [float(value) for value in ratios[layer]]
        for start in range(0, experts, per_block):
            value = max(shares[start : start + per_block], key=lambda share: abs(share - 1))
            height = 0 if math.isnan(value) else min(len(BLOCKS) - 1, round(value * (len(BLOCKS) - 1) / 2))
            style = "red" if value == 0 else "yellow" if value >= 2 else "green"
            line.append(BLOCKS[height] + (" " if experts * 2 <= room else ""), style=style)
        line.append(f"  max {max(shares):.2f}x", style="dim")
        dead = sum(share == 0 for share in shares)
        line.append(f"  {dead} dead" if dead else "", style="red")
        lines.append(line)
    return lines


def _checkpoint_and_attempt(run: WatchedRun, width: int) -> list[Text]:
    lines = []
    if checkpoint := run.record.status.get("checkpoint"):
        lines.append(Text.assemble(("checkpoint ", "dim"), printable(str(checkpoint))))
    if attempts := run.record.attempts:
        newest = attempts[-1]
        text = f"{newest.get('launcher')} × {newest.get('world_size')} on {newest.get('device')}"
        if len(attempts) > 1:
            text += f", attempt {len(attempts)} from step {newest.get('step')}"
        lines.append(Text.assemble(("run by ", "dim"), printable(text)))
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
        line.truncate(width, overflow="ellipsis")
    return lines


def _formatted(value: object, spec: str) -> str:
    known = finite_number(value)
    return "-" if known is None else format(known, spec)
