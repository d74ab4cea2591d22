"""The mesh of a run: where each rank stands on its axes, and the device meshes that its parameters lie on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from llm_pretrain.config.distributed_config import MeshSizes
from llm_pretrain.config.tree import Config
from llm_pretrain.launch.watchdog import collective_timeout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Place:
    """The place of a rank in a mesh.

    Args:
        sizes: Ranks along each axis.
        pp: Rank in the pipeline.
        data: Data-parallel group, of `sizes.data`. Ranks of a group work on the same micro batches.
        cp, tp: Place among the ranks that divide a micro batch's positions.
        is_last_stage: Whether this rank has the last stage, which computes the losses.
    """

    sizes: MeshSizes = field(default_factory=MeshSizes)
    pp: int = 0
    data: int = 0
    cp: int = 0
    tp: int = 0
    is_last_stage: bool = True

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
    def sequence_rank(self) -> int:
        """Rank among the `sizes.sequence` that divide a micro batch's positions."""
        return self.cp * self.sizes.tp + self.tp


def cp_positions(place: Place, length: int) -> Tensor:
    """Positions that `place.cp` has of a sequence of `length`: int64, ascending.

    The `tp` ranks divide these positions further, into consecutive ones.
    """
    return torch.cat([torch.arange(*chunk) for chunk in cp_chunks(place.cp, place.sizes.cp, length)])


def cp_chunks(rank: int, ranks: int, length: int) -> list[tuple[int, int]]:
    """The ranges of positions of one of the `cp` ranks.

    A sequence is cut into twice as many chunks as ranks. Rank c has the c-th chunk from the start and the
    c-th from the end, so that all ranks have equally many keys to attend to.
    """
    if ranks == 1:
        return [(0, length)]
    size = length // (2 * ranks)
    return [(number * size, (number + 1) * size) for number in (rank, 2 * ranks - 1 - rank)]


class Meshes(NamedTuple):
    """What FSDP shards over, and the groups of ranks that share a micro batch.

    Ranks that share a micro batch hold parts of one gradient, just as ranks with different micro batches do.
    So FSDP shards over ranks of both kinds, and adds the gradients of both.
    """

    shards: DeviceMesh | None = None
    """Mesh [replicas,] shards of the parameters that every rank multiplies whole; None for all ranks."""
    matrices: DeviceMesh | None = None
    """`shards` without `tp`: the mesh of matrices that are divided over `tp` already."""
    tp: DeviceMesh | None = None
    """Ranks over which matrices are divided; None without tensor parallelism."""
    cp: Any = None
    """Group of the ranks that gather each other's keys and values; None without context parallelism."""
    sequence: Any = None
    """Group of all ranks that divide a micro batch's positions (`cp` times `tp`); None for one rank."""
    pp: Any = None
    """Group of the ranks of a pipeline; None without one."""
    experts: DeviceMesh | None = None
    """The result of `expert_mesh`."""


def build_meshes(config: Config, device_type: str, world_size: int) -> Meshes:
    """The meshes and groups of a sharded run; collective.

    All ranks wait for each other whenever a group is made. So an axis of one rank gets a group only where
    FSDP needs its mesh.

    Args:
        config: Its `distributed.mesh` gives the sizes.
        device_type: "cpu" or "cuda".
        world_size: Ranks.
    """
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # takes time to import

    sizes = config.distributed.mesh(world_size)
    meshes = Meshes(experts=expert_mesh(config, device_type, world_size))
    if sizes.is_data_parallel and sizes.dp_replicate == 1:
        return meshes
    is_kept = {axis: size > 1 for axis, size in sizes._asdict().items()}
    is_kept["dp_shard"] |= sizes.tp > 1 and sizes.cp == 1
    kept = {axis: size for axis, size in sizes._asdict().items() if is_kept[axis]}
    # every mesh is a part of one: FSDP wants this of a parameter that is divided already
    world = init_device_mesh(device_type, (world_size,), mesh_dim_names=("world",))
    axes = world._unflatten(0, tuple(kept.values()), tuple(kept))
    set_timeout(axes, config)

    def product(*names: str) -> DeviceMesh:
        mesh = axes[tuple(name for name in names if is_kept[name])]
        if mesh.ndim > 1:
            mesh = mesh._flatten()
            set_timeout(mesh, config)
        return mesh

    def of_replicas(mesh: DeviceMesh) -> DeviceMesh:
        return DeviceMesh._concatenate([axes["dp_replicate"], mesh]) if sizes.dp_replicate > 1 else mesh

    if sizes.shared > 1:
        shards = of_replicas(product("dp_shard", "cp", "tp"))
        meshes = meshes._replace(shards=shards, matrices=shards)
    if sizes.tp > 1:
        meshes = meshes._replace(matrices=of_replicas(product("dp_shard", "cp")), tp=axes["tp"])
    return meshes._replace(
        cp=axes.get_group("cp") if sizes.cp > 1 else None,
        sequence=product("cp", "tp").get_group() if sizes.sequence > 1 else None,
        pp=axes.get_group("pp") if sizes.pp > 1 else None,
    )


def expert_mesh(config: Config, device_type: str, world_size: int) -> DeviceMesh | None:
    """The mesh of experts that are divided over ranks; None if each rank has all experts. Collective.

    Its axes are `ep` and `ep_shard`, over which FSDP shards the experts of a rank. If they have several
    ranks, `pp` and `ep_replicate` are axes too.
    """
    from torch.distributed.device_mesh import init_device_mesh

    ep, sizes = config.distributed.ep_size, config.distributed.mesh(world_size)
    if ep == 1 or world_size == 1:
        return None
    axes = {"pp": sizes.pp, "ep_replicate": sizes.dp_replicate, "ep_shard": sizes.shared // ep, "ep": ep}
    kept = {axis: size for axis, size in axes.items() if size > 1 or axis == "ep_shard"}
    mesh = init_device_mesh(device_type, tuple(kept.values()), mesh_dim_names=tuple(kept))
    flat = mesh["ep_shard", "ep"]._flatten()  # norms are then reduced in one collective instead of two
    for each in (mesh, flat):
        set_timeout(each, config)
    return mesh


def set_timeout(mesh: DeviceMesh, config: Config) -> None:
    """Give the groups of a mesh the time-out of the run's collectives: torch does not set it for them."""
    distributed: Any = torch.distributed  # untyped, as in collectives.py
    for dim in range(mesh.ndim):
        distributed.distributed_c10d._set_pg_timeout(collective_timeout(config), mesh.get_group(dim))
