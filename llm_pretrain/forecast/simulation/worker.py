"""Simulates steps in a separate process, since the simulated GPU changes all of torch.

    python -m llm_pretrain.forecast.simulation.worker

Each line of standard input is a JSON object with the arguments of `simulate`. For each, standard output gets
one line with the result.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from llm_pretrain.config.loading import compiles, load_config
from llm_pretrain.errors import PretrainError
from llm_pretrain.forecast.simulation.device import register
from llm_pretrain.forecast.simulation.patches import gpu_kernels
from llm_pretrain.forecast.simulation.timing import Roofline, step_time
from llm_pretrain.forecast.simulation.trace import Trace, traced_step
from llm_pretrain.hardware import Cluster


@contextmanager
def fake_ranks(world_size: int, backend: str, rank: int = 0) -> Iterator[None]:
    """A block in a process group of `world_size` ranks, of which this is `rank`; nothing is sent."""
    dist.init_process_group(backend, rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def simulate(
    options: list[str], world_size: int, machine: Cluster, layers: int | None, rank: int
) -> dict[str, Any]:
    """Trace a rank's step, with layers that are not compiled; returns the result as plain data.

    Args:
        options: Options of the training scripts.
        world_size: Number of ranks.
        machine: The machine of the ranks.
        layers: Number of layers; None for the configured number.
        rank: The simulated rank.
    """
    device = register()
    given = load_config(options, needs_data=False, has_bf16=True, world_size=world_size)
    training = replace(given.training, compile="off")
    model = replace(given.model, num_hidden_layers=layers or given.model.num_hidden_layers)
    config = replace(given, training=training, model=model)
    fuses = compiles(given, world_size, on_gpu=True)
    roofline = Roofline(machine, fuses=fuses, length=training.sequence_length)
    ranks = fake_ranks(world_size, "cpu:fake,simulated:fake_simulated", rank)
    with ranks, gpu_kernels(divmod(machine.capability, 10)):
        trace = traced_step(config, device, observe=roofline)
    found = asdict(trace) | {"collectives": grouped(trace, machine.gpus_per_node)}
    return found | {"time": step_time(roofline, trace, machine)}


def grouped(trace: Trace, gpus_per_node: int = 1) -> list[dict[str, Any]]:
    """Collectives of a step by kind, group, and number of ranks and nodes, by first occurrence."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for each in trace.collectives:
        nodes = len({rank // gpus_per_node for rank in each.ranks})
        key = (each.kind, each.group, len(each.ranks), nodes, each.on_host)
        names = ("kind", "group", "ranks", "nodes", "on_host")
        row = rows.setdefault(key, dict(zip(names, key, strict=True)) | {"count": 0, "bytes": 0})
        times = trace.repeats if each.micro_batch == trace.alike else 1
        row["count"] += times
        row["bytes"] += times * each.size
        row["smallest"] = min(row.get("smallest", each.size), each.size)
    return list(rows.values())


def main() -> None:
    """Answer the jobs of standard input."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        try:
            job = json.loads(line)
            result = simulate(**job | {"machine": Cluster(**job["machine"])})
        except PretrainError as error:
            result = {"errors": str(error).splitlines()}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
