"""What a parity call launches: its variants of the configuration, checked before anything starts."""

from __future__ import annotations

import dataclasses
import re
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

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
from llm_pretrain.commands._launching import RESUMABLE_PATHS, SCRIPTS, Machine
from llm_pretrain.config import Config, load_config, resolve_model
from llm_pretrain.errors import ConfigError

PRECISIONS = ("fp32", "bf16", "fp16")
STRATEGIES = ("ddp", "fsdp", "deepspeed")
DEFAULT_STEPS = 20
"""Parameters have a bound for runs of at most this length."""
_STEPS_AFTER_KILL = 9


@dataclass(frozen=True)
class Variant:
    """One way to launch the configuration.

    Args:
        path: Key of `SCRIPTS`.
        world_size: W, number of processes.
        accumulation: A, micro batches per process and step.
        micro_batch_size: B, sequences per micro batch.
        precision, strategy: As in the configuration.
    """

    path: str
    world_size: int
    accumulation: int
    micro_batch_size: int
    precision: str
    strategy: str

    @property
    def split(self) -> tuple[int, int, int]:
        """(W, A, B): how the global batch is split."""
        return self.world_size, self.accumulation, self.micro_batch_size

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        strategy = "" if self.strategy == "ddp" else f"-{self.strategy}"
        return f"{self.path}-w{self.world_size}-a{self.accumulation}-{self.precision}{strategy}"

    def __str__(self) -> str:
        strategy = "" if self.strategy == "ddp" else f" {self.strategy}"
        return f"{self.path} W={self.world_size} A={self.accumulation} {self.precision}{strategy}"


@dataclass(frozen=True)
class Interruption:
    """A kill after the row of `step` is written; `path` resumes the run on `world_size` processes."""

    path: str
    world_size: int
    step: int


@dataclass(kw_only=True)
class ParityPlan(LaunchPlan):
    """A checked parity call.

    Args:
        variants: In the order of the table.
        interruptions: Of an additional run of the first variant; empty without `--interrupt`.
        save_steps: Steps between checkpoints of the interrupted run.
    """

    variants: list[Variant]
    interruptions: list[Interruption]
    save_steps: int

    def options_of(self, variant: Variant) -> tuple[str, ...]:
        """Options of one variant's script, without the output folder."""
        return (
            *self.options,
            *("--training.precision", variant.precision),
            *("--training.micro_batch_size", str(variant.micro_batch_size)),
            *("--distributed.strategy", variant.strategy),
        )


