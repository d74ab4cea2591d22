"""`llm-pretrain verify`: checks a run's files against each other, or the isolation of packed documents."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_pretrain.errors import CheckpointError, ConfigError, PretrainError, printable

if TYPE_CHECKING:
    from llm_pretrain.config import Config

EXAMPLES = f"""\
exit code: 0 all that was looked at is as it should be, {CheckpointError.exit_code} something is not, 2 usage

examples:
  llm-pretrain verify runs/quickstart
  llm-pretrain verify runs/quickstart --samples all --json
  llm-pretrain verify --packing data/stores/stdlib
  llm-pretrain verify --packing data/stores/stdlib --config configs/tiny-moe.yaml --precision bf16
"""
_SEQUENCES, _DOCUMENTS = 4, 6
_RUN_FILES = ("config.yaml", "metrics.jsonl", "status.json", "attempts.jsonl", "checkpoints")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help="folder of a run, such as runs/NAME")
    parser.add_argument(
        "--samples",
        metavar="all|N",
        help="rows of metrics.jsonl whose samples are assembled again and compared, evenly chosen "
        "(default: as many as take some seconds)",
    )
    parser.add_argument(
        "--packing",
        metavar="STORE",
        help="instead of a run: change documents in packed sequences of this store, and look at the others",
    )
    parser.add_argument(
        "--config",
        action="append",
        metavar="FILE",
        help="with --packing: model, packing, length; may be given several times (default: a small model)",
    )
    numbers = {
        "sequences": ("N", f"sequences to take (default: {_SEQUENCES})"),
        "documents": ("N", f"documents to change in each, one at a time (default: up to {_DOCUMENTS})"),
        "sequence_length": ("S", "tokens (default: the config's, or 512)"),
        "seed": ("N", "chooses documents (default: 0)"),
    }
    for name, (metavar, text) in numbers.items():
        parser.add_argument(f"--{name}", type=int, metavar=metavar, help=f"with --packing: {text}")
    parser.add_argument(
        "--precision", choices=["fp32", "bf16"], help="with --packing: type of the products (default: fp32)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


_SHOWN = 4
"""Problems of one check that are printed; the rest are counted."""


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

    def lines(self, width: int) -> list[str]:
        """The printed lines: one for the check, and one for each problem."""
        parts = [self.looked_at, f"skipped: {self.reason}" if self.reason else ""]
        head = f"{self.result:<7}  {self.name:<{width}}  {'; '.join(part for part in parts if part)}".rstrip()
        more = len(self.problems) - _SHOWN
        shown = self.problems[:_SHOWN] + ([f"and {more} more"] if more > 0 else [])
        return [head, *(f"         {'':<{width}}  {line}" for line in shown)]

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
    """All checks in order; each check is passed to `show` when it is done, and so is each note."""

    def __init__(self, show: Callable[[Check | str], None] = lambda _: None):
        self.done: list[Check] = []
        self.notes: list[str] = []
        self._show = show

    @property
    def ok(self) -> bool:
        """Whether none failed."""
        return not any(check.problems for check in self.done)

    def note(self, text: str) -> None:
        """Add information that is not the result of a check."""
        self.notes.append(text)
        self._show(text)

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
    _check_usage(arguments)
    from llm_pretrain.commands._verify_data import verify_isolation

    width = 26 if arguments.packing is None else 44
    checks = Checks((lambda _: None) if arguments.json else lambda result: _print(result, width))
    if arguments.packing is None:
        subject = {"run": str(arguments.run)}
        samples = arguments.samples
        verify_run(checks, arguments.run, samples if samples in (None, "all") else int(samples))
    else:
        subject = {"store": arguments.packing}
        verify_isolation(
            checks,
            _config(arguments),
            arguments.packing,
            sequences=_SEQUENCES if arguments.sequences is None else arguments.sequences,
            documents=_DOCUMENTS if arguments.documents is None else arguments.documents,
            seed=arguments.seed or 0,
            precision=arguments.precision or "fp32",
        )
    if arguments.json:
        results = [check.as_json() for check in checks.done]
        print(json.dumps({**subject, "ok": checks.ok, "checks": results, "notes": checks.notes}, indent=1))
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
    checks.run("rows", _verify_history.read_history, run)
    if run.known_config is None:
        checks.skip("everything else", "it rests on config.yaml")
    else:
        checks.run("data", _verify_checkpoints.check_data, run)
        if run.attempts:
            checks.run("settings", _verify_history.check_settings, run)
            checks.run("steps", _verify_history.check_steps, run)
            checks.run("learning rate", _verify_history.check_learning_rate, run)
            checks.run("tokens", _verify_history.check_tokens, run)
            checks.run("finite rows", _verify_history.check_finite, run)
            if run.known_config.training.check_every or run.status.get("faults"):
                checks.run("computed twice", _verify_history.check_twice, run)
        if run.attempts and run.fingerprints is not None:
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


def _print(result: Check | str, width: int) -> None:
    for line in [f"note     {result}"] if isinstance(result, str) else result.lines(width):
        print(printable(line), flush=True)


def _check_usage(arguments: argparse.Namespace) -> None:
    problems = []
    packing = ("config", "sequences", "documents", "sequence_length", "precision", "seed")
    if (arguments.run is None) == (arguments.packing is None):
        problems.append("expected a run's folder or --packing STORE, and not both; see --help")
    elif arguments.packing is None:
        given = [name for name in packing if getattr(arguments, name) is not None]
        problems += [f"--{name}: expected together with --packing STORE, found a run" for name in given]
    elif arguments.samples is not None:
        problems.append("--samples: expected together with a run's folder, found --packing")
    text = arguments.samples
    if text not in (None, "all") and not (text.isdecimal() and int(text) > 0):
        problems.append(f"--samples: expected all or a number of rows from 1 on, found {text!r}")
    for name, least in (("sequences", 1), ("documents", 1), ("sequence_length", 2), ("seed", 0)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            problems.append(f"--{name}: expected {least} or more, found {value}")
    if arguments.seed is not None and arguments.seed >= 1 << 62:  # torch's generators take 64 bits
        problems.append(f"--seed: expected less than 2^62, found {arguments.seed}")
    if problems:
        raise ConfigError(*problems)


def _config(arguments: argparse.Namespace) -> Config:
    """The configuration of the files, or one with a small model."""
    from llm_pretrain.commands._verify_data import SMALL_MODEL
    from llm_pretrain.config import Config, load_config

    if arguments.config:
        files = [word for file in arguments.config for word in ("--config", file)]
        config = load_config(files, needs_data=False)
    else:
        config = replace(Config(), model=SMALL_MODEL)
    if arguments.sequence_length is not None:
        training = replace(config.training, sequence_length=arguments.sequence_length)
        config = replace(config, training=training)
        if arguments.sequence_length > config.model.max_position_embeddings:
            raise ConfigError(
                f"--sequence_length: expected at most model.max_position_embeddings = "
                f"{config.model.max_position_embeddings}, found {arguments.sequence_length}"
            )
    return config
