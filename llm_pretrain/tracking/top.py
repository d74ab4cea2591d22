"""Following runs in a terminal until they end: the loop around `follow.py` and `top_frame.py`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llm_pretrain.errors import ConfigError
from llm_pretrain.tracking.follow import FollowedRun, runs_in
from llm_pretrain.tracking.run_files import check_run_folder, is_run_folder
from llm_pretrain.tracking.top_frame import frame_of_run, frame_of_runs

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

NARROWEST = 24
"""Columns that are drawn at least: a narrower terminal breaks the lines, rich cannot."""


def watch_runs(
    paths: Sequence[Path],
    *,
    once: bool = False,
    seconds: float = 1.0,
    console: Console | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Shows runs until all have ended or the user interrupts; off a terminal, once.

    Args:
        paths: Run folders, which may come into being later, or folders of run folders.
        once: One frame, whatever becomes of the runs.
        seconds: Between two looks.
        console: Where to; by default standard output.
        sleep: Waits.

    Raises:
        ConfigError: a path that is no run's folder and, as far as can be told, will not become one.
    """
    from rich.console import Console as RichConsole
    from rich.live import Live

    console = console or RichConsole(highlight=False)
    console.width = max(console.width, NARROWEST)
    follows = not once and console.is_terminal
    watched = _Watched(paths, may_come_later=follows)
    watched.refresh()
    if follows and not watched.ended:
        try:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                while not watched.ended:
                    live.update(watched.frame(console.width), refresh=True)
                    sleep(seconds)
                    watched.refresh()
        except KeyboardInterrupt:
            pass
    console.print(watched.frame(console.width))


class _Watched:
    """The runs that some paths stand for, looked up again at every look."""

    def __init__(self, paths: Sequence[Path], *, may_come_later: bool):
        self._paths = list(paths)
        for path in self._paths:
            if not (runs_in(path) or (may_come_later and _may_become_a_run(path))):
                check_run_folder(path)
        self._followed: dict[Path, FollowedRun] = {}
        self.runs: list[FollowedRun] = []

    @property
    def ended(self) -> bool:
        return all(run.ended for run in self.runs)

    def refresh(self) -> None:
        folders = [
            folder
            for path in self._paths
            for folder in ([path] if is_run_folder(path) else runs_in(path) or [path])
        ]
        self.runs = [self._followed.setdefault(folder, FollowedRun(folder)) for folder in folders]
        for run in self.runs:
            try:
                run.refresh()
            except ConfigError:  # the folder went away between two looks
                run.exists = False

    def frame(self, width: int) -> RenderableType:
        if len(self.runs) == 1:
            return frame_of_run(self.runs[0], width)
        return frame_of_runs(self.runs, width)


def _may_become_a_run(path: Path) -> bool:
    """Whether a run may be about to start there: nothing yet, or a folder with no more than its lock."""
    try:
        return all(each.name.startswith(".") for each in path.iterdir())
    except FileNotFoundError:
        return path.resolve().parent.is_dir()
    except OSError:
        return False
