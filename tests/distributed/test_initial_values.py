"""Initial values: whoever draws a part of a tensor gets what is there in the whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from llm_pretrain.distributed import initial_values
from llm_pretrain.distributed.initial_values import copy_into, draw_normal, materialize

SHAPES = ((7, 6), (40, 3), (5, 4, 6), (1, 64))
MESHES: list[tuple[tuple[int, ...], tuple[Placement, ...]]] = [
    ((2,), (Shard(0),)),
    ((3,), (Shard(0),)),
    ((3,), (Shard(1),)),
    ((2, 2), (Replicate(), Shard(0))),
    ((2, 2), (Shard(0), Shard(1))),
    ((2, 2), (Shard(0), Shard(0))),
    ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),  # FSDP's of rows that are divided already
]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of a test has several blocks, and the last one is smaller."""
    monkeypatch.setattr(initial_values, "BLOCK", 32)


@contextmanager
def rank_of(rank: int, world_size: int) -> Iterator[None]:
    """A process group of which this is one rank; nothing is sent."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def drawn(shape: tuple[int, ...], name: str = "w", seed: int = 1) -> Tensor:
    tensor = torch.empty(shape)
    draw_normal(tensor, 0.5, seed=seed, name=name)
    return tensor


def sharded(whole: Tensor, sizes: tuple[int, ...], placements: tuple[Placement, ...]) -> DTensor:
    """This rank's part of a tensor, with zeros."""
    mesh = dist.device_mesh.init_device_mesh("cpu", sizes)
    return dist.tensor.distribute_tensor(torch.zeros_like(whole), mesh, placements, src_data_rank=None)


def gathered(shape: tuple[int, ...], sizes: tuple[int, ...], placements: tuple[Placement, ...]) -> Tensor:
    """The tensor that the ranks' parts make, each drawn by its rank alone; NaN where nobody drew."""
    whole = torch.full(shape, torch.nan)
    world_size = torch.Size(sizes).numel()
    for rank in range(world_size):
        with rank_of(rank, world_size):
            part = sharded(whole, sizes, placements)
            draw_normal(part, 0.5, seed=1, name="w")
            values, offsets = initial_values.local_part(part)
        box = tuple(slice(start, start + size) for start, size in zip(offsets, values.shape, strict=True))
        whole[box] = values
    return whole


@pytest.mark.parametrize(("sizes", "placements"), MESHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_part_has_the_bits_of_the_whole(
    shape: tuple[int, ...], sizes: tuple[int, ...], placements: tuple[Placement, ...]
):
    assert torch.equal(gathered(shape, sizes, placements), drawn(shape))


def test_values_are_normal_and_differ_by_seed_name_and_block(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(initial_values, "BLOCK", 1 << 12)
    tensors = [drawn((32, 1 << 10), name, seed) for name in ("a", "b") for seed in (1, 2)]
    blocks = torch.cat([tensor.flatten() for tensor in tensors]).split(1 << 12)
    assert len({tuple(block[:4].tolist()) for block in blocks}) == len(blocks) == 32
    values = torch.stack(blocks)
    assert abs(values.mean()) < 0.005
    assert abs(values.std() - 0.5) < 0.005
    correlations = torch.corrcoef(values) - torch.eye(len(blocks))
    assert correlations.abs().max() < 6 / (1 << 6)
    tail = (values.abs() > 1.5).double().mean()  # three standard deviations
    assert 0.0020 < tail < 0.0034


@pytest.mark.parametrize("rows", [3, 7, 9])
def test_parts_of_a_whole_tensor_are_copied(rows: int):
    """Rows that the whole lacks stay, rows that only it has are left out."""
    whole = torch.arange(rows * 6.0).view(rows, 6) + 1
    for rank in range(3):
        with rank_of(rank, 3):
            part = sharded(torch.empty(7, 6), (3,), (Shard(0),))
            copy_into(part, whole)
            values, (start, _) = initial_values.local_part(part)
        expected = torch.zeros(7, 6)
        expected[: min(rows, 7)] = whole[:7]
        assert torch.equal(values, expected[start : start + len(values)])


def test_what_was_tied_on_the_meta_device_stays_tied():
    with torch.device("meta"):
        model = nn.ModuleDict({"a": nn.Linear(3, 4, bias=False), "b": nn.Linear(3, 4), "c": nn.Linear(3, 4)})
        model["b"].weight = model["a"].weight
    materialize(model, torch.device("cpu"))
    assert model["a"].weight is model["b"].weight
    assert all(each.device.type == "cpu" for each in model.parameters())
    places = [each.data_ptr() for each in model.parameters()]
    assert all(left != right for left, right in combinations(places, 2))
