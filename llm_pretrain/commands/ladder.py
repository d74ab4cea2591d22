"""`llm-pretrain ladder`: train small models of one family within a budget, and table their losses."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from llm_pretrain.config.loading import load_config, resolve_model, to_dict
from llm_pretrain.config.tree import Config
from llm_pretrain.data.store import TokenStore
from llm_pretrain.errors import EXIT_PREEMPTED, ConfigError, DataError, OutputError
from llm_pretrain.files import make_folder, remove_leftovers
from llm_pretrain.launch.jobs import LaunchContext, Machine, exit_on_signals, this_machine
from llm_pretrain.launch.options import add_settings, find_scripts, given_options, say

if TYPE_CHECKING:
    from llm_pretrain.forecast.points import Ladder

EXAMPLES = """\
Every other option is a setting, --section.field VALUE, of the family's base. The same command continues a
ladder that was stopped; runs that have ended are kept, and the table has the same bits.

examples:
  llm-pretrain ladder --input data/stores/stdlib --budget 1h
  llm-pretrain ladder --input data/stores/mine --budget 2h --config minimind-26m --output ladders/mine
  llm-pretrain ladder --input data/stores/mine --budget 1e16 --training.global_batch_size 32
"""

_CHOSEN = {
    *("data.sources", "data.weight_changes", "run.output_dir", "training.max_steps", "schedule.name"),
    *("schedule.decay_steps", "checkpoint.save_steps", "checkpoint.keep_last", "checkpoint.keep_best"),
    *("checkpoint.resume", "evaluation.eval_steps", "evaluation.sample_prompts", "evaluation.prediction"),
    *("logging.wandb_mode", "logging.tensorboard", "logging.report", "logging.parameters_sha256"),
}
"""Settings that the ladder chooses, like all of `distributed` except `distributed.timeout_seconds`."""
_NOT_COMPARED = {"data.sources", "run.name", "run.output_dir"}
"""Settings that may differ when a ladder is continued; the store is compared by its hash."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options, and every setting of the configuration."""
    parser.usage = "%(prog)s --input STORE --budget BUDGET [options]\n  [--section.field VALUE ...]"
    parser.description = (
        "Trains small models of one family, each at several numbers of tokens, within a budget; writes their "
        "losses\nto points.jsonl, from which `llm-pretrain plan` predicts larger runs."
    )
    add = parser.add_argument
    add("--input", metavar="STORE", required=True, help="token store, written by `llm-pretrain prepare`")
    add("--budget", metavar="BUDGET", required=True,
        help="of all runs: a time on this machine (90s, 20m, 2h, 1d), or FLOPs (1e16)")  # fmt: skip
    add("--config", action="append", metavar="FILE",
        help="base of the family; of several the later wins (default: the preset ladder)")  # fmt: skip
    add("--output", metavar="FOLDER", help="folder of the ladder (default: ladders/NAME of the store)")
    add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    """Plan or continue a ladder, and train it; returns 75 if a signal stopped it."""
    from llm_pretrain.forecast.budget import read_budget
    from llm_pretrain.forecast.ladder_training import new_ladder, train

    read_budget(arguments.budget)
    machine = this_machine()
    base, store, unique_tokens = open_base(arguments, machine)
    folder = (
        Path(arguments.output) if arguments.output else Path("ladders") / Path(arguments.input).resolve().name
    )
    context = LaunchContext(find_scripts(["torchrun"]), machine, math.inf)
    with locked(folder), exit_on_signals():
        try:
            ladder = continued(arguments, folder, base, store)
            if ladder is None:
                ladder = new_ladder(arguments.budget, folder, base, store, unique_tokens, context)
            return train(ladder, context)
        except (KeyboardInterrupt, SystemExit):
            say(f"stopped; the same command continues {folder}")
            return EXIT_PREEMPTED


