"""`llm-pretrain report`: writes one HTML page about a run, or about several beside each other.

A run writes its own page at its end; the command is for a run in progress, an older one, and comparisons.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from llm_pretrain.errors import ConfigError, printable

EXAMPLES = """\
examples:
  llm-pretrain report runs/quickstart
  llm-pretrain report runs/quickstart --output /tmp/quickstart.html
  llm-pretrain report runs/small runs/large --output comparison.html
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, such as runs/NAME"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="page to write or replace (default: RUN/report.html; needed for several runs)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the page and print where it is; returns the exit code."""
    from llm_pretrain.tracking import write_report

    output = arguments.output
    if output is None:
        if len(arguments.runs) > 1:
            raise ConfigError("--output: expected a file for the page of several runs, found none")
        output = arguments.runs[0] / "report.html"
    print(printable(write_report(arguments.runs, output)))
    return 0
