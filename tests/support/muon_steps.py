"""Steps of Muon on given gradients, by this process alone or by ranks that hold all or their rows.

The gradients are the same on all ranks, so that every number of ranks has to end with the same parameters.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.fork_server import Request, fork_server
from support.stepping import whole
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import Parameter

import llm_pretrain.optim.muon as muon

SHAPES = [(8, 24), (24, 8), (16, 16), (24, 8), (1, 5), (4, 6), (16, 16), (7, 10), (3, 64), (32, 8)]
"""In three parts the rows are uneven, and of two matrices one rank has none."""
EXPERTS, BLOCKS = [(5, 16, 12), (1, 8, 12)], 2
HOW = ("whole", "whole, few at a time", "whole, bf16", "sharded", "sharded, few at a time", "sharded, bf16")
FEW_ELEMENTS = 300
STEPS = 3


@dataclass
class Stepped:
    """Parameters and momenta after the steps, and after one more that `found_inf` forbids; the counted steps.

    `products`: [rows, columns] of every matrix that this rank orthogonalised in the first step.
    """

    parameters: list[Tensor] = field(default_factory=list)
    momenta: list[Tensor] = field(default_factory=list)
    after_skip: list[Tensor] = field(default_factory=list)
    counted: list[float] = field(default_factory=list)
    products: list[tuple[int, int]] = field(default_factory=list)


def draw(shapes: Sequence[tuple[int, ...]], seed: int) -> list[Tensor]:
    """Normal numbers, on all ranks the same."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def take_steps(how: str, spread: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Stepped:
    """Three steps, the last at a rate of 0, and one that is skipped."""
    stepped = Stepped()
    shapes = [*SHAPES, *EXPERTS]
    own = [Parameter(spread(tensor)) for tensor in draw(shapes, seed=0)]
    matrices = {"params": own[: len(SHAPES)], "algorithm": "muon", "blocks": 1}
    experts = {"params": own[len(SHAPES) :], "algorithm": "muon", "blocks": BLOCKS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(muon, "orthogonalize", _noted(muon.orthogonalize, stepped.products))
        if "few" in how:
            patch.setattr(muon, "BATCH_ELEMENTS", FEW_ELEMENTS)
        if "bf16" in how:
            patch.setattr(muon, "product_dtype", lambda *_: torch.bfloat16)
        optimizer: Any = muon.Muon([matrices, experts], lr=0.05, in_bf16="bf16" in how)
        for step in range(STEPS + 1):
            for parameter, gradient in zip(own, draw(shapes, seed=step + 1), strict=True):
                parameter.grad = spread(gradient)
            for group in optimizer.param_groups:
                group["lr"] = 0.0 if step == STEPS - 1 else 0.05
            if step == STEPS:
                stepped.parameters = [whole(each) for each in own]
                stepped.momenta = [whole(optimizer.state[each]["momentum_buffer"]) for each in own]
                optimizer.found_inf = torch.ones(())
            optimizer.step()
            if step == 0:
                first = len(stepped.products)
    del stepped.products[first:]
    stepped.after_skip = [whole(each) for each in own]
    stepped.after_skip += [whole(optimizer.state[each]["momentum_buffer"]) for each in own]
    stepped.counted = [float(optimizer.state[each]["step"]) for each in own]
    return stepped


def _noted(orthogonalize: Callable[..., Any], sides: list[tuple[int, int]]) -> Callable[..., Any]:
    def noted(matrices: list[Tensor], dtype: torch.dtype) -> Any:
        sides.extend((each.shape[1], each.shape[2]) for stack in matrices for each in stack.split(1))
        return orthogonalize(matrices, dtype)

    return noted


def on_ranks(world_size: int, folder: Path) -> dict[str, list[Stepped]]:
    """By way, what each of the ranks ended with."""
    output = folder / "output"
    request = Request(
        "support.muon_steps:run_rank", [str(folder)], world_size, launcher="torchrun", output=str(output)
    )
    codes = fork_server().run(request, 300)
    assert not any(codes), (codes, output.read_text()[-4000:])
    ranks = [pickle.loads((folder / f"rank-{rank}").read_bytes()) for rank in range(world_size)]
    return {how: [each[how] for each in ranks] for how in HOW}


def run_rank(folder: str) -> None:
    """Step in every way as this rank, and leave what came of it in `folder`."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    replicas = 2 if world_size == 4 else 1
    mesh = init_device_mesh("cpu", (replicas, world_size // replicas))

    def shard(tensor: Tensor) -> Tensor:
        return distribute_tensor(tensor, mesh, [Replicate(), Shard(0)])

    stepped = {how: take_steps(how, shard) if "sharded" in how else take_steps(how) for how in HOW}
    (Path(folder) / f"rank-{rank}").write_bytes(pickle.dumps(stepped))
    dist.barrier()
    dist.destroy_process_group()
