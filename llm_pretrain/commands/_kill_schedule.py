"""The plan of a chaos call: kills that are drawn from a seed, and a target for each within its attempt."""

from __future__ import annotations

import random
import re
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_pretrain.commands._launch_options import (
    LaunchPlan,
    as_options,
    choose_output,
    find_scripts,
    forced_settings,
    given_options,
    parse_numbers,
    parse_words,
)
from llm_pretrain.commands._launching import RESUMABLE_PATHS, Machine, read_status
from llm_pretrain.commands._parity_plan import build_variants, configured_mesh
from llm_pretrain.config import Config, load_config, resolve_model, to_dict
from llm_pretrain.errors import ConfigError

KINDS = ("group", "rank", "launcher", "term")
"""SIGKILL of launcher and workers at once, of one worker, of the launcher alone; SIGTERM to the launcher."""
GRACEFUL_KINDS = ("launcher", "term")
"""Kinds after which the workers receive a stop signal, save a checkpoint and exit."""
MAX_KILLS_WITHOUT_SAVE = 2
"""Largest number of consecutive attempts that are killed before they commit a checkpoint."""
DEFAULT_SAVE_STEPS, _EVALUATION_BATCHES = 4, 4
_SAME_SECTIONS = ("model", "data", "optimizer", "schedule", "training", "evaluation")
"""Sections in which `--reference` must have this call's settings."""


@dataclass(frozen=True)
class Kill:
    """One kill as drawn.

    Args:
        number: From 1 on.
        path: Launch path of the attempt.
        kind: Of `KINDS`.
        rank: The worker that is killed, for kind `rank`.
        where: `start-up`, `step`, `save` or `evaluation`.
        commits: Whether the attempt commits a checkpoint first.
        place: In [0, 1), selects among the possible steps.
        delay: In [0, 1), share of the start-up, step, save or evaluation that passes before the kill.
    """

    number: int
    path: str
    kind: str
    rank: int | None
    where: str
    commits: bool
    place: float
    delay: float

    @property
    def makes_progress(self) -> bool:
        """Whether the next attempt begins at a later step."""
        return self.commits or (self.kind in GRACEFUL_KINDS and self.where != "start-up")


@dataclass(frozen=True)
class Target:
    """Where in an attempt its kill falls: after the row of `step`, or in its save or evaluation."""

    where: str
    step: int = 0

    def __str__(self) -> str:
        if self.where == "start-up":
            return self.where
        return f"after step {self.step}" if self.where == "step" else f"{self.where} of step {self.step}"


def parse_kinds(text: str, world_size: int) -> list[tuple[str, int | None]]:
    """(kind, rank) of `group,rank,rank:1`; rank None is drawn.

    Raises:
        ConfigError: an unknown kind, or a rank that the run does not have.
    """
    kinds = []
    for word in text.split(","):
        match = re.fullmatch(r"(\w+)(?::(\d+))?", word.strip())
        if match is None or match[1] not in KINDS or (match[2] and match[1] != "rank"):
            raise ConfigError(
                f"--kinds: expected some of {', '.join(KINDS)} (rank:1 for that rank), found {word.strip()!r}"
            )
        rank = int(match[2]) if match[2] else None
        if rank is not None and rank >= world_size:
            raise ConfigError(f"--kinds: expected ranks below the world size {world_size}, found {rank}")
        kinds.append((match[1], rank))
    return list(dict.fromkeys(kinds))


def draw_kills(
    count: int,
    seed: int,
    *,
    paths: Sequence[str],
    kinds: Sequence[tuple[str, int | None]],
    in_save: int,
    world_size: int,
    evaluates: bool,
) -> list[Kill]:
    """All kills of a call: kinds in equal shares, launch paths in turn, half of them after a new checkpoint.

    `in_save` of the kills fall into a save; `kinds` are as `parse_kinds` gives them.
    """
    draw = random.Random(seed)
    shares = [kinds[number % len(kinds)] for number in range(count)]
    draw.shuffle(shares)
    saves = set(draw.sample(range(count), in_save))
    half = (count + 1) // 2
    commits = [True] * half + [False] * (count - half)
    draw.shuffle(commits)
    without_save = 0
    for number in range(count):
        without_save = 0 if commits[number] else without_save + 1
        if without_save > MAX_KILLS_WITHOUT_SAVE:
            commits[number], without_save = True, 0
    kills = []
    for number, (kind, named_rank) in enumerate(shares):
        where = "save"
        if number not in saves:
            places = ["step", "step", "evaluation"] if evaluates else ["step"]
            where = draw.choice(places if commits[number] else [*places, "start-up"])
        rank = named_rank if named_rank is not None else draw.randrange(world_size)
        kills.append(
            Kill(
                number + 1, paths[number % len(paths)], kind, rank if kind == "rank" else None, where,
                commits[number], draw.random(), draw.random(),
            )
        )  # fmt: skip
    return kills


