"""The groups of a mesh: who is in them. In one process, whose other ranks are fake."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from llm_pretrain.config.loading import from_dict
from llm_pretrain.config.tree import Config
from llm_pretrain.distributed.fsdp import clear_mesh_caches
from llm_pretrain.distributed.mesh import Meshes, Place, build_meshes
from llm_pretrain.forecast.simulation.worker import fake_ranks

MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "all axes": (
        32,
        {"pp_size": 2, "dp_replicate_size": 2, "dp_shard_size": 2, "cp_size": 2, "tp_size": 2},
    ),
    "tp alone": (4, {"tp_size": 4}),
    "cp alone": (4, {"cp_size": 4}),
    "pp tp": (4, {"pp_size": 2, "tp_size": 2}),
    "hsdp cp": (8, {"dp_replicate_size": 2, "cp_size": 2}),
    "hsdp": (8, {"dp_replicate_size": 2}),
    "pp fsdp ep": (8, {"pp_size": 2, "ep_size": 2}),
    "ep hsdp tp": (16, {"dp_replicate_size": 2, "tp_size": 2, "ep_size": 4}),
}


@pytest.fixture(autouse=True)
def without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():  # of a time-out that a fake group lacks
        warnings.simplefilter("ignore")
        yield
    clear_mesh_caches()


def configured(sizes: dict[str, int]) -> Config:
    return from_dict({"distributed": {"strategy": "fsdp", **sizes}})


def groups_of(meshes: Meshes) -> dict[str, list[int] | None]:
    """The ranks of this rank's groups."""

    def ranks(group: Any) -> list[int] | None:
        return None if group is None else dist.get_process_group_ranks(group)

    def of_mesh(mesh: Any) -> list[int] | None:
        return None if mesh is None else mesh.mesh.flatten().tolist()

    found = {name: of_mesh(getattr(meshes, name)) for name in ("shards", "matrices", "tp", "experts")}
    return found | {name: ranks(getattr(meshes, name)) for name in ("cp", "sequence", "pp")}


def together(config: Config, rank: int, world_size: int, *axes: str) -> list[int]:
    """The ranks that differ from this one in nothing but these axes."""
    sizes = config.distributed.mesh(world_size)

    def others(other: int) -> tuple[int, ...]:
        place = Place.of(config, other, world_size)
        replica, shard = divmod(place.data, sizes.dp_shard)
        where = {"pp": place.pp, "dp_replicate": replica, "dp_shard": shard, "cp": place.cp, "tp": place.tp}
        return tuple(value for axis, value in where.items() if axis not in axes)

    return [other for other in range(world_size) if others(other) == others(rank)]


@pytest.mark.parametrize("name", MESHES)
def test_ranks_are_together_that_share_an_axis(name: str):
    world_size, sizes = MESHES[name]
    config = configured(sizes)
    mesh = config.distributed.mesh(world_size)
    state = ("dp_replicate", "dp_shard")
    for rank in range(world_size):
        with fake_ranks(world_size, "fake", rank):
            found = groups_of(build_meshes(config, "cpu", world_size))

        def expected(*axes: str, rank: int = rank) -> list[int]:
            return together(config, rank, world_size, *axes)

        assert found["shards"] == expected(*state, "cp", "tp")
        assert found["matrices"] == expected(*state, "cp")
        assert found["tp"] == (expected("tp") if mesh.tp > 1 else None)
        assert found["cp"] == (expected("cp") if mesh.cp > 1 else None)
        assert found["sequence"] == (expected("cp", "tp") if mesh.sequence > 1 else None)
        assert found["pp"] == (expected("pp") if mesh.pp > 1 else None)
        assert (found["experts"] is None) == ("ep_size" not in sizes)
