"""`llm-pretrain top`: a run, or all runs of a folder, live in the terminal.

It reads the run's files and nothing else: it can be started, stopped and started again at any time, on
any machine that sees the folder, and training does not notice.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from llm_pretrain.errors import ConfigError

HELP = "watch a run, or several, in the terminal"

EXAMPLES = """\
examples:
  llm-pretrain top runs/quickstart           # until it ends, or Ctrl-C
  llm-pretrain top runs/                     # all runs in the folder, a line each
  llm-pretrain top runs/quickstart --once    # one look, also into a pipe
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or a folder of such folders"
    )
    parser.add_argument("--once", action="store_true", help="show one frame and leave")
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="between two looks (default: 1; at least 0.1)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Show the runs; returns the exit code."""
    if not arguments.seconds >= 0.1:
        raise ConfigError(f"--seconds: expected at least 0.1, found {arguments.seconds}")
    from llm_pretrain.tracking import watch_runs

    watch_runs(arguments.runs, once=arguments.once, seconds=arguments.seconds)
    return 0
