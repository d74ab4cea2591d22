"""`llm-pretrain report`: writes one HTML page about a run, about several runs, or about a ladder.

Runs and ladders write their own pages when they end. The command is for unfinished or older ones, and for
comparisons.
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
  llm-pretrain report ladders/stdlib
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, such as runs/NAME, or of a ladder"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="page to write or replace (default: RUN/report.html; needed for several runs)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the page and print where it is; returns the exit code."""
    from llm_pretrain.forecast.ladder_report import write_ladder_report
    from llm_pretrain.forecast.points import LADDER_FILE
    from llm_pretrain.tracking.report import write_report

    output, ladders = arguments.output, [run for run in arguments.runs if (run / LADDER_FILE).exists()]
    if ladders:
        if len(arguments.runs) > 1:
            raise ConfigError(
                f"{ladders[0]}: expected runs or one ladder alone, found a ladder beside others"
            )
        print(printable(write_ladder_report(ladders[0], output)))
        return 0
    if output is None:
        if len(arguments.runs) > 1:
            raise ConfigError("--output: expected a file for the page of several runs, found none")
        output = arguments.runs[0] / "report.html"
    print(printable(write_report(arguments.runs, output)))
    return 0
