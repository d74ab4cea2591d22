"""Options that `parity` and `chaos` share: settings handed on to the scripts, lists, folders.

It checks words and paths; what the launches are for is the commands' business.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llm_pretrain.commands._launching.launching import PACKAGE_ROOT
from llm_pretrain.commands._launching.machine import SCRIPTS
from llm_pretrain.config import Config, unknown_setting
from llm_pretrain.errors import ConfigError, OutputError


class _Setting(argparse.Action):
    """Keeps a setting as it was written, for the scripts."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        namespace.settings = [*(getattr(namespace, "settings", None) or []), option_string, values]


def add_place(parser: argparse.ArgumentParser, command: str, launch: str) -> None:
    """Declare where a command's launches write, where the scripts lie, and how long a `launch` may take."""
    parser.add_argument(
        "--output", metavar="FOLDER",
        help=f"new folder for the runs and {command}.json (default: runs/{command}-NAME)",
    )  # fmt: skip
    parser.add_argument(
        "--scripts", metavar="FOLDER", help="where the scripts lie (default: this folder, else the project's)"
    )
    parser.add_argument(
        "--timeout", type=float, default=1800.0, metavar="SECONDS",
        help=f"{launch} that takes longer is killed and has failed (default: %(default)g)",
    )  # fmt: skip


def check_timeout(arguments: argparse.Namespace) -> None:
    """Raises ConfigError for a time limit that nothing can keep."""
    if not arguments.timeout > 0:
        raise ConfigError(f"--timeout: expected more than 0 seconds, found {arguments.timeout:g}")


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Declare every setting of the configuration, without a line of help each."""
    parser.set_defaults(settings=[], refuse=refuse_unknown)
    for section in dataclasses.fields(Config):
        for each in dataclasses.fields(section.default_factory()):  # type: ignore[misc,arg-type]  # a section's class
            parser.add_argument(
                f"--{section.name}.{each.name}", action=_Setting, dest="settings", help=argparse.SUPPRESS,
                default=argparse.SUPPRESS,
            )  # fmt: skip


def refuse_unknown(words: list[str]) -> None:
    """Name the neighbours of mistyped settings among words that no option took; argparse has the rest."""
    names = [word[2:].partition("=")[0] for word in words if word.startswith("--") and "." in word]
    if names:
        raise ConfigError(*(unknown_setting(name).line for name in names))


def given_options(arguments: argparse.Namespace) -> list[str]:
    """The scripts' options as the user gave them: configuration files and settings."""
    return [word for file in arguments.config for word in ("--config", file)] + list(arguments.settings)


def forced_settings(config: Config, steps: int, threads: int) -> dict[str, object]:
    """What every launch of one call has alike: its length, a row and a digest per step, nothing besides."""
    warmup, decay = min(config.schedule.warmup_steps, steps), config.schedule.decay_steps
    forced: dict[str, object] = {
        "training.max_steps": steps,
        "schedule.warmup_steps": warmup,
        "logging.logging_steps": 1,
        "logging.parameters_sha256": "true",
        "logging.report": "false",
        "logging.tensorboard": "false",
        "logging.wandb_mode": "disabled",
        "checkpoint.resume": "auto",
        "distributed.cpu_threads": threads,
    }
    if config.schedule.name == "wsd" and decay is not None and decay > steps - warmup:
        forced["schedule.decay_steps"] = steps - warmup or "null"
    return forced


def as_options(settings: dict[str, object]) -> list[str]:
    """Settings as words of a command."""
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def find_scripts(given: str | None, paths: Sequence[str]) -> Path:
    """The folder with the scripts of these paths: as given, else where this is started, else the project's.

    Raises:
        ConfigError: a script is not there.
    """
    candidates = [Path(given)] if given else [Path.cwd(), PACKAGE_ROOT]
    missing: list[str] = []
    for folder in candidates:
        missing = [SCRIPTS[path] for path in paths if not (folder / SCRIPTS[path]).is_file()]
        if not missing:
            return folder.resolve()
    raise ConfigError(
        f"--scripts {candidates[-1]}: expected {', '.join(missing)} there, found none; start in the "
        "project's folder, name the one with the scripts, or leave the path out of --paths"
    )


def choose_output(given: str | None, name: str) -> Path:
    """The folder for the runs: as given, where it is new or empty; else the first free one, runs/NAME.

    Raises:
        OutputError: a given folder has something in it, or cannot be one.
    """
    if given is not None:
        folder = Path(given)
        if folder.exists() and not folder.is_dir():
            raise OutputError(f"--output {folder}: expected a folder, found another thing")
        if folder.exists() and os.listdir(folder):
            raise OutputError(
                f"--output {folder}: expected a new or empty folder, found files in it; choose another"
            )
        return folder
    number, folder = 1, Path("runs") / name
    while folder.exists():
        number += 1
        folder = Path("runs") / f"{name}-{number}"
    return folder


def words(option: str, text: str, known: Sequence[str]) -> list[str]:
    """`text` at its commas, each word once.

    Raises:
        ConfigError: a word that is not known.
    """
    found = [word.strip() for word in text.split(",")]
    if wrong := [word for word in found if word not in known]:
        raise ConfigError(f"{option}: expected some of {', '.join(known)}, found {wrong[0]!r}")
    return list(dict.fromkeys(found))


def numbers(option: str, text: str) -> list[int]:
    """`text` at its commas as numbers from 1 on, each once.

    Raises:
        ConfigError: another thing.
    """
    found = [word.strip() for word in text.split(",")]
    if wrong := [word for word in found if not word.isdecimal() or int(word) < 1]:
        raise ConfigError(f"{option}: expected whole numbers from 1 on, with commas, found {wrong[0]!r}")
    return list(dict.fromkeys(map(int, found)))
