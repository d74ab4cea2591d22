"""`llm-pretrain top`: a table of runs in the terminal while they train.

The command only reads the runs' files. It never affects training, and works on any machine with the folder.
"""

from __future__ import annotations

import argparse

from llm_pretrain.commands.options import add_parameters, chosen

EXAMPLES = """\
step   done, of training.max_steps
left   at the speed of the newest row
row    how long ago the newest row was written; much longer than usual: it evaluates, saves, hangs or is gone
Below the table: why a run ended, and what was found wrong in its steps or files.

examples:
  llm-pretrain top runs/quickstart           # until it ends, or Ctrl-C
  llm-pretrain top runs/                     # all in the folder, or in a ladder
  llm-pretrain top runs/quickstart --once    # one look, also into a pipe
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from llm_pretrain.tracking.top import watch_runs

    add_parameters(parser, watch_runs, without=["console", "sleep"], positional=["paths"])


def run(arguments: argparse.Namespace) -> int:
    """Show the runs; returns the exit code."""
    from llm_pretrain.tracking.top import watch_runs

    watch_runs(**chosen(arguments, watch_runs))
    return 0
