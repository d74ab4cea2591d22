"""What a parity call launches: its variants of the configuration, checked before anything starts."""

from __future__ import annotations

import dataclasses
import math
import re
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from llm_pretrain.config.distributed_config import DistributedConfig
from llm_pretrain.config.loading import load_config, resolve_model
from llm_pretrain.config.mesh_checks import check_mesh
from llm_pretrain.config.tree import Config
from llm_pretrain.errors import ConfigError
from llm_pretrain.launch.jobs import SCRIPTS, Machine
from llm_pretrain.launch.options import (
    LaunchPlan,
    as_options,
    choose_output,
    find_scripts,
    forced_settings,
    given_options,
    parse_numbers,
    parse_words,
)

PRECISIONS = ("fp32", "bf16", "fp16")
LEAST_RANKS = {"ddp": 1, "fsdp": 1, "hsdp": 4, "ep": 2, "ep+fsdp": 4, "ep+hsdp": 4, "deepspeed": 1}
"""Name of a mesh -> fewest processes that it needs; with fewer it would be another mesh of this list."""
_AXES = ("ep", "cp", "tp", "pp")
_SIZES = re.compile(r"([1-9]\d*)x([1-9]\d*)" + "".join(rf"(?:\+{axis}([1-9]\d*))?" for axis in _AXES))
SIZES = ("dp_replicate_size", "dp_shard_size", *(f"{axis}_size" for axis in _AXES))
"""Settings of a mesh."""
CONFIGURED = "configured"
"""Name of the mesh whose sizes the configuration itself sets."""
DEFAULT_STEPS = 20
"""Default number of steps; the final parameters have a bound in runs of at most this length."""


@dataclass(frozen=True)
class Variant:
    """One way to launch the configuration.

    Args:
        path: Key of `SCRIPTS`.
        world_size: W, number of processes.
        accumulation: A, micro batches per process and step.
        micro_batch_size: B, sequences per micro batch.
        precision: `training.precision`.
        mesh: Name or sizes of the mesh, as in `distributed_of`.
    """

    path: str
    world_size: int
    accumulation: int
    micro_batch_size: int
    precision: str
    mesh: str

    @property
    def split(self) -> tuple[int, int, int]:
        """(W, A, B): how the global batch is split."""
        return self.world_size, self.accumulation, self.micro_batch_size

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        mesh = "" if self.mesh == "ddp" else f"-{self.mesh}"
        return f"{self.path}-w{self.world_size}-a{self.accumulation}-{self.precision}{mesh}"

    def __str__(self) -> str:
        mesh = "" if self.mesh == "ddp" else f" {self.mesh}"
        return f"{self.path} W={self.world_size} A={self.accumulation} {self.precision}{mesh}"


@dataclass(kw_only=True)
class ParityPlan(LaunchPlan):
    """The plan of a `llm-pretrain parity` call, with its options checked.

    Args:
        variants: In the order of the table.
    """

    variants: list[Variant]

    def options_of(self, variant: Variant) -> tuple[str, ...]:
        """Options of one variant's script, without the output folder."""
        distributed = distributed_of(variant.mesh, variant.world_size, self.config.distributed)
        settings = {f"distributed.{name}": getattr(distributed, name) for name in ("strategy", *SIZES)}
        return (
            *self.options,
            *("--training.precision", variant.precision),
            *("--training.micro_batch_size", str(variant.micro_batch_size)),
            *as_options({name: "null" if value is None else value for name, value in settings.items()}),
        )

    def strategy_of(self, variant: Variant) -> str:
        """`distributed.strategy` of one variant."""
        return distributed_of(variant.mesh, variant.world_size, self.config.distributed).strategy