def required_saves(kills: Sequence[Kill]) -> int:
    """Saves that a run needs to have room for all kills: one for each that makes progress, and the last."""
    return sum(kill.makes_progress for kill in kills) + 1


def choose_target(
    kill: Kill, *, checkpoint: int, steps: int, save_steps: int, eval_steps: int, later_progress: int
) -> Target:
    """Where in an attempt its kill falls.

    Args:
        kill: As drawn.
        checkpoint: Step from which the attempt resumes.
        steps, save_steps, eval_steps: Of the run.
        later_progress: Number of later kills that make progress; as many saves are left for them.
    """
    if checkpoint >= steps - 1:  # stop signals have brought the run here sooner than drawn
        return Target("start-up")
    ahead = [step for step in range(save_steps, steps, save_steps) if step > checkpoint]
    new = 0
    if kill.commits and ahead:
        spare = max(0, len(ahead) - 1 - later_progress)
        new = 1 + int(kill.place * (spare // (later_progress + 1) + 1))
    last = ahead[new - 1] if new else checkpoint
    following = ahead[new] if new < len(ahead) else steps
    if kill.where == "save":  # the last save only where there is no other, since the run ends after it
        return Target("save", ahead[-1] if following == steps and ahead else following)
    if kill.where == "evaluation" and eval_steps:
        first = last + 2  # the row before it must be written by this attempt
        candidates = [step for step in range(first, min(following, steps - 1) + 1) if step % eval_steps == 0]
        if candidates:
            return Target("evaluation", candidates[int(kill.place * len(candidates))])
    rows = range(last + 1, following)
    if kill.where == "start-up" or not rows:
        return Target("start-up")
    return Target("step", rows[int(kill.place * len(rows))])


@dataclass(kw_only=True)
class ChaosPlan(LaunchPlan):
    """A checked chaos call.

    Args:
        paths: Launch paths, used in turn.
        world_size: Processes of every attempt and of the reference.
        save_steps, eval_steps: Of the run; 0 evaluation steps for no evaluation.
        kills: As drawn.
        in_save: Number of kills during a save.
        reference: A finished run to compare with; None to make one.
    """

    paths: list[str]
    world_size: int
    save_steps: int
    eval_steps: int
    kills: list[Kill]
    in_save: int
    reference: Path | None = None


def make_plan(arguments: Namespace, machine: Machine) -> ChaosPlan:
    """Check a call and draw its kills.

    Raises:
        PretrainError: whatever would make a launch fail and can be found before it.
    """
    from llm_pretrain.data import open_stores

    paths, given = parse_words("--paths", arguments.paths, RESUMABLE_PATHS), given_options(arguments)
    config = load_config(given)
    count, in_save = arguments.kills, arguments.in_save
    if count < 1:
        raise ConfigError(f"--kills: expected 1 or more, found {count}")
    world_size = _world_size(arguments.world_size, config, machine, paths)
    in_save = count // 4 if in_save is None else in_save
    if not 0 <= in_save <= count:
        raise ConfigError(f"--in-save: expected 0 to --kills {count}, found {in_save}")
    kills = draw_kills(
        count, arguments.seed, paths=paths, kinds=parse_kinds(arguments.kinds, world_size),
        in_save=in_save, world_size=world_size, evaluates=config.evaluation.eval_steps > 0,
    )  # fmt: skip
    reference = Path(arguments.reference) if arguments.reference else None
    needed = required_saves(kills)
    steps, save_steps = _steps(arguments, config, reference, needed)
    saves = -(-steps // save_steps)
    if save_steps < 2 or saves < needed:
        raise ConfigError(
            f"--steps, --save-steps: expected saves at least two steps apart, and at least {needed} of them, "
            f"since so many of --kills {count} come after a new checkpoint, found {saves} in {steps} steps, "
            f"one every {save_steps}; --steps {max(2, save_steps) * needed} would do"
        )
    threads = config.distributed.cpu_threads or max(1, machine.cores // world_size)
    forced, notes = forced_settings(config, steps, threads, machine)
    forced["checkpoint.save_steps"] = save_steps
    if arguments.async_save:
        forced["checkpoint.async_save"] = "true"
    eval_steps = config.evaluation.eval_steps
    if eval_steps and reference is None and "--evaluation.eval_steps" not in arguments.settings:
        eval_steps = min(eval_steps, save_steps + 1, steps)  # some must fall into a short run
        batches = min(config.evaluation.max_batches or _EVALUATION_BATCHES, _EVALUATION_BATCHES)
        forced |= {"evaluation.eval_steps": eval_steps, "evaluation.max_batches": batches}
        notes.append(f"evaluated every {eval_steps} steps, on {_EVALUATION_BATCHES} batches at most")
    if reference is not None:  # it decides what rows have, as far as this call does not say
        own = _config_of(reference)
        forced["logging.parameters_sha256"] = str(own.logging.parameters_sha256).lower()
        for name in ("eval_steps", "max_batches"):
            if f"--evaluation.{name}" not in arguments.settings:
                value = getattr(own.evaluation, name)
                forced[f"evaluation.{name}"] = "null" if value is None else value
    scripts, options = find_scripts(arguments.scripts, paths), [*given, *as_options(forced)]
    resolved = load_config(options)
    resolved = resolve_model(resolved, open_stores(resolved)[0].vocab_size)
    if reference is not None:
        check_reference(reference, resolved, world_size)
    return ChaosPlan(
        config=resolved, steps=steps, options=options, scripts=scripts,
        output=choose_output(arguments.output, f"chaos-{config.run.name}"), threads=threads,
        notes=notes, paths=paths, world_size=world_size,
        save_steps=save_steps, eval_steps=resolved.evaluation.eval_steps, kills=kills, in_save=in_save,
        reference=reference,
    )  # fmt: skip


def _world_size(given: str | None, config: Config, machine: Machine, paths: Sequence[str]) -> int:
    """Processes as given, else two, or one where two do not fit; checked for every launch path."""
    training = config.training
    if given is not None:
        size, *more = parse_numbers("--world-size", given)
        if more:
            raise ConfigError(f"--world-size: expected one number, the same for every attempt, found {given}")
    else:
        fits = training.global_batch_size % (2 * training.micro_batch_size) == 0
        size = 2 if machine.max_world_size > 1 and fits else 1
    variants, notes = build_variants(
        config, machine, paths=paths, world_sizes=[size], accumulations=None,
        precisions=[training.precision], meshes=[configured_mesh(config.distributed)],
    )  # fmt: skip
    if len(variants) < len(paths):
        raise ConfigError(f"--paths: {'; '.join(notes)}")
    return size


def _steps(arguments: Namespace, config: Config, reference: Path | None, needed: int) -> tuple[int, int]:
    """Steps of the run and steps between its saves, of which there must be `needed`."""
    steps, save_steps = arguments.steps, arguments.save_steps
    for option, value in (("--steps", steps), ("--save-steps", save_steps)):
        if value is not None and value < 1:
            raise ConfigError(f"{option}: expected 1 or more, found {value}")
    if save_steps is None and "--checkpoint.save_steps" in arguments.settings:
        save_steps = config.checkpoint.save_steps
    if steps is None and reference is not None:
        steps = read_status(reference).get("step")
    wanted = needed + needed // 2 + 1  # after a stop signal a run continues for some steps
    if save_steps is None:
        fitting = max(2, steps // wanted) if steps else DEFAULT_SAVE_STEPS
        save_steps = min(fitting, DEFAULT_SAVE_STEPS, max(2, config.checkpoint.save_steps or fitting))
    return steps or save_steps * wanted, save_steps


def _config_of(reference: Path) -> Config:
    file = reference / "config.yaml"
    if not file.is_file():
        raise ConfigError(
            f"--reference {reference}: expected the folder of a run, found no config.yaml there"
        )
    return load_config(["--config", str(file)])


def check_reference(reference: Path, config: Config, world_size: int) -> None:
    """Check that a finished run can serve as this call's reference.

    Raises:
        ConfigError: it has not finished, or its settings or number of processes are different.
    """
    status, own = read_status(reference), _config_of(reference)
    where, steps = f"--reference {reference}", config.training.max_steps
    found = (status.get("state"), status.get("step"), status.get("world_size"))
    if found != ("finished", steps, world_size):
        raise ConfigError(
            f"{where}: expected a run that finished {steps} steps on {world_size} processes, found "
            f"{found[0] or 'no status.json'} at step {found[1]} on {found[2]}"
        )
    left: dict[str, Any] = to_dict(own)
    right: dict[str, Any] = to_dict(config)
    names = [(section, name) for section in _SAME_SECTIONS for name in right[section]]
    names += [("run", "seed"), ("distributed", "strategy"), ("distributed", "cpu_threads")]
    for section, name in names:
        if left[section].get(name) != right[section][name]:
            raise ConfigError(
                f"{where}: expected {section}.{name} {right[section][name]}, as in this call, found "
                f"{left[section].get(name)}; leave --reference out, or use the same settings"
            )
    if own.logging.logging_steps != 1:
        raise ConfigError(f"{where}: expected logging.logging_steps 1, found {own.logging.logging_steps}")
