"""`llm-pretrain top`: a table of runs in the terminal while they train.

It only reads the run's files, so it can run on any machine that has the folder and never affects training.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from llm_pretrain.errors import ConfigError

EXAMPLES = """\
step   done, of training.max_steps
left   at the speed of the newest row
row    how long ago the newest row was written; much longer than usual: it evaluates, saves, hangs or is gone
Below the table: why a run ended, and what was found wrong in its steps or files.

examples:
  llm-pretrain top runs/quickstart           # until it ends, or Ctrl-C
  llm-pretrain top runs/                     # all runs in the folder, a line each
  llm-pretrain top runs/quickstart --once    # one look, also into a pipe
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or a folder of such folders"
    )
    parser.add_argument("--once", action="store_true", help="show the table once and leave")
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="between two looks (default: 1; at least 0.1)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Show the runs; returns the exit code."""
    if not arguments.seconds >= 0.1:
        raise ConfigError(f"--seconds: expected at least 0.1, found {arguments.seconds}")
    from llm_pretrain.tracking import top

    top.watch_runs(arguments.runs, once=arguments.once, seconds=arguments.seconds)
    return 0