def make_plan(arguments: Namespace, machine: Machine) -> ParityPlan:
    """Check the options of a call and plan its launches.

    Raises:
        PretrainError: a launch would fail because of an option or a setting.
    """
    from llm_pretrain.data.loader import open_stores

    paths = parse_words("--paths", arguments.paths or "torchrun,accelerate", tuple(SCRIPTS))
    accumulations = None
    given = given_options(arguments)
    if arguments.accumulation:  # it determines the micro batch size; the configured one need not divide
        accumulations = parse_numbers("--accumulation", arguments.accumulation)
    config = load_config([*given, *(["--training.micro_batch_size", "1"] if accumulations else [])])
    steps = min(DEFAULT_STEPS, config.training.max_steps) if arguments.steps is None else arguments.steps
    if steps < 1:
        raise ConfigError(f"--steps: expected 1 or more, found {steps}")
    sizes = arguments.world_size or ("1,2" if machine.max_world_size > 1 else "1")
    precisions, meshes = [config.training.precision], [configured_mesh(config.distributed)]
    if arguments.precision:
        precisions = parse_words("--precision", arguments.precision, PRECISIONS)
    if arguments.mesh:
        meshes = parse_meshes(arguments.mesh)
    variants, notes = build_variants(
        config, machine, paths=paths, world_sizes=parse_numbers("--world-size", sizes),
        accumulations=accumulations, precisions=precisions, meshes=meshes,
    )  # fmt: skip
    if len({each.precision for each in variants}) == len(variants):
        found, why = ", ".join(map(str, variants)), "".join(f" ({note})" for note in notes)
        raise ConfigError(
            f"--paths, --world-size: expected two or more runs of one precision to compare, found {found} "
            f"alone{why}"
        )
    widest = max(each.world_size for each in variants)
    threads = config.distributed.cpu_threads or max(1, machine.cores // widest)
    forced, changes = forced_settings(config, steps, threads, machine)
    forced |= {"evaluation.eval_steps": 0, "checkpoint.save_steps": 0}  # parity compares neither
    if config.training.spike_action == "rollback":  # without a checkpoint a rollback skips too
        forced |= {"training.spike_action": "skip"}
    options = [*given, *as_options(forced)]
    used = {each.path for each in variants}
    scripts = find_scripts([path for path in SCRIPTS if path in used])
    resolved = load_config([*options, "--training.micro_batch_size", str(variants[0].micro_batch_size)])
    return ParityPlan(
        config=resolve_model(resolved, open_stores(resolved)[0].vocab_size),
        steps=steps,
        options=options,
        scripts=scripts,
        output=choose_output(arguments.output, f"parity-{config.run.name}"),
        threads=threads,
        notes=[*notes, *changes],
        variants=variants,
    )


def build_variants(
    config: Config,
    machine: Machine,
    *,
    paths: Sequence[str],
    world_sizes: Sequence[int],
    accumulations: Sequence[int] | None,
    precisions: Sequence[str],
    meshes: Sequence[str],
) -> tuple[list[Variant], list[str]]:
    """Every combination, ordered by precision, W, A, mesh and path, and a note for each that is left out.

    Args:
        config: Gives the global batch size, B where `accumulations` is None, and the features in use.
        machine: Limits the world size.
        paths, world_sizes, accumulations, precisions, meshes: Values to combine.

    Raises:
        ConfigError: a size does not divide the global batch or exceeds the machine, or no variant can run.
    """
    limit = machine.max_world_size
    problems = [
        f"--world-size: expected at most {limit} on this machine of {machine.gpus or machine.cores} "
        f"{'GPUs' if machine.gpus else 'cores'}, found {size}"
        for size in world_sizes
        if size > limit
    ]
    left_out = {}
    for key in product(paths, precisions, meshes):
        if why := _unsupported(*key, machine, config):
            left_out[key] = f"{' '.join(key)} is left out: {why}"
    possible = [size for size in world_sizes if size <= limit]
    impossible = {}
    for mesh, size in product(meshes, possible):
        if why := _impossible(mesh, size, config):
            impossible[mesh, size] = f"{mesh} W={size} is left out: {why}"
    variants = []
    for precision, world_size, accumulation, mesh in product(
        precisions, possible, accumulations or [None], meshes
    ):
        if (mesh, world_size) in impossible:
            continue
        ranks = distributed_of(mesh, world_size, config.distributed).mesh(world_size).data
        try:
            split = _split(config, ranks, accumulation)
        except ConfigError as error:
            problems += error.problems
            continue
        variants += [
            Variant(path, world_size, *split, precision, mesh)
            for path in paths
            if (path, precision, mesh) not in left_out
        ]
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    notes = [*left_out.values(), *impossible.values()]
    if all(each.path == "trainer" for each in variants):
        why = "".join(f" ({note})" for note in notes)
        if len(impossible) == len(meshes) * len(possible):
            option = "distributed" if CONFIGURED in meshes else "--mesh"
            raise ConfigError(f"{option}: expected a mesh that can run{why}")
        raise ConfigError(f"--paths: expected torchrun or accelerate among them, to compare with{why}")
    return variants, notes


def _split(config: Config, ranks: int, accumulation: int | None) -> tuple[int, int]:
    """(A, B) of a variant with `ranks` data-parallel ranks; ConfigError if they do not divide the batch."""
    total, micro = config.training.global_batch_size, config.training.micro_batch_size
    name, option, factor = "accumulation", "--accumulation", accumulation
    if factor is None:
        name, option, factor = "micro batch size", "training.micro_batch_size", micro
    quotient, rest = divmod(total, ranks * factor)
    if not rest:
        return (quotient, micro) if accumulation is None else (accumulation, quotient)
    raise ConfigError(
        f"{option}: expected data-parallel ranks * {name} to divide training.global_batch_size {total}, "
        f"found {ranks} * {factor} = {ranks * factor}"
    )


def parse_meshes(text: str) -> list[str]:
    """Names of `LEAST_RANKS` and sizes such as `RxS+epP`, each once.

    Raises:
        ConfigError: another word.
    """
    names = [word.strip() for word in text.split(",")]
    for name in names:
        if name not in LEAST_RANKS and not _SIZES.fullmatch(name):
            raise ConfigError(
                f"--mesh: expected some of {', '.join(LEAST_RANKS)} or sizes such as 2x2 or 2x2+ep2, "
                f"found {name!r}"
            )
    return list(dict.fromkeys(names))


def configured_mesh(config: DistributedConfig) -> str:
    """Name of the configuration's mesh: the strategy, or `CONFIGURED` if the configuration sets sizes."""
    default = DistributedConfig(strategy=config.strategy)
    plain = all(getattr(config, name) == getattr(default, name) for name in SIZES)
    return config.strategy if plain else CONFIGURED


def distributed_of(mesh: str, world_size: int, config: DistributedConfig) -> DistributedConfig:
    """The `distributed` section of a mesh.

    Args:
        mesh: A name: `ddp`, `fsdp`, `deepspeed`, `hsdp` (two replicas), `ep` (all ranks divide the experts),
            `ep+fsdp` or `ep+hsdp` (two neighbours divide them). Or sizes: `RxS` of dp_replicate_size and
            dp_shard_size, with other axes `RxS+epN+cpN+tpN+ppN`. Or `CONFIGURED`.
        world_size: Number of processes.
        config: The other settings.
    """
    if mesh == CONFIGURED:
        return config
    strategy = mesh if mesh in ("ddp", "deepspeed") else "fsdp"
    values: list[int | None] = [2 if mesh.endswith("hsdp") else 1, None, 2 if mesh.startswith("ep+") else 1]
    if sizes := _SIZES.fullmatch(mesh):
        values = [int(size or 1) for size in sizes.groups()]
    elif mesh == "ep":
        values[2] = world_size
    named: dict[str, Any] = dict.fromkeys(SIZES, 1) | dict(zip(SIZES, values, strict=False))
    return dataclasses.replace(config, strategy=strategy, **named)


def _impossible(mesh: str, world_size: int, config: Config) -> str:
    """Why a mesh does not fit this number of processes or the model; empty if it fits."""
    distributed = distributed_of(mesh, world_size, config.distributed)
    least = LEAST_RANKS.get(mesh, 1)
    if _SIZES.fullmatch(mesh):
        sizes = [distributed.dp_replicate_size, distributed.dp_shard_size or 1, distributed.cp_size]
        least = math.prod([*sizes, distributed.tp_size, distributed.pp_size])
    if world_size < least:
        return f"expected {least} processes{' or more' if mesh in LEAST_RANKS else ''}"
    return next(check_mesh(dataclasses.replace(config, distributed=distributed), world_size), "")


def _unsupported(path: str, precision: str, mesh: str, machine: Machine, config: Config) -> str:
    """Why a launch path cannot run a combination; empty if it can."""
    if precision == "fp16" and path != "torchrun" and not machine.gpus:
        return "without a GPU, fp16 through Accelerate would silently train in fp32, and is refused"
    if mesh == "deepspeed" and path != "accelerate":
        return "distributed.strategy deepspeed goes through Accelerate only"
    if path != "trainer":
        return ""
    if mesh != "ddp":
        return f"it has no mesh {mesh}"
    missing = {
        "model.attention_dropout": config.model.attention_dropout,
        "model.hidden_dropout": config.model.hidden_dropout,
        "training.z_loss_coef": config.training.z_loss_coef,
        "model.router_z_loss_coef": config.model.router_z_loss_coef if config.model.moe_layers else 0,
    }
    fields = [name for name, value in missing.items() if value]
    return f"it does not support {' or '.join(fields)}" if fields else ""
