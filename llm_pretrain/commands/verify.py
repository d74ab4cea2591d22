"""`llm-pretrain verify`: checks a run's files against each other and against its data."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from llm_pretrain.audit.checks import Check, Checks
from llm_pretrain.audit.verify import verify_run
from llm_pretrain.errors import CheckpointError, ConfigError, printable

EXAMPLES = f"""\
exit code: 0 all that was looked at is as it should be, {CheckpointError.exit_code} something is not, 2 usage

examples:
  llm-pretrain verify runs/quickstart
  llm-pretrain verify runs/quickstart --samples all --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run, such as runs/NAME")
    parser.add_argument(
        "--samples",
        metavar="all|N",
        help="rows of metrics.jsonl whose samples are assembled again and compared, evenly chosen "
        "(default: as many as take some seconds)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the checks and print their results; returns the exit code."""
    samples = arguments.samples
    if samples not in (None, "all"):
        if not (samples.isdecimal() and int(samples) > 0):
            raise ConfigError(f"--samples: expected all or a number of rows from 1 on, found {samples!r}")
        samples = int(samples)
    checks = Checks((lambda _: None) if arguments.json else _print)
    verify_run(checks, arguments.run, samples)
    if arguments.json:
        results = [check.as_json() for check in checks.done]
        print(json.dumps({"run": str(arguments.run), "ok": checks.ok, "checks": results}, indent=1))
    else:
        found = [check.result for check in checks.done]
        print(", ".join(f"{found.count(result)} {result}" for result in ("ok", "failed", "skipped")))
    return 0 if checks.ok else CheckpointError.exit_code


def _print(check: Check) -> None:
    for line in check.lines():
        print(printable(line), flush=True)
