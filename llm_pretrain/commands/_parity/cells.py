"""The cells of a parity table: which script, on how many processes, with which split and precision.

Pure: it counts and names, and refuses what cannot be run before anything is started.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from llm_pretrain.commands._launching.machine import Machine
from llm_pretrain.config import Config
from llm_pretrain.errors import ConfigError

PRECISIONS = ("fp32", "bf16", "fp16")
STRATEGIES = ("ddp", "fsdp", "deepspeed")


@dataclass(frozen=True)
class Cell:
    """One run of the table.

    Args:
        path: Key of `SCRIPTS`.
        world_size: W, processes.
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
        """(W, A, B): how the global batch is shared out."""
        return self.world_size, self.accumulation, self.micro_batch_size

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        strategy = "" if self.strategy == "ddp" else f"-{self.strategy}"
        return f"{self.path}-w{self.world_size}-a{self.accumulation}-{self.precision}{strategy}"

    def __str__(self) -> str:
        strategy = "" if self.strategy == "ddp" else f" {self.strategy}"
        return f"{self.path} W={self.world_size} A={self.accumulation} {self.precision}{strategy}"


def build_cells(
    config: Config,
    machine: Machine,
    *,
    paths: Sequence[str],
    world_sizes: Sequence[int],
    accumulations: Sequence[int] | None,
    precisions: Sequence[str],
    strategies: Sequence[str],
) -> tuple[list[Cell], list[str]]:
    """Every combination in the order of precision, W, A, strategy, path; a note for each that is left out.

    Args:
        config: The run's; gives the global batch size, B where `accumulations` is None, and what a path
            may not have.
        machine: Where it runs.
        paths, world_sizes, accumulations, precisions, strategies: As asked for.

    Raises:
        ConfigError: every size that does not divide the global batch or does not fit the machine.
    """
    problems = [
        f"--world-size: expected at most {machine.most_processes}, the {_what(machine)} of this machine, "
        f"found {size}"
        for size in world_sizes
        if size > machine.most_processes
    ]
    left_out = {}
    for path, precision, strategy in product(paths, precisions, strategies):
        if why := _unsupported(path, precision, strategy, machine, config):
            left_out[path, precision, strategy] = f"{path} {precision} {strategy} is left out: {why}"
    cells = []
    possible = [size for size in world_sizes if size <= machine.most_processes]
    for precision, world_size, accumulation in product(precisions, possible, accumulations or [None]):
        split = _split(config, world_size, accumulation)
        if isinstance(split, str):
            problems.append(split)
            continue
        cells += [
            Cell(path, world_size, *split, precision, strategy)
            for strategy, path in product(strategies, paths)
            if (path, precision, strategy) not in left_out
        ]
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    if all(cell.path == "trainer" for cell in cells):
        notes = "".join(f" ({note})" for note in left_out.values())
        raise ConfigError(f"--paths: expected torchrun or accelerate among them, to compare with{notes}")
    return cells, list(left_out.values())


def _what(machine: Machine) -> str:
    return "GPUs" if machine.gpus else "cores"


def _split(config: Config, world_size: int, accumulation: int | None) -> tuple[int, int] | str:
    """(A, B) of a cell, or what is wrong with its sizes."""
    total, micro = config.training.global_batch_size, config.training.micro_batch_size
    if accumulation is not None:
        if total % (world_size * accumulation) == 0:
            return accumulation, total // (world_size * accumulation)
        fits = [each for each in range(1, total + 1) if total % (world_size * each) == 0][:6]
        advice = f"{_or(fits)} would work" if fits else f"nothing works on {world_size} processes"
        return (
            "--accumulation: expected world size * accumulation to divide training.global_batch_size "
            f"{total}, found {world_size} * {accumulation} = {world_size * accumulation}; {advice}"
        )
    if total % (world_size * micro) == 0:
        return total // (world_size * micro), micro
    fits = [each for each in range(1, total + 1) if total % (world_size * each) == 0]
    near = sorted(sorted(fits, key=lambda each: abs(each - micro))[:5])
    advice = f"{_or(near)} would work" if near else f"none works on {world_size} processes"
    return (
        f"training.micro_batch_size: expected world size * micro batch size to divide "
        f"training.global_batch_size {total}, found {world_size} * {micro} = {world_size * micro}; {advice}"
    )


def _or(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last


def _unsupported(path: str, precision: str, strategy: str, machine: Machine, config: Config) -> str:
    """Why a path has no such run; empty where it has."""
    if precision == "fp16" and path != "torchrun" and not machine.gpus:
        return "without a GPU, fp16 through Accelerate would silently train in fp32, and is refused"
    if strategy == "deepspeed" and path != "accelerate":
        return "distributed.strategy deepspeed goes through Accelerate only"
    if path != "trainer":
        return ""
    if strategy != "ddp":
        return f"it has no distributed.strategy {strategy}"
    unknown = {
        "model.attention_dropout": config.model.attention_dropout,
        "model.hidden_dropout": config.model.hidden_dropout,
        "training.z_loss_coef": config.training.z_loss_coef,
        "model.router_z_loss_coef": config.model.router_z_loss_coef if config.model.moe_layers else 0,
    }
    fields = [name for name, value in unknown.items() if value]
    return f"it has no {' and no '.join(fields)} of ours" if fields else ""


def reference_of(cell: Cell, cells: Sequence[Cell]) -> Cell:
    """The first cell of this one's precision; itself, where it comes first."""
    return next(each for each in cells if each.precision == cell.precision and each.path != "trainer")


def twin_of(cell: Cell, cells: Sequence[Cell]) -> Cell | None:
    """The first other cell of the same precision, split and strategy; None where this one comes first."""
    kind = (cell.precision, cell.split, cell.strategy)
    same = [each for each in cells if (each.precision, each.split, each.strategy) == kind]
    first = next((each for each in same if each.path != "trainer"), cell)
    return None if first == cell else first
