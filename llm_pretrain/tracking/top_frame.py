"""What `llm-pretrain top` shows: one frame for one run, one line each for several. Only drawing.

Text of a run is never read as rich's markup, and control characters in it do not reach the terminal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from llm_pretrain.tracking.follow import FollowedRun
from llm_pretrain.tracking.report_tables import duration, quantity
from llm_pretrain.tracking.run_files import expert_loads, number

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

BLOCKS = "▁▂▃▄▅▆▇█"
STYLES = {
    "running": "bold blue",
    "finished": "bold green",
    "preempted": "bold yellow",
    "failed": "bold red",
    "diverged": "bold red",
}
LAYERS = 8
"""Layers whose experts are shown, the least even first where there are more."""


def frame_of_run(run: FollowedRun, width: int, now: float | None = None) -> RenderableType:
    """One run in full.

    Args:
        run: Refreshed.
        width: Columns of the terminal.
        now: Unix seconds, by default the clock's.
    """
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    inner = max(20, width - 4)
    title = Text.assemble((shown(run.record.name), "bold"), "  ", (run.state, STYLES.get(run.state, "dim")))
    if not run.exists:
        body: Any = Text(f"waiting for {shown(str(run.path))}", style="dim")
        return Panel(body, title=title, title_align="left")
    parts: list[Any] = [_progress(run, inner)]
    if run.rows:
        parts += [Text(), _losses(run, inner), Text(), _figures(run, inner)]
        if experts := _experts(run, inner):
            parts += [Text(), *experts]
    else:
        parts += [Text("no metrics yet", style="dim")]
    parts += [Text(), *_origin(run, inner)]
    for warning in run.warnings(now)[:4]:
        parts.append(Text(f"! {shown(warning)}", style="yellow", overflow="ellipsis", no_wrap=True))
    return Panel(Group(*parts), title=title, title_align="left")


def frame_of_runs(runs: Sequence[FollowedRun], width: int, now: float | None = None) -> RenderableType:
    """Several runs, one line each."""
    from rich.table import Table
    from rich.text import Text

    table = Table(expand=True, header_style="dim", box=None, pad_edge=False)
    table.add_column("run", overflow="ellipsis", no_wrap=True, ratio=3)
    table.add_column("state", no_wrap=True)
    for name in ("step", "loss", "eval", "tok/s", "left", "row"):
        if width >= 70 or name in ("step", "loss"):
            table.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        most = run.record.number("training", "max_steps")
        left, age = run.seconds_left(), run.age(now)
        speed = number(run.last("perf/tokens_per_second"))
        cells = [
            f"{run.step():,}/{most:,.0f}" if most else f"{run.step():,}",
            _figure(run.last("train/loss"), ".4f"),
            _figure(run.last("eval/loss"), ".4f"),
            "-" if speed is None else quantity(speed),
            duration(left) if run.state == "running" and left is not None else "-",
            "-" if age is None else f"{duration(age)} ago",
        ]
        state = Text(run.state, style=STYLES.get(run.state, "dim"))
        table.add_row(Text(shown(run.record.name)), state, *cells[: len(table.columns) - 2])
    return table


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as a line of blocks, `width` at most, each the mean of its share of them."""
    count = min(width, len(values))
    if count <= 0:
        return ""
    edges = [len(values) * index // count for index in range(count + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((mean - low) * scale)] for mean in means)


def shown(text: str) -> str:
    """Text without characters that move a terminal's cursor or change its colours."""
    return "".join(character if character.isprintable() else "·" for character in text)


def _progress(run: FollowedRun, width: int) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    step, most, left = run.step(), run.record.number("training", "max_steps"), run.seconds_left()
    text = f"{step:,}/{most:,.0f}  {step / most:.0%}" if most else f"step {step:,}"
    if run.state == "running" and left is not None:
        text += f"  {duration(left)} left"
    bar = ProgressBar(
        total=most or 1,
        completed=min(step, most or 0),
        width=max(8, width - len(text) - 2),
        complete_style="blue",
        finished_style="green",
    )
    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_row(bar, Text(text))
    return row


def _losses(run: FollowedRun, width: int) -> RenderableType:
    """Loss and evaluation loss, each with its course over the rows that were read."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2, 0, 0))
    for key, label in (
        ("train/loss", "loss"),
        ("eval/loss", "eval loss"),
        ("eval/bits_per_byte", "bits/byte"),
    ):
        values = run.values(key)
        if values:
            line = Text(sparkline(values, max(8, width - 24)), style="blue", no_wrap=True)
            grid.add_row(Text(label, style="dim"), Text(f"{values[-1]:.4f}", style="bold"), line)
    return grid


def _figures(run: FollowedRun, width: int) -> RenderableType:
    from rich.columns import Columns
    from rich.text import Text

    memory, mfu = number(run.last("perf/memory_bytes")), number(run.last("perf/mfu"))
    speed, tokens = number(run.last("perf/tokens_per_second")), number(run.last("train/tokens"))
    entries = {
        "lr": _figure(run.last("train/learning_rate"), ".3g"),
        "grad": _figure(run.last("train/grad_norm"), ".3g"),
        "tok/s": "-" if speed is None else quantity(speed),
        "step": f"{_figure(run.last('perf/step_seconds'), '.3g')} s",
        "tokens": "-" if tokens is None else quantity(tokens),
        "memory": "-" if memory is None else f"{memory / 2**30:.2f} GiB",
        "MFU": None if mfu is None else f"{mfu:.1%}",
        "scale": None if (scale := number(run.last("train/loss_scale"))) is None else f"{scale:g}",
    }
    cells = [Text.assemble((f"{label} ", "dim"), text) for label, text in entries.items() if text is not None]
    return Columns(cells, padding=(0, 3), width=min(width, 17))


def _experts(run: FollowedRun, width: int) -> list[Text]:
    """One line per layer: each expert's load as a block, 1 being half the height."""
    from rich.text import Text

    loads = expert_loads(run.last("moe/load"))
    if loads is None:
        return []
    ratios = loads * loads.shape[1]
    order = sorted(range(len(ratios)), key=lambda layer: -float(ratios[layer].max()))[:LAYERS]
    lines = [Text(f"load of {loads.shape[1]} experts, most loaded layers of {len(ratios)}", style="dim")]
    if len(order) == len(ratios):
        lines = [Text(f"load of {loads.shape[1]} experts by layer", style="dim")]
    for layer in sorted(order):
        line = Text(f"{layer:>3}  ", style="dim", no_wrap=True, overflow="ellipsis")
        room = max(8, width - 32)
        shares = [float(value) for value in ratios[layer]]
        per_block = -(-len(shares) // room)
        for start in range(0, len(shares), per_block):
            value = max(shares[start : start + per_block], key=lambda share: abs(share - 1))
            height = 0 if math.isnan(value) else min(len(BLOCKS) - 1, round(value * (len(BLOCKS) - 1) / 2))
            style = "red" if value == 0 else "yellow" if value >= 2 else "green"
            line.append(BLOCKS[height] + (" " if len(shares) * 2 <= room else ""), style=style)
        line.append(f"  max {max(shares):.2f}x", style="dim")
        dead = sum(share == 0 for share in shares)
        line.append(f"  {dead} dead" if dead else "", style="red")
        lines.append(line)
    return lines


def _origin(run: FollowedRun, width: int) -> list[Text]:
    """Checkpoint and attempt."""
    from rich.text import Text

    lines = []
    if checkpoint := run.record.status.get("checkpoint"):
        lines.append(Text.assemble(("checkpoint ", "dim"), shown(str(checkpoint))))
    if attempts := run.record.attempts:
        newest = attempts[-1]
        who = f"{newest.get('launcher')} × {newest.get('world_size')} on {newest.get('device')}"
        if len(attempts) > 1:
            who += f", attempt {len(attempts)} from step {newest.get('step')}"
        lines.append(Text.assemble(("run by ", "dim"), shown(who)))
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
        line.truncate(width, overflow="ellipsis")
    return lines


def _figure(value: object, spec: str) -> str:
    known = number(value)
    return "-" if known is None else format(known, spec)
