"""What a chaos call will run, worked out and checked before anything is started or written.

Nothing is launched here.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llm_pretrain.commands._chaos.ending import read_status
from llm_pretrain.commands._chaos.moments import Kill, draw_kills, least_saves, parse_kinds
from llm_pretrain.commands._launching.accelerate_files import settings_for
from llm_pretrain.commands._launching.machine import Machine
from llm_pretrain.commands._launching.options import (
    as_options,
    choose_output,
    find_scripts,
    forced_settings,
    given_options,
    numbers,
    words,
)
from llm_pretrain.commands._parity.cells import build_cells
from llm_pretrain.config import Config, load_config, resolve_model, to_dict
from llm_pretrain.data import open_stores
from llm_pretrain.errors import ConfigError

PATHS = ("torchrun", "accelerate")
"""Those whose checkpoints the other continues."""
DEFAULT_SAVE_STEPS, _EVALUATION_BATCHES = 4, 4
_SAME = ("model", "data", "optimizer", "schedule", "training", "evaluation")
"""Sections in which a reference that is used again must be this call's configuration."""


@dataclass
class Plan:
    """A checked call.

    Args:
        config: As every attempt has it; the model resolved.
        paths: Launchers, taking turns.
        world_size: Processes of every attempt and of the reference.
        steps, save_steps, eval_steps: Of the run; no evaluations with 0.
        kills: As drawn.
        in_save: So many are to fall into a save.
        options: Of every launch's script.
        scripts: Absolute folder with the scripts.
        output: Folder to be made.
        threads: Per process.
        reference: A finished run to compare with; None: one is made.
        notes: What is set or left out, and why.
    """

    config: Config
    paths: list[str]
    world_size: int
    steps: int
    save_steps: int
    eval_steps: int
    kills: list[Kill]
    in_save: int
    options: tuple[str, ...]
    scripts: Path
    output: Path
    threads: int
    reference: Path | None = None
    notes: list[str] = field(default_factory=list)


