"""`llm-pretrain simulate`: simulates, without a GPU, one training step of one of many ranks.

The step is the run's own code on tensors without values. `--search` finds a mesh.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

from llm_pretrain.commands.estimate import with_vocabulary
from llm_pretrain.config.loading import load_config
from llm_pretrain.config.tree import Config
from llm_pretrain.errors import ConfigError
from llm_pretrain.forecast.simulated_steps import (
    SEARCHED_SHARE,
    Mesh,
    SimulatedStep,
    Simulator,
    candidates,
    findings,
    pipelines,
    simulator,
)
from llm_pretrain.hardware import CLUSTERS, Cluster
from llm_pretrain.launch.options import add_configuration, given_options
from llm_pretrain.text import size_text

EXAMPLES = """\
Every other option is a setting, --section.field VALUE. The step is that of train_pretrain.py (torchrun); the
Accelerate script's is not simulated. Times are lower bounds: no kernel and no collective
reaches the data sheets. --network_gb_per_second 12.5 and the like describe another machine.
exit code: 0; 1 where the peak does not fit; 2 for wrong input

examples:
  llm-pretrain simulate --config configs/olmoe-1b-7b.yaml --gpu h100 --world-size 64
  llm-pretrain simulate --config configs/qwen3-30b-a3b.yaml --gpu h100 --world-size 1024 \\
      --distributed.dp_replicate_size 8 --distributed.dp_shard_size 128 --distributed.ep_size 8
  llm-pretrain simulate --config configs/qwen3-30b-a3b.yaml --gpu h100 --search 1024