def make_plan(arguments: Namespace, machine: Machine) -> ParityPlan:
    """Check a call and list what it will launch.

    Raises:
        PretrainError: whatever would make a launch fail and can be found before it.
    """
    from llm_pretrain.data import open_stores

    paths = parse_words("--paths", arguments.paths, tuple(SCRIPTS))
    accumulations = None
    given = given_options(arguments)
    if arguments.accumulation:  # the micro batch size follows from it, so the configured one may not divide
        accumulations = parse_numbers("--accumulation", arguments.accumulation)
    config = load_config([*given, *(["--training.micro_batch_size", "1"] if accumulations else [])])
    interruptions = parse_interruptions(arguments.interrupt) if arguments.interrupt else []
    steps = _steps(arguments.steps, config, interruptions)
    sizes = arguments.world_size or ("1,2" if machine.max_world_size > 1 else "1")
    precisions, strategies = [config.training.precision], [config.distributed.strategy]
    if arguments.precision:
        precisions = parse_words("--precision", arguments.precision, PRECISIONS)
    if arguments.strategies:
        strategies = parse_words("--strategies", arguments.strategies, STRATEGIES)
    variants, notes = build_variants(
        config, machine, paths=paths, world_sizes=parse_numbers("--world-size", sizes),
        accumulations=accumulations, precisions=precisions, strategies=strategies,
    )  # fmt: skip
    first = variants[0]
    _check_interruptions(interruptions, first, config, machine)
    if not interruptions and len({each.precision for each in variants}) == len(variants):
        found, why = ", ".join(map(str, variants)), "".join(f" ({note})" for note in notes)
        raise ConfigError(
            f"--paths, --world-size: expected two or more runs of one precision to compare, found {found} "
            f"alone{why}"
        )
    launches = [*variants, *interruptions]
    widest = max(each.world_size for each in launches)
    threads = config.distributed.cpu_threads or max(1, machine.cores // widest)
    forced, changes = forced_settings(config, steps, threads, machine)
    forced |= {"evaluation.eval_steps": 0, "checkpoint.save_steps": 0}  # neither is compared
    if config.training.spike_action == "rollback":  # without a checkpoint to go back to it skips too
        forced |= {"training.spike_action": "skip"}
    options = [*given, *as_options(forced)]
    used = {each.path for each in launches}
    scripts = find_scripts(arguments.scripts, [path for path in SCRIPTS if path in used])
    resolved = load_config([*options, "--training.micro_batch_size", str(first.micro_batch_size)])
    return ParityPlan(
        config=resolve_model(resolved, open_stores(resolved)[0].vocab_size),
        steps=steps,
        options=options,
        scripts=scripts,
        output=choose_output(arguments.output, f"parity-{config.run.name}"),
        threads=threads,
        notes=[*notes, *changes],
        variants=variants,
        interruptions=interruptions,
        save_steps=choose_save_steps(config.checkpoint.save_steps, interruptions),
    )


def _steps(given: int | None, config: Config, interruptions: Sequence[Interruption]) -> int:
    """Steps of each run; more than the step of the last interruption."""
    last_kill = interruptions[-1].step if interruptions else 0
    if given is None:
        least = last_kill + _STEPS_AFTER_KILL if interruptions else 0
        return max(min(DEFAULT_STEPS, config.training.max_steps), least)
    if given < 1:
        raise ConfigError(f"--steps: expected 1 or more, found {given}")
    if given <= last_kill:
        raise ConfigError(
            f"--steps: expected more than {last_kill}, the last step of --interrupt, found {given}"
        )
    return given


def build_variants(
    config: Config,
    machine: Machine,
    *,
    paths: Sequence[str],
    world_sizes: Sequence[int],
    accumulations: Sequence[int] | None,
    precisions: Sequence[str],
    strategies: Sequence[str],
) -> tuple[list[Variant], list[str]]:
    """Every combination, in the order precision, W, A, strategy, path, and a note for each one left out.

    Args:
        config: Gives the global batch size, B where `accumulations` is None, and the features in use.
        machine: Limits the world size.
        paths, world_sizes, accumulations, precisions, strategies: Values to combine.

    Raises:
        ConfigError: every size that does not divide the global batch or exceeds the machine.
    """
    limit = machine.max_world_size
    problems = [
        f"--world-size: expected at most {limit}, the {'GPUs' if machine.gpus else 'cores'} of this machine, "
        f"found {size}"
        for size in world_sizes
        if size > limit
    ]
    left_out = {}
    for key in product(paths, precisions, strategies):
        if why := _unsupported(*key, machine, config):
            left_out[key] = f"{' '.join(key)} is left out: {why}"
    variants = []
    possible = [size for size in world_sizes if size <= limit]
    for precision, world_size, accumulation in product(precisions, possible, accumulations or [None]):
        try:
            split = _split(config, world_size, accumulation)
        except ConfigError as error:
            problems += error.problems
            continue
        variants += [
            Variant(path, world_size, *split, precision, strategy)
            for strategy, path in product(strategies, paths)
            if (path, precision, strategy) not in left_out
        ]
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    if all(each.path == "trainer" for each in variants):
        notes = "".join(f" ({note})" for note in left_out.values())
        raise ConfigError(f"--paths: expected torchrun or accelerate among them, to compare with{notes}")
    return variants, list(left_out.values())


def _split(config: Config, world_size: int, accumulation: int | None) -> tuple[int, int]:
    """(A, B) of a variant; ConfigError with sizes that would divide where these do not."""
    total, micro = config.training.global_batch_size, config.training.micro_batch_size
    name, option, factor = "accumulation", "--accumulation", accumulation
    if factor is None:
        name, option, factor = "micro batch size", "training.micro_batch_size", micro
    quotient, rest = divmod(total, world_size * factor)
    if not rest:
        return (quotient, micro) if accumulation is None else (accumulation, quotient)
    fits = [each for each in range(1, total + 1) if total % (world_size * each) == 0]
    near = fits[:6] if accumulation else sorted(sorted(fits, key=lambda each: abs(each - micro))[:5])
    *others, last = map(str, near or ["nothing"])
    advice = f"{', '.join(others)} or {last}" if others else last
    raise ConfigError(
        f"{option}: expected world size * {name} to divide training.global_batch_size {total}, "
        f"found {world_size} * {factor} = {world_size * factor}; {advice} would work"
    )


def _unsupported(path: str, precision: str, strategy: str, machine: Machine, config: Config) -> str:
    """Why a launch path cannot run a combination; empty where it can."""
    if precision == "fp16" and path != "torchrun" and not machine.gpus:
        return "without a GPU, fp16 through Accelerate would silently train in fp32, and is refused"
    if strategy == "deepspeed" and path != "accelerate":
        return "distributed.strategy deepspeed goes through Accelerate only"
    if path != "trainer":
        return ""
    if strategy != "ddp":
        return f"it has no distributed.strategy {strategy}"
    missing = {
        "model.attention_dropout": config.model.attention_dropout,
        "model.hidden_dropout": config.model.hidden_dropout,
        "training.z_loss_coef": config.training.z_loss_coef,
        "model.router_z_loss_coef": config.model.router_z_loss_coef if config.model.moe_layers else 0,
    }
    fields = [name for name, value in missing.items() if value]
    return f"it does not support {' or '.join(fields)}" if fields else ""


def parse_interruptions(text: str) -> list[Interruption]:
    """Interruptions from `torchrun@2:17,accelerate@1:31`.

    Raises:
        ConfigError: another form, an unknown path, or steps that do not ascend.
    """
    interruptions = []
    for word in text.split(","):
        match = re.fullmatch(r"(\w+)@(\d+):(\d+)", word.strip())
        if match is None or match[1] not in RESUMABLE_PATHS:
            raise ConfigError(
                f"--interrupt: expected PATH@PROCESSES:STEP,… with a path of {', '.join(RESUMABLE_PATHS)}, "
                f"found {word.strip()!r}; e.g. torchrun@2:17,accelerate@1:31"
            )
        interruptions.append(Interruption(match[1], int(match[2]), int(match[3])))
    steps = [each.step for each in interruptions]
    if min(steps) < 2 or steps != sorted(set(steps)):
        raise ConfigError(
            f"--interrupt: expected ascending steps from 2 on, since a checkpoint must come before each, "
            f"found {', '.join(map(str, steps))}"
        )
    if any(each.world_size < 1 for each in interruptions):
        raise ConfigError("--interrupt: expected one process or more after each @, found 0")
    return interruptions


def choose_save_steps(configured: int, interruptions: Sequence[Interruption]) -> int:
    """Steps between checkpoints: as configured, or fewer, so that one precedes the first kill."""
    first_kill = interruptions[0].step if interruptions else 0
    return configured if 0 < configured < first_kill else max(1, min(5, first_kill // 2))


def _check_interruptions(
    interruptions: Sequence[Interruption], first: Variant, config: Config, machine: Machine
) -> None:
    """Raise ConfigError where an attempt cannot run with the first variant's micro batch size."""
    if interruptions and first.path == "trainer":
        raise ConfigError(
            "--interrupt: expected torchrun or accelerate as the first of --paths, found trainer"
        )
    training = dataclasses.replace(config.training, micro_batch_size=first.micro_batch_size)
    config = dataclasses.replace(config, training=training)
    for each in interruptions:
        try:
            possible, notes = build_variants(
                config, machine, paths=("torchrun", each.path), world_sizes=[each.world_size],
                accumulations=None, precisions=[first.precision], strategies=[first.strategy],
            )  # fmt: skip
        except ConfigError as error:
            raise ConfigError(*(f"--interrupt: {problem}" for problem in error.problems)) from None
        if not any(variant.path == each.path for variant in possible):
            raise ConfigError(f"--interrupt: {notes[0]}")