def open_base(arguments: argparse.Namespace, machine: Machine) -> tuple[Config, str, int]:
    """(the base configuration, the store's hash, its training tokens).

    The base is resolved, with the store as its data. By default it evaluates on the whole validation split.
    It is deterministic on GPUs, so that a continued ladder measures equal numbers.
    """
    from llm_pretrain.data.loader import sequences_per_epoch
    from llm_pretrain.forecast.family import member
    from llm_pretrain.forecast.ladder_runs import with_store

    given = [word.removeprefix("--") for word in arguments.settings[::2]]
    if problems := [
        f"{name}: expected none, a ladder chooses it; --input, --budget and --output are its options"
        for name in given
        if name in _CHOSEN or (name.startswith("distributed.") and name != "distributed.timeout_seconds")
    ]:
        raise ConfigError(*problems)
    arguments.config = arguments.config or ["ladder"]
    config = load_config(given_options(arguments), needs_data=False, world_size=1)
    store = TokenStore(Path(arguments.input))
    if not store.facts["splits"]["validation"]["targets"]:
        raise DataError(
            f"--input {arguments.input}: expected a validation split to measure losses on, found none; "
            "prepare it with a larger --validation_fraction, or from more documents"
        )
    base = with_store(resolve_model(config, store.vocab_size), store.path)
    training, evaluation = base.training, base.evaluation
    if "evaluation.max_batches" not in given:  # a preset's few batches are too noisy for a fit
        evaluation = dataclasses.replace(evaluation, max_batches=None)
    training = dataclasses.replace(training, deterministic=training.deterministic or machine.gpus > 0)
    checkpoint = dataclasses.replace(base.checkpoint, resume="auto")  # no size continues another run
    base = dataclasses.replace(base, training=training, evaluation=evaluation, checkpoint=checkpoint)
    member(base, base.model.hidden_size)  # raises for a base without a family
    return base, store.hash, sequences_per_epoch(base) * base.training.sequence_length


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder, which is created if missing, so that no other ladder runs in it."""
    from llm_pretrain.forecast.ladder_training import LOCK, MEASURING
    from llm_pretrain.forecast.points import LADDER_FILE, POINTS_FILE

    if (was_there := folder.exists()) and not folder.is_dir():
        raise OutputError(f"--output {folder}: expected a folder, found a file")
    try:
        make_folder(folder)
        with FileLock(folder / LOCK, timeout=0):
            try:
                remove_leftovers(folder, (LADDER_FILE, POINTS_FILE))
                others = sorted(set(os.listdir(folder)) - {LOCK, MEASURING})
                if others and LADDER_FILE not in others:
                    raise OutputError(
                        f"--output {folder}: expected a ladder's folder, or a new or empty one, found "
                        f"{others[0]} in it; choose another"
                    )
                yield
            finally:
                if not (folder / LADDER_FILE).exists():  # nothing was planned: leave no trace
                    (folder / LOCK).unlink(missing_ok=True)
                    if not was_there:
                        with suppress(OSError):
                            folder.rmdir()
    except Timeout:
        raise OutputError(
            f"--output {folder}: expected a folder of its own, found another command that runs in it"
        ) from None


def continued(arguments: argparse.Namespace, folder: Path, base: Config, store: str) -> Ladder | None:
    """The ladder in a folder, None if there is none yet.

    Raises:
        ConfigError: the ladder has another base, budget or store; one line for each difference.
    """
    from llm_pretrain.forecast.budget import read_budget
    from llm_pretrain.forecast.points import LADDER_FILE, read_unmeasured

    ladder = read_unmeasured(folder)
    if ladder is None:
        return None
    own, found = to_dict(ladder.base), list[tuple[str, object, object]]()
    for section, values in to_dict(base).items():
        for name, value in values.items():
            if f"{section}.{name}" not in _NOT_COMPARED and own[section][name] != value:
                found.append((f"{section}.{name}", own[section][name], value))
    if ladder.store_hash != store:
        found.append(("--input", f"the store {ladder.store_hash[:12]}", f"{store[:12]} in {arguments.input}"))
    if read_budget(ladder.budget, f"{folder / LADDER_FILE}: budget") != read_budget(arguments.budget):
        found.append(("--budget", ladder.budget, arguments.budget))
    if found:
        raise ConfigError(
            *(
                f"{name}: expected {expected}, as the ladder in {folder} has, found {value}; choose another "
                "--output for another ladder"
                for name, expected, value in found
            )
        )
    say(f"continuing {folder}, planned for {ladder.budget}")
    ladder = dataclasses.replace(ladder, base=base)
    ladder.write()  # the store may have moved
    return ladder
