"""`llm-pretrain verify`: whether a run is what its files say, and whether packed documents are alone.

Reads only; a run may go on meanwhile. Comparing launch paths with each other is the business of `parity`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from llm_pretrain.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from llm_pretrain.commands._verification import Check
    from llm_pretrain.config import Config

HELP = "check from a run's files that it is what it says, or that packed documents do not see each other"

EXAMPLES = f"""\
exit code: 0 all that was looked at is as it should be, {CheckpointError.exit_code} something is not, 2 usage

examples:
  llm-pretrain verify runs/quickstart
  llm-pretrain verify runs/quickstart --samples all --json
  llm-pretrain verify --packing data/stores/stdlib
  llm-pretrain verify --packing data/stores/stdlib --config configs/tiny-moe.yaml --precision bf16
"""
_SEQUENCES, _DOCUMENTS = 4, 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
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
    parser.add_argument(
        "--sequences",
        type=int,
        metavar="N",
        help=f"with --packing: sequences to take (default: {_SEQUENCES})",
    )
    parser.add_argument(
        "--documents",
        type=int,
        metavar="N",
        help=f"with --packing: documents to change in each, one at a time (default: up to {_DOCUMENTS})",
    )
    parser.add_argument(
        "--sequence_length",
        type=int,
        metavar="S",
        help="with --packing: tokens (default: the config's, or 512)",
    )
    parser.add_argument(
        "--precision", choices=["fp32", "bf16"], help="with --packing: type of the products (default: fp32)"
    )
    parser.add_argument(
        "--seed", type=int, metavar="N", help="with --packing: chooses documents (default: 0)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Check, say what was found; returns the exit code."""
    _check_usage(arguments)
    from llm_pretrain.commands._verification import Checks, verify_isolation, verify_run

    width = 26 if arguments.packing is None else 44
    checks = Checks((lambda _: None) if arguments.json else lambda lines: _show(lines, width))
    if arguments.packing is None:
        what = {"run": str(arguments.run)}
        verify_run(checks, arguments.run, _samples(arguments.samples))
    else:
        what = {"store": arguments.packing}
        verify_isolation(
            checks,
            _config(arguments),
            arguments.packing,
            sequences=_or(arguments.sequences, _SEQUENCES),
            documents=_or(arguments.documents, _DOCUMENTS),
            seed=_or(arguments.seed, 0),
            precision=arguments.precision or "fp32",
        )
    if arguments.json:
        outcomes = [check.as_json() for check in checks.done]
        print(json.dumps({**what, "ok": checks.ok, "checks": outcomes, "notes": checks.notes}, indent=1))
    else:
        counts = {result: sum(c.result == result for c in checks.done) for result in _RESULTS}
        print(", ".join(f"{count} {result}" for result, count in counts.items()))
    return 0 if checks.ok else CheckpointError.exit_code


_RESULTS = ("ok", "failed", "skipped")


def _show(outcome: Check | str, width: int) -> None:
    for line in [f"note     {outcome}"] if isinstance(outcome, str) else outcome.lines(width):
        print(
            "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line), flush=True
        )


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _samples(text: str | None) -> str | int | None:
    return text if text in (None, "all") else int(text)


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
    """The configuration of the files, or a small one."""
    from llm_pretrain.commands._verification.isolation import SMALL_MODEL
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
