"""The mesh of a run: where each rank stands on its axes, and the device meshes that its parameters lie on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from llm_pretrain.config import Config, MeshSizes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Place:
    """Where a rank stands in a mesh.

    Args:
        sizes: Ranks along each axis.
        pp: Rank in the pipeline.
        data: Data-parallel group, of `sizes.data`: its ranks work on the same micro batches.
        cp, tp: Place among the ranks that divide a micro batch's positions.
        has_losses: Whether this rank has the last stage.
    """

    sizes: MeshSizes = field(default_factory=MeshSizes)
    pp: int = 0
    data: int = 0
    cp: int = 0
    tp: int = 0
    has_losses: bool = True

    @classmethod
    def of(cls, config: Config, rank: int, world_size: int) -> Place:
        """The place of a rank: neighbouring ranks differ in `tp`, then in `cp`, data and `pp`."""
        sizes = config.distributed.mesh(world_size)
        rank, tp = divmod(rank, sizes.tp)
        rank, cp = divmod(rank, sizes.cp)
        pp, data = divmod(rank, sizes.data)
        is_last = sizes.pp == 1 or config.distributed.num_stages - 1 in config.distributed.stages(pp)
        return cls(sizes, pp, data, cp, tp, is_last)

    @property
    def part(self) -> int:
        """Which part of each micro batch's positions this rank has, of `sizes.sequence`."""
        return self.cp * self.sizes.tp + self.tp


def positions_of(place: Place, length: int) -> tuple[Tensor, Tensor]:
    """Positions of sequences of `length` that belong to a rank: those of its `cp` ranks, and its own of them.

    Over `cp` they are cut in twice as many chunks as ranks, of which rank c has the c-th from the start and
    the c-th from the end, so that all have as many keys to attend to. Both int64, ascending.
    """
    seen = torch.cat([torch.arange(*chunk) for chunk in chunks_of(place.cp, place.sizes.cp, length)])
    return seen, seen.chunk(place.sizes.tp)[place.tp]


def chunks_of(rank: int, ranks: int, length: int) -> list[tuple[int, int]]:
    """The ranges of positions of one of the `cp` ranks."""
    if ranks == 1:
        return [(0, length)]
    size = length // (2 * ranks)
    return [(number * size, (number + 1) * size) for number in (rank, 2 * ranks - 1 - rank)]


class Meshes(NamedTuple):
    """What FSDP shards over, and the groups of ranks that share a micro batch.

    Ranks that share a micro batch hold parts of one gradient, just as ranks with micro batches of their own
    do. So FSDP shards over them too, and sums over all of them.
    """

    shards: DeviceMesh | None = None
    """[replicas,] ranks that share the state of what each of them multiplies whole; None for all ranks."""
    matrices: DeviceMesh | None = None
    """The same without `tp`: for what is divided over `tp` already."""
    tp: DeviceMesh | None = None
    """Ranks over which matrices are divided; None without tensor parallelism, as are the next two."""
    cp: Any = None
    """Group of the ranks that gather each other's keys and values."""
    sequence: Any = None
    """Group of all ranks that divide a micro batch's positions, the product of `cp` and `tp`."""
    pp: Any = None
    """Group of the stages of a pipeline."""


def build_meshes(config: Config, device_type: str, world_size: int) -> Meshes:
    """The meshes and groups of a sharded run; collective.

    Args:
        config: Its `distributed.mesh` gives the sizes.
        device_type: "cpu" or "cuda".
        world_size: Ranks.
    """
    from torch.distributed.device_mesh import init_device_mesh

    from llm_pretrain.distributed.fsdp import set_timeout  # both take time to import

    pp, replicas, shards, cp, tp = sizes = config.distributed.mesh(world_size)
    if sizes.is_data_parallel and replicas == 1:
        return Meshes()
    # every mesh is another division of one mesh, as FSDP wants of the mesh of an already divided parameter
    world = init_device_mesh(device_type, (world_size,), mesh_dim_names=("world",))

    def divided(**axes: int) -> DeviceMesh:
        mesh = world._unflatten(0, tuple(axes.values()), tuple(axes))
        set_timeout(mesh, config)
        return mesh

    together = replicas > 1 and not config.distributed.outer  # DiLoCo's replicas train apart
    kept = ("dp_replicate", "dp_shard") if together else ("dp_shard",)
    whole = divided(pp=pp, dp_replicate=replicas, dp_shard=shards * cp * tp)
    meshes = Meshes(shards=whole[kept], matrices=whole[kept])
    if sizes.is_data_parallel:
        return meshes
    axes = divided(pp=pp, dp_replicate=replicas, dp_shard=shards, cp=cp, tp=tp)
    if tp > 1:
        by_matrices = divided(pp=pp, dp_replicate=replicas, dp_shard=shards * cp, tp=tp)
        meshes = meshes._replace(matrices=by_matrices[kept], tp=by_matrices["tp"])
    if sizes.sequence > 1:
        by_data = divided(pp=pp, data=sizes.data, sequence=sizes.sequence)
        meshes = meshes._replace(sequence=by_data.get_group("sequence"))
    return meshes._replace(
        cp=axes.get_group("cp") if cp > 1 else None, pp=axes.get_group("pp") if pp > 1 else None
    )
