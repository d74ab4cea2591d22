"""Shared code of the commands that launch the entry scripts: options, checks and facts."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llm_pretrain.config.loading import to_dict, unknown_setting
from llm_pretrain.config.tree import Config
from llm_pretrain.errors import ConfigError, OutputError
from llm_pretrain.files import plain_json, replace_text
from llm_pretrain.launch.jobs import PACKAGE_ROOT, SCRIPTS, LaunchContext, Machine

_PACKAGES = ("torch", "accelerate", "transformers", "numpy")


@dataclasses.dataclass(kw_only=True)
class LaunchPlan:
    """A checked call of a command that launches the scripts.

    Args:
        config: Configuration of every launch, with a resolved model.
        steps: Optimizer steps of each run.
        options: Script options that all launches share.
        scripts: Absolute folder with the scripts.
        output: Folder to create for the runs.
        threads: CPU threads per process.
        notes: Settings that were left out or changed, and the reasons.
    """

    config: Config
    steps: int
    options: list[str]
    scripts: Path
    output: Path
    threads: int
    notes: list[str]


class _Setting(argparse.Action):
    """Stores a setting's original text, to pass it on to the scripts."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        namespace.settings = [*(getattr(namespace, "settings", None) or []), option_string, values]


def add_run_options(
    parser: argparse.ArgumentParser, command: str, launch: str, *, timeout: float = 1800.0
) -> None:
    """Declare `--output` and `--timeout`; `launch` names one launch in a help text."""
    parser.add_argument(
        "--output", metavar="FOLDER",
        help=f"new folder for the runs and {command}.json (default: runs/{command}-NAME)",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=float, default=timeout, metavar="SECONDS",
        help=f"{launch} that takes longer is killed and counts as failed (default: %(default)g)",
    )  # fmt: skip


def add_configuration(parser: argparse.ArgumentParser, command: str) -> None:
    """Declare `--config`, which must be given, and every setting of the configuration."""
    parser.usage = f"llm-pretrain {command} --config FILE [options] [--section.field VALUE ...]"
    parser.add_argument(
        "--config", action="append", required=True, metavar="FILE",
        help="as for the scripts; the later file wins",
    )  # fmt: skip
    add_settings(parser)


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Declare every setting of the configuration, hidden from the help."""
    parser.set_defaults(settings=[], refuse=reject_unknown)
    for section in dataclasses.fields(Config):
        for each in dataclasses.fields(section.default_factory()):  # type: ignore[misc,arg-type]  # a section's class
            parser.add_argument(
                f"--{section.name}.{each.name}", action=_Setting, dest="settings", help=argparse.SUPPRESS,
                default=argparse.SUPPRESS,
            )  # fmt: skip


def reject_unknown(words: list[str]) -> None:
    """Raise ConfigError with similar names if settings are mistyped; argparse reports other words."""
    names = [word[2:].partition("=")[0] for word in words if word.startswith("--") and "." in word]
    if names:
        raise ConfigError(*(unknown_setting(name) for name in names))


def given_options(arguments: argparse.Namespace) -> list[str]:
    """A command line's configuration files and settings, as options for the scripts."""
    return [word for file in arguments.config or [] for word in ("--config", file)] + list(arguments.settings)


def as_options(settings: Mapping[str, object]) -> list[str]:
    """Settings as options for the scripts."""
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def forced_settings(
    config: Config, steps: int, threads: int, machine: Machine
) -> tuple[dict[str, object], list[str]]:
    """Settings that override the configuration in every launch; notes if determinism or warm-up change.

    They set the run's length, a row and a parameter digest per step, no trackers, and determinism on a GPU.
    """
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
    notes = []
    if machine.gpus and not config.training.deterministic:
        forced["training.deterministic"] = "true"
        notes.append("training.deterministic true: bit identity on a GPU needs it")
    if warmup < config.schedule.warmup_steps:
        notes.append(
            f"schedule.warmup_steps {warmup}, not {config.schedule.warmup_steps}: the runs are short"
        )
    return forced, notes