"""

_FIELDS = {each.name: each for each in dataclasses.fields(Cluster)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options, and every setting of the configuration."""
    add_configuration(parser, "simulate")
    parser.add_argument(
        "--gpu", type=str.lower, choices=CLUSTERS, required=True, metavar="NAME",
        help=f"the machine: {', '.join(CLUSTERS)}",
    )  # fmt: skip
    parser.add_argument(
        "--world-size", "--world_size", type=int, default=1, metavar="W", help="processes (default: 1)"
    )
    for name, field in _FIELDS.items():
        kind = int if field.type == "int" else float
        parser.add_argument(
            f"--{name}", type=kind, metavar="N", help="of the machine, instead of the preset's"
        )
    parser.add_argument(
        "--search", type=int, metavar="GPUS", help="find the mesh with the shortest step that fits"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the step or the search; returns 1 if the step does not fit into memory."""
    options = given_options(arguments)
    world_size = arguments.search or arguments.world_size
    _check(arguments)
    machine = _machine(arguments)
    if arguments.search:  # the search replaces the configured mesh
        for name, value in (("strategy", "fsdp"), ("dp_replicate_size", "1"), ("dp_shard_size", "null")):
            options += [f"--distributed.{name}", value]
        for name in ("ep_size", "cp_size", "tp_size", "pp_size"):
            options += [f"--distributed.{name}", "1"]
    config = load_config(options, needs_data=False, has_bf16=True, world_size=world_size)
    config = with_vocabulary(config)
    options += ["--model.vocab_size", str(config.model.vocab_size)]
    _check_config(config, world_size)
    with simulator(machine) as worker:
        if arguments.search:
            return _search(worker, options, config, machine, arguments)
        step = worker.step(options, config, world_size)
    if arguments.json:
        print(json.dumps(_as_json(step, config, world_size, machine), indent=1))
    else:
        _print_step(step, config, world_size, machine, arguments.gpu)
    return 0 if _fits(step, machine) else 1


def _check(arguments: argparse.Namespace) -> None:
    problems = []
    if arguments.world_size < 1:
        problems.append(f"--world-size: expected 1 or more, found {arguments.world_size}")
    if arguments.search is not None and arguments.search < 2:
        problems.append(f"--search: expected 2 GPUs or more, found {arguments.search}")
    for name in _FIELDS:
        value = getattr(arguments, name)
        if value is not None and not 0 < value < float("inf"):
            problems.append(f"--{name}: expected more than 0, found {value:g}")
    if problems:
        raise ConfigError(*problems)


def _machine(arguments: argparse.Namespace) -> Cluster:
    given = {name: value for name in _FIELDS if (value := getattr(arguments, name)) is not None}
    return dataclasses.replace(CLUSTERS[arguments.gpu], **given)


def _check_config(config: Config, world_size: int) -> None:
    """Raise ConfigError for settings that cannot be simulated."""
    problems = []
    if world_size > 1 and config.distributed.strategy != "fsdp":
        problems.append(
            "distributed.strategy: expected fsdp for a simulation of several processes, found "
            f"{config.distributed.strategy}"
        )
    if config.training.float8:
        problems.append("training.float8: expected false for a simulation, found true")
    if problems:
        raise ConfigError(*problems)


def _fits(step: SimulatedStep, machine: Cluster) -> bool:
    from llm_pretrain.memory import CUDA_CONTEXT

    return step.peak + CUDA_CONTEXT <= machine.memory_gb * 1e9


def _as_json(step: SimulatedStep, config: Config, world_size: int, machine: Cluster) -> dict[str, Any]:
    return {
        **dataclasses.asdict(step),
        "fits": _fits(step, machine),
        "seconds": step.seconds,
        "bound": step.bound,
        "tokens_per_second": config.training.tokens_per_step / step.seconds,
        "mfu": step.mfu(config, world_size, machine),
        "findings": findings(step, config, machine),
        "machine": dataclasses.asdict(machine),
    }


def _print_step(step: SimulatedStep, config: Config, world_size: int, machine: Cluster, gpu: str) -> None:
    distributed, training = config.distributed, config.training
    sizes = distributed.mesh(world_size)
    mesh = f"{sizes.dp_replicate} x {sizes.dp_shard}, ep {distributed.ep_size}"
    mesh += "".join(
        f", {axis} {getattr(sizes, axis)}" for axis in ("cp", "tp", "pp") if getattr(sizes, axis) > 1
    )
    tokens = f"{training.micro_batch_size} x {training.sequence_length} tokens"
    times = config.gradient_accumulation_steps(world_size)
    print(
        f"{config.run.name}: a step of one of {world_size} x {gpu}, {mesh} ({training.precision}, {tokens}, "
        f"{times} times)"
    )
    of_memory, of_time = (f", of rank {rank}" if sizes.pp > 1 else "" for rank in step.ranks)
    print(f"memory at the peak{of_memory}")
    for kind, size in step.held.items():
        print(f"  {kind:<34} {size_text(size):>11}")
    fits = "fits" if _fits(step, machine) else "does NOT fit"
    print(f"  {'peak':<34} {size_text(step.peak):>11}  {fits} into {machine.memory_gb:g} GB")
    print(f"collectives of a step{of_time}")
    for row in step.collectives:
        where = ", on the host" if row["on_host"] else ""
        what = f"{row['kind']} over {row['group']}{where}"
        ranks = f"{row['ranks']} ranks" + (f" on {row['nodes']} nodes" if row["nodes"] > 1 else "")
        print(f"  {what:<34} {size_text(row['bytes']):>11}  {row['count']} of {ranks}")
    _print_time(step, config, world_size, machine)
    for each in findings(step, config, machine):
        print(f"warning: {each}")


def _print_time(step: SimulatedStep, config: Config, world_size: int, machine: Cluster) -> None:
    print("time of a step, at least")
    print(f"  {'products':<34} {_seconds(step.products):>11}")
    print(f"  {'memory traffic':<34} {_seconds(step.traffic):>11}")
    for link, seconds in step.hidden.items():
        print(f"  {link + ', beside computation':<34} {_seconds(seconds):>11}")
    for link, seconds in step.waited.items():
        print(f"  {link + ', computation waits':<34} {_seconds(seconds):>11}")
    if step.idle:
        print(f"  {'waiting for other stages':<34} {_seconds(step.idle):>11}")
    speed, mfu = config.training.tokens_per_step / step.seconds, step.mfu(config, world_size, machine)
    print(
        f"  {'step':<34} {_seconds(step.seconds):>11}  at most {speed:,.0f} tokens/s, "
        f"{speed / world_size:,.0f} a GPU, MFU {mfu:.1%}; bound by {step.bound}"
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def search_meshes(
    worker: Simulator, options: list[str], config: Config, machine: Cluster, world_size: int
) -> list[tuple[SimulatedStep, Mesh]]:
    """(step, mesh) of the tried meshes on which a rank fits into memory, the shortest step first.

    Args:
        worker: Simulates the steps.
        options: Command line from which `config` was loaded.
        config: Configuration of the run; its mesh is not read.
        machine: Machine of the ranks.
        world_size: Number of ranks.
    """
    rows: list[tuple[SimulatedStep, Mesh]] = []

    def fits(mesh: Mesh) -> bool:
        step = worker.extrapolated([*options, *mesh.options()], mesh.of(config), world_size)
        if step.peak <= SEARCHED_SHARE * machine.memory_gb * 1e9:
            rows.append((step, mesh))
            return True
        return False

    meshes = candidates(config, world_size, machine)
    print(f"tracing {len(meshes)} meshes, and pipelines of the best", file=sys.stderr, flush=True)
    for mesh in meshes:
        fits(mesh)
    rows.sort(key=lambda row: row[0].seconds)
    # pipeline stages change the cost of experts, so they are also tried with the second best sizes
    sizes = dict.fromkeys(dataclasses.replace(mesh, replicas=1, shards=1) for _, mesh in rows)
    for like in [*sizes][:2] or [None]:
        for meshes in pipelines(like, config, world_size, machine):
            any(map(fits, meshes))  # stops at the first that fits
    return sorted(rows, key=lambda row: row[0].seconds)


def _search(
    worker: Simulator, options: list[str], config: Config, machine: Cluster, arguments: argparse.Namespace
) -> int:
    world_size = arguments.search
    rows = search_meshes(worker, options, config, machine, world_size)
    if not rows:
        raise ConfigError(
            f"--search: expected a mesh of {world_size} GPUs on which a rank fits into {machine.memory_gb:g} "
            "GB, found none; use more GPUs, a smaller training.micro_batch_size or "
            "training.activation_checkpointing true"
        )
    if arguments.json:
        found = [
            dataclasses.asdict(mesh) | _as_json(step, mesh.of(config), world_size, machine)
            for step, mesh in rows
        ]
        print(json.dumps(found, indent=1))
        return 0
    print(f"{config.run.name} on {world_size} x {arguments.gpu}, extrapolated from few layers")
    print("  replicas  shards  ep  cp  tp  pp         peak         step     MFU  bound by")
    for step, mesh in rows:
        print(
            f"  {mesh.replicas:>8}  {mesh.shards:>6}  {mesh.ep:>2}  {mesh.cp:>2}  {mesh.tp:>2}  "
            f"{mesh.pp:>2}  {size_text(step.peak):>11}  "
            f"{_seconds(step.seconds):>11}  {step.mfu(config, world_size, machine):>6.1%}  {step.bound}"
        )
    best = rows[0][1]
    print(f"the shortest step: {' '.join(best.options())}")
    for each in findings(rows[0][0], best.of(config), machine):
        print(f"warning: {each}")
    return 0