def make_plan(arguments: Namespace, machine: Machine) -> Plan:
    """Check a call and say what it will run.

    Raises:
        PretrainError: anything that would make it fail for a reason known before.
    """
    paths, given = words("--paths", arguments.paths, PATHS), given_options(arguments)
    config, notes = load_config(given), list[str]()
    if arguments.kills < 1:
        raise ConfigError(f"--kills: expected 1 or more, found {arguments.kills}")
    world_size = _world_size(arguments.world_size, config, machine, paths)
    in_save = arguments.kills // 4 if arguments.in_save is None else arguments.in_save
    if not 0 <= in_save <= arguments.kills:
        raise ConfigError(f"--in-save: expected 0 to --kills {arguments.kills}, found {in_save}")
    kills = draw_kills(
        arguments.kills, arguments.seed, paths=paths, kinds=parse_kinds(arguments.kinds, world_size),
        in_save=in_save, world_size=world_size, evaluates=config.evaluation.eval_steps > 0,
    )  # fmt: skip
    reference = Path(arguments.reference) if arguments.reference else None
    steps, save_steps = _cadence(arguments, config, reference, least_saves(kills))
    eval_steps, evaluation = _evaluation(arguments, config, steps, save_steps)
    saves = -(-steps // save_steps)
    if save_steps < 2 or saves < least_saves(kills):
        raise ConfigError(
            f"--steps, --save-steps: expected saves at least two steps apart, and {least_saves(kills)} of "
            f"them or more, since after so many of --kills {arguments.kills} the run is further on, found "
            f"{saves} in {steps} steps, one every {save_steps}; "
            f"--steps {max(2, save_steps) * least_saves(kills)} would do"
        )
    threads = config.distributed.cpu_threads or max(1, machine.cores // world_size)
    forced = forced_settings(config, steps, threads) | {"checkpoint.save_steps": save_steps} | evaluation
    if arguments.async_save:
        forced["checkpoint.async_save"] = "true"
    if machine.gpus and not config.training.deterministic:
        forced["training.deterministic"] = "true"
        notes.append("training.deterministic true: bit identity on a GPU needs it")
    if steps < config.schedule.warmup_steps:
        notes.append(f"schedule.warmup_steps {steps}, not {config.schedule.warmup_steps}: the runs are short")
    if evaluation:
        notes.append(f"evaluated every {eval_steps} steps, on {_EVALUATION_BATCHES} batches at most")
    scripts = find_scripts(arguments.scripts, paths)
    options = [*given, *as_options(forced)]
    if "accelerate" in paths:
        strategy = config.distributed
        settings_for(
            strategy.strategy, strategy.zero_stage, world_size, on_gpu=machine.gpus > 0, scripts=scripts
        )
    if reference is not None:
        options += _follow(reference)
    resolved = load_config(options)
    resolved = resolve_model(resolved, open_stores(resolved)[0].vocab_size)
    if reference is not None:
        check_reference(reference, resolved, world_size, threads)
    return Plan(
        config=resolved, paths=paths, world_size=world_size, steps=steps, save_steps=save_steps,
        eval_steps=eval_steps, kills=kills, in_save=in_save, options=tuple(options), scripts=scripts,
        output=choose_output(arguments.output, f"chaos-{config.run.name}"), threads=threads,
        reference=reference, notes=notes,
    )  # fmt: skip


def _world_size(given: str | None, config: Config, machine: Machine, paths: Sequence[str]) -> int:
    """Processes: as asked for; else two, or one where two do not fit; possible for every launcher."""
    training = config.training
    if given is not None:
        sizes = numbers("--world-size", given)
        if len(sizes) > 1:
            raise ConfigError(f"--world-size: expected one number, the same for every attempt, found {given}")
        size = sizes[0]
    else:
        fits = training.global_batch_size % (2 * training.micro_batch_size) == 0
        size = 2 if machine.most_processes > 1 and fits else 1
    cells, notes = build_cells(
        config, machine, paths=paths, world_sizes=[size], accumulations=None,
        precisions=[training.precision], strategies=[config.distributed.strategy],
    )  # fmt: skip
    if len(cells) < len(paths):
        raise ConfigError(f"--paths: {'; '.join(notes)}")
    return size


def _cadence(arguments: Namespace, config: Config, reference: Path | None, least: int) -> tuple[int, int]:
    """Steps of the run, and between its saves, of which there must be `least`."""
    steps, save_steps = arguments.steps, arguments.save_steps
    for option, value in (("--steps", steps), ("--save-steps", save_steps)):
        if value is not None and value < 1:
            raise ConfigError(f"{option}: expected 1 or more, found {value}")
    if save_steps is None and "--checkpoint.save_steps" in arguments.settings:
        save_steps = config.checkpoint.save_steps
    if steps is None and reference is not None:
        steps = read_status(reference).get("step")
    wanted = least + least // 2 + 1  # a run that is told to stop goes on for some steps
    if save_steps is None:
        fitting = max(2, steps // wanted) if steps else DEFAULT_SAVE_STEPS
        save_steps = min(fitting, DEFAULT_SAVE_STEPS, max(2, config.checkpoint.save_steps or fitting))
    return steps or save_steps * wanted, save_steps


def _evaluation(
    arguments: Namespace, config: Config, steps: int, save_steps: int
) -> tuple[int, dict[str, object]]:
    """Steps between evaluations, and what to set for them: some must fall into a short run."""
    configured = config.evaluation.eval_steps
    if not configured or arguments.reference or "--evaluation.eval_steps" in arguments.settings:
        return configured, {}
    eval_steps = min(configured, save_steps + 1, steps)
    batches = min(config.evaluation.max_batches or _EVALUATION_BATCHES, _EVALUATION_BATCHES)
    return eval_steps, {"evaluation.eval_steps": eval_steps, "evaluation.max_batches": batches}


def _follow(reference: Path) -> list[str]:
    """What a reference decides: whether rows have digests of the parameters."""
    digests = _config_of(reference).logging.parameters_sha256
    return ["--logging.parameters_sha256", str(digests).lower()]


def _config_of(reference: Path) -> Config:
    file = reference / "config.yaml"
    if not file.is_file():
        raise ConfigError(
            f"--reference {reference}: expected the folder of a run, found no config.yaml there"
        )
    return load_config(["--config", str(file)])


def check_reference(reference: Path, config: Config, world_size: int, threads: int) -> None:
    """Stop where a run that is used again is not this call's.

    Raises:
        ConfigError: it has not finished, or its settings or number of processes are others.
    """
    status, own = read_status(reference), _config_of(reference)
    where, steps = f"--reference {reference}", config.training.max_steps
    found = (status.get("state"), status.get("step"), status.get("world_size"))
    if found != ("finished", steps, world_size):
        raise ConfigError(
            f"{where}: expected a run that finished {steps} steps on {world_size} processes, found "
            f"{found[0] or 'no status.json'} at step {found[1]} on {found[2]}"
        )
    left, right = to_dict(own), to_dict(config)
    names = [(section, name) for section in _SAME for name in right[section]]
    names += [("run", "seed"), ("distributed", "strategy"), ("distributed", "cpu_threads")]
    for section, name in names:
        if left[section].get(name) != right[section][name]:
            raise ConfigError(
                f"{where}: expected {section}.{name} {right[section][name]}, as in this call, found "
                f"{left[section].get(name)}; leave --reference out, or use the same settings"
            )
    if own.logging.logging_steps != 1:
        raise ConfigError(f"{where}: expected logging.logging_steps 1, found {own.logging.logging_steps}")
    del threads
