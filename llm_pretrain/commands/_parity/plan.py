"""What a parity call will run, worked out and checked before anything is started or written.

Nothing is launched here.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llm_pretrain.commands._launching.accelerate_files import settings_for
from llm_pretrain.commands._launching.machine import SCRIPTS, Machine
from llm_pretrain.commands._launching.options import (
    as_options,
    choose_output,
    find_scripts,
    forced_settings,
    given_options,
    numbers,
    words,
)
from llm_pretrain.commands._parity.cells import PRECISIONS, STRATEGIES, Cell, build_cells
from llm_pretrain.commands._parity.interruption import (
    Interruption,
    choose_save_steps,
    parse_interruptions,
)
from llm_pretrain.config import Config, load_config, resolve_model
from llm_pretrain.data import open_stores
from llm_pretrain.errors import ConfigError

DEFAULT_STEPS = 20
"""After as many the contract speaks of the parameters."""
_STEPS_AFTER_KILL = 9


@dataclass
class Plan:
    """A checked call.

    Args:
        config: As every cell has it, but for precision and split; the model resolved.
        cells: In the order of the table.
        steps: Of each.
        options: Of every cell's script.
        scripts: Absolute folder with the scripts.
        output: Folder to be made.
        threads: Per process, in every cell.
        interruptions: Empty without --interrupt.
        save_steps: Of the interrupted run.
        notes: What is left out or set, and why.
    """

    config: Config
    cells: list[Cell]
    steps: int
    options: list[str]
    scripts: Path
    output: Path
    threads: int
    interruptions: list[Interruption] = field(default_factory=list)
    save_steps: int = 0
    notes: list[str] = field(default_factory=list)

    def options_of(self, cell: Cell) -> tuple[str, ...]:
        """Options of one cell's script, but for its folder."""
        own = [
            "--training.precision",
            cell.precision,
            "--training.micro_batch_size",
            str(cell.micro_batch_size),
            "--distributed.strategy",
            cell.strategy,
        ]
        return (*self.options, *own)

    @property
    def accelerate_launches(self) -> list[tuple[str, int]]:
        """Strategies and world sizes of the launches through Accelerate."""
        launches = [(each.path, each.strategy, each.world_size) for each in self.cells]
        first = self.cells[0].strategy  # of the interrupted run
        launches += [(each.path, first, each.world_size) for each in self.interruptions]
        return sorted({(strategy, size) for path, strategy, size in launches if path == "accelerate"})


def make_plan(arguments: Namespace, machine: Machine) -> Plan:
    """Check a call and say what it will run.

    Raises:
        PretrainError: anything that would make a launch fail for a reason known before.
    """
    paths = words("--paths", arguments.paths, tuple(SCRIPTS))
    accumulations = numbers("--accumulation", arguments.accumulation) if arguments.accumulation else None
    given = given_options(arguments)
    # with --accumulation the micro batch size follows, so the configuration's need not divide
    config = load_config([*given, *(["--training.micro_batch_size", "1"] if accumulations else [])])
    interruptions = parse_interruptions(arguments.interrupt) if arguments.interrupt else []
    steps = _steps(arguments.steps, config, interruptions)
    sizes = arguments.world_size or ("1,2" if machine.most_processes > 1 else "1")
    precisions = [config.training.precision]
    if arguments.precision:
        precisions = words("--precision", arguments.precision, PRECISIONS)
    strategies = [config.distributed.strategy]
    if arguments.strategies:
        strategies = words("--strategies", arguments.strategies, STRATEGIES)
    cells, notes = build_cells(
        config, machine, paths=paths, world_sizes=numbers("--world-size", sizes),
        accumulations=accumulations, precisions=precisions, strategies=strategies,
    )  # fmt: skip
    _check_interruptions(interruptions, cells[0], config, machine)
    if not interruptions and len({cell.precision for cell in cells}) == len(cells):
        why = "".join(f" ({note})" for note in notes)
        raise ConfigError(
            f"--paths, --world-size: expected two runs of one precision or more, to compare, found "
            f"{', '.join(map(str, cells))} alone{why}"
        )
    launches = [*cells, *interruptions]
    threads = config.distributed.cpu_threads or max(
        1, machine.cores // max(each.world_size for each in launches)
    )
    forced = forced_settings(config, steps, threads)
    forced |= {"evaluation.eval_steps": 0, "checkpoint.save_steps": 0}  # they take time, and nothing else
    options = [*given, *as_options(forced)]
    if machine.gpus and not config.training.deterministic:
        options += ["--training.deterministic", "true"]
        notes.append("training.deterministic true in every cell: bit identity on a GPU needs it")
    scripts = find_scripts(
        arguments.scripts, [path for path in SCRIPTS if path in {each.path for each in launches}]
    )
    stage = config.distributed.zero_stage
    for strategy in {cell.strategy for cell in cells if "accelerate" in {each.path for each in launches}}:
        settings_for(strategy, stage, 1, on_gpu=machine.gpus > 0, scripts=scripts)
    if steps < config.schedule.warmup_steps:
        notes.append(f"schedule.warmup_steps {steps}, not {config.schedule.warmup_steps}: the runs are short")
    resolved = load_config([*options, "--training.micro_batch_size", str(cells[0].micro_batch_size)])
    resolved = resolve_model(resolved, open_stores(resolved)[0].vocab_size)
    first_kill = interruptions[0].step if interruptions else 0
    return Plan(
        config=resolved,
        cells=cells,
        steps=steps,
        options=options,
        scripts=scripts,
        output=choose_output(arguments.output, f"parity-{config.run.name}"),
        threads=threads,
        interruptions=interruptions,
        save_steps=choose_save_steps(config.checkpoint.save_steps, first_kill),
        notes=notes,
    )


def _steps(given: int | None, config: Config, interruptions: Sequence[Interruption]) -> int:
    """Steps of each cell; long enough for the last interruption."""
    if given is not None and given < 1:
        raise ConfigError(f"--steps: expected 1 or more, found {given}")
    last_kill = interruptions[-1].step if interruptions else 0
    if given is None:
        least = last_kill + _STEPS_AFTER_KILL if interruptions else 0
        return max(min(DEFAULT_STEPS, config.training.max_steps), least)
    if given <= last_kill:
        raise ConfigError(
            f"--steps: expected more than {last_kill}, the last step of --interrupt, found {given}"
        )
    return given


def _check_interruptions(
    interruptions: Sequence[Interruption], first: Cell, config: Config, machine: Machine
) -> None:
    """Each attempt must be possible, and have whole micro batches of the first cell's size."""
    if interruptions and first.path == "trainer":
        raise ConfigError(
            "--interrupt: expected torchrun or accelerate as the first of --paths, found trainer"
        )
    for each in interruptions:
        total, unit = config.training.global_batch_size, each.world_size * first.micro_batch_size
        if total % unit:
            raise ConfigError(
                f"--interrupt: expected processes * micro batch size to divide training.global_batch_size "
                f"{total}, found {each.world_size} * {first.micro_batch_size} = {unit}; the micro batch size "
                "is that of the first cell"
            )
        one = dataclasses.replace(
            config,
            training=dataclasses.replace(config.training, micro_batch_size=first.micro_batch_size),
        )
        possible, notes = build_cells(
            one, machine, paths=("torchrun", each.path), world_sizes=[each.world_size], accumulations=None,
            precisions=[first.precision], strategies=[first.strategy],
        )  # fmt: skip
        if not any(cell.path == each.path for cell in possible):
            raise ConfigError(f"--interrupt: {notes[0]}")
