"""`llm-pretrain verify`: checks a run's files against each other and against its data."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llm_pretrain.errors import CheckpointError, ConfigError, PretrainError, printable

EXAMPLES = f"""\
exit code: 0 all that was looked at is as it should be, {CheckpointError.exit_code} something is not, 2 usage

examples:
  llm-pretrain verify runs/quickstart
  llm-pretrain verify runs/quickstart --samples all --json
"""
_RUN_FILES = ("config.yaml", "metrics.jsonl", "status.json", "attempts.jsonl", "checkpoints")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run, such as runs/NAME")
    parser.add_argument(
        "--samples",
        metavar="all|N",
        help="rows of metrics.jsonl whose samples are assembled again and compared, evenly chosen "
        "(default: as many as take some seconds)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


_SHOWN, _WIDTH = 4, 26
"""Problems of one check that are printed, the rest are counted; characters of a check's name."""


@dataclass
class Check:
    """One check.

    Args:
        name: What is checked.
        looked_at: What has been checked so far, in words.
        problems: One line each; with any the check has failed.
        reason: Why the check, or a part of it, was skipped.
        skipped: Whether the whole check was skipped.
        folder: What is checked, if the run may delete it meanwhile: the check is skipped then.
    """

    name: str
    looked_at: str = ""
    problems: list[str] = field(default_factory=list)
    reason: str = ""
    skipped: bool = False
    folder: Path | None = None

    @property
    def result(self) -> str:
        """`ok`, `failed` or `skipped`."""
        return "failed" if self.problems else "skipped" if self.skipped else "ok"

    def fail(self, problem: str) -> None:
        """Add a problem, on one line."""
        self.problems.append(" ".join(problem.split()))

    def skip(self, reason: str) -> None:
        """Skip the whole check."""
        self.skipped, self.reason = True, reason

    def lines(self) -> list[str]:
        """The printed lines: one for the check, and one for each problem."""
        parts = [self.looked_at, f"skipped: {self.reason}" if self.reason else ""]
        head = (
            f"{self.result:<7}  {self.name:<{_WIDTH}}  {'; '.join(part for part in parts if part)}".rstrip()
        )
        more = len(self.problems) - _SHOWN
        shown = self.problems[:_SHOWN] + ([f"and {more} more"] if more > 0 else [])
        return [head, *(f"         {'':<{_WIDTH}}  {line}" for line in shown)]

    def as_json(self) -> dict[str, Any]:
        """The result for --json, with all problems."""
        return {
            "name": self.name,
            "result": self.result,
            "looked_at": self.looked_at,
            "reason": self.reason or None,
            "problems": self.problems,
        }


class Checks:
    """All checks in order; each check is passed to `show` when it is done."""

    def __init__(self, show: Callable[[Check], None] = lambda _: None):
        self.done: list[Check] = []
        self._show = show

    @property
    def ok(self) -> bool:
        """Whether none failed."""
        return not any(check.problems for check in self.done)

    @contextmanager
    def check(self, name: str) -> Iterator[Check]:
        """A check, which fails if a PretrainError or an OSError is raised in it."""
        check = Check(name)
        try:
            yield check
        except ConfigError as error:
            for problem in error.problems:
                check.fail(problem)
        except PretrainError as error:
            check.fail(str(error))
        except OSError as error:
            check.fail(f"{error.filename or name}: cannot be read: {error.strerror or error}")
        if check.folder is not None and not check.folder.exists():
            check.problems.clear()
            check.skip("the run has deleted or replaced it meanwhile")
        self.done.append(check)
        self._show(check)

    def run(self, name: str, function: Callable[..., None], *arguments: Any) -> Check:
        """The check `function(check, *arguments)`."""
        with self.check(name) as check:
            function(check, *arguments)
        return check

    def skip(self, name: str, reason: str) -> None:
        """A check that is skipped."""
        self.run(name, Check.skip, reason)


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


def verify_run(checks: Checks, folder: Path, samples: str | int | None) -> None:
    """Check a finished, stopped or running run from its files, which are only read.

    Args:
        checks: Receives the results.
        folder: The run's.
        samples: Rows whose samples are assembled again: `all`, a number, or None for some seconds' worth.

    Raises:
        ConfigError: `folder` is missing, or is not a run's.
    """
    from llm_pretrain.commands import _verify_checkpoints, _verify_data, _verify_history
    from llm_pretrain.tracking import REPLAYS_FILE

    if not folder.is_dir() or not any((folder / name).exists() for name in _RUN_FILES):
        found = "another folder" if folder.is_dir() else "none"
        raise ConfigError(f"{folder}: expected a run's folder, such as runs/NAME, found {found}")
    run = _verify_history.RunFiles(folder)
    checks.run("status.json", _verify_history.read_status, run)
    checks.run("config.yaml", _verify_history.read_config, run)
    run.manifests = _verify_checkpoints.read_manifests(folder / "checkpoints")
    if run.known_config is None:
        checks.skip("everything else", "it rests on config.yaml")
    else:
        checks.run("rows", _verify_history.read_history, run)
        checks.run("data", _verify_checkpoints.check_data, run)
        if run.known_config.training.check_every or run.status.get("faults"):
            checks.run("computed twice", _verify_history.check_twice, run)
        if run.launches and run.fingerprints is not None:
            _verify_data.check_samples(checks, run, samples)
        else:
            checks.skip("samples", "the rows or the stores cannot be read")
        _verify_checkpoints.check_checkpoints(checks, run)
        _verify_checkpoints.check_weights(checks, run)
    if (folder / REPLAYS_FILE).exists():
        checks.run("replays", _check_replays, folder, run.status.get("step"))
    if run.status:
        checks.run("status", _verify_history.check_status, run)


def _check_replays(check: Check, folder: Path, last: int | None) -> None:
    """Report what the replays of a run have said, and the steps in which one differs."""
    from llm_pretrain.tracking import difference_lines, read_replays, replay_summary

    replays = read_replays(folder, check.problems)
    for line in difference_lines(replays):
        check.fail(f"not what a replay gave: {line}")
    if replays:
        newest = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(replays[-1]["time"]))
        verdict = replays[-1].get("verdict")
        check.looked_at = f"{replay_summary(replays, last)}; the last on {newest}: {verdict}"


def _print(check: Check) -> None:
    for line in check.lines():
        print(printable(line), flush=True)