def find_scripts(paths: Sequence[str]) -> Path:
    """The folder with the scripts of these launch paths: the working directory, else the project's folder.

    Raises:
        ConfigError: a script is missing.
    """
    missing: list[str] = []
    for folder in (Path.cwd(), PACKAGE_ROOT):
        missing = [SCRIPTS[path] for path in paths if not (folder / SCRIPTS[path]).is_file()]
        if not missing:
            return folder.resolve()
    raise ConfigError(
        f"{PACKAGE_ROOT}: expected {', '.join(missing)} there, found none; start in the folder with the "
        "scripts, or leave the path out of --paths"
    )


def choose_output(given: str | None, name: str) -> Path:
    """The folder for the runs: the given folder; if none is given, the first unused runs/NAME.

    Raises:
        OutputError: the given path is a folder with files.
    """
    if given is not None:
        folder = Path(given)
        if folder.is_dir() and os.listdir(folder):
            raise OutputError(
                f"--output {folder}: expected a new or empty folder, found files in it; choose another"
            )
        return folder
    number, folder = 1, Path("runs") / name
    while folder.exists():
        number += 1
        folder = Path("runs") / f"{name}-{number}"
    return folder


def parse_words(option: str, text: str, known: Sequence[str]) -> list[str]:
    """The comma-separated words of a text, without repetitions.

    Raises:
        ConfigError: a word that is not in `known`.
    """
    found = [word.strip() for word in text.split(",")]
    if wrong := [word for word in found if word not in known]:
        raise ConfigError(f"{option}: expected some of {', '.join(known)}, found {wrong[0]!r}")
    return list(dict.fromkeys(found))


def parse_numbers(option: str, text: str) -> list[int]:
    """The comma-separated positive integers of a text, without repetitions.

    Raises:
        ConfigError: the text has something else.
    """
    found = [word.strip() for word in text.split(",")]
    if wrong := [word for word in found if not word.isdecimal() or int(word) < 1]:
        raise ConfigError(f"{option}: expected whole numbers from 1 on, with commas, found {wrong[0]!r}")
    return list(dict.fromkeys(map(int, found)))


def create_output(plan: LaunchPlan, arguments: argparse.Namespace, machine: Machine) -> LaunchContext:
    """Create the output folder; raises OutputError if that fails."""
    # Another call may have taken the default name a moment ago; two calls must not share a folder.
    try:
        plan.output.mkdir(parents=True, exist_ok=arguments.output is not None)
    except OSError as error:
        raise OutputError(
            f"--output {plan.output}: expected a folder that can be made, found: {error.strerror}"
        ) from error
    return LaunchContext(plan.scripts, machine, arguments.timeout, plan.config.distributed.zero_stage)


def call_facts(
    plan: LaunchPlan, arguments: argparse.Namespace, machine: Machine, started: float
) -> dict[str, Any]:
    """Versions, machine and settings of a call, for the call's JSON file; `started` is Unix time."""
    import torch

    from llm_pretrain.hardware import environment, package_version

    found = environment(torch.device("cuda", 0) if machine.gpus else torch.device("cpu"))
    versions = {name: found[name] for name in ("python", "llm_pretrain")}
    return {
        "versions": versions | {package: package_version(package) for package in _PACKAGES},
        "machine": found["platform"],
        "gpu" if machine.gpus else "cpu": found["device"],
        "cores": machine.cores,
        "gpus": machine.gpus,
        "threads": plan.threads,
        "git_revision": found["git_revision"],
        "started": started,
        "seconds": round(time.time() - started, 1),
        "config_files": arguments.config,
        "settings": arguments.settings,
        "scripts": str(plan.scripts),
        "steps": plan.steps,
        "notes": plan.notes,
        "config": to_dict(plan.config),
    }


def write_result(file: Path, content: Mapping[str, Any]) -> None:
    """Write a result file atomically."""
    replace_text(file, json.dumps(plain_json(content), indent=1, allow_nan=False, default=str) + "\n")


def say(line: str) -> None:
    """Print a line of progress and flush it."""
    print(line, flush=True)
