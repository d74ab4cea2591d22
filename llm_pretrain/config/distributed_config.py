"""The `distributed` section of the configuration: how processes share a training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from llm_pretrain.config.schema import PositiveInt, Range

Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble"]


class MeshSizes(NamedTuple):
    """Ranks along each axis of a run's mesh, the outermost first: neighbouring ranks differ in `tp`."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def data(self) -> int:
        """Data-parallel degree: groups of ranks with micro batches of their own."""
        return self.dp_replicate * self.dp_shard

    @property
    def sequence(self) -> int:
        """Ranks over which the positions of a micro batch are divided."""
        return self.cp * self.tp

    @property
    def shared(self) -> int:
        """Ranks that share one copy of the state, or of a stage's, under FSDP."""
        return self.dp_shard * self.sequence

    @property
    def is_data_parallel(self) -> bool:
        """Whether every rank has micro batches and a whole model of its own, sharded or not."""
        return self.pp * self.sequence == 1


@dataclass(frozen=True)
class DistributedConfig:
    """Parallelism of the training processes.

    Args:
        strategy: `ddp`: every process holds the whole model; gradients are averaged. `fsdp`: parameters,
            gradients and optimizer state are sharded layer by layer (FSDP2). `deepspeed`: DeepSpeed ZeRO,
            through Accelerate only (extra `deepspeed`).
        dp_replicate_size: With `fsdp`, how many times the sharded state is held (HSDP): ranks are numbered
            replica by replica, so with those of a machine in one replica, only gradients travel between
            machines.
        dp_shard_size: Ranks that share a replica's state. Default: all / `dp_replicate_size`. One process
            alone shares nothing, whatever the sizes.
        ep_size: With `fsdp`, ranks over which the experts are divided, neighbours in a replica: tokens travel
            to their experts. 1: every rank computes its own tokens' experts, gathered like the rest.
        cp_size: With `fsdp`, ranks over which each sequence is divided (context parallelism): every rank
            computes its positions, and gathers the keys and values of the others.
        tp_size: With `fsdp`, ranks over which the layers' matrices and the vocabulary are divided (tensor
            parallelism), neighbours; outside of the products each has its part of the positions (sequence
            parallelism).
        pp_size: With `fsdp`, ranks over which the layers are divided (pipeline parallelism): each computes
            its layers for all micro batches of a step, and hands the hidden states on. Needs torch 2.13.
        pp_schedule: Order in which a rank computes the micro batches of its stage, by torch's names. `gpipe`:
            all forward, then all backward; `1f1b`: one of each in turns, so that fewer are in memory. The
            others give every rank two stages, and so wait less: `interleaved_1f1b`; `interleaved_zero_bubble`
            and `zbv_zero_bubble`, which wait with the gradients of the parameters.
        sync_each_batch: With `fsdp`, reduce-scatter the gradients of every micro batch. Otherwise every rank
            keeps whole gradients in fp32 until a step's last micro batch: less traffic, 4 bytes more for each
            parameter of the model. The stages of a pipeline always do.
        zero_stage: What ZeRO shards: 1 optimizer state; 2 also gradients; 3 also parameters. Default: the
            stage given to `accelerate launch`, else 2.
        cpu_threads: Threads per process. Default: OMP_NUM_THREADS if it was exported, else cores / processes
            on this machine.
        timeout_seconds: Time without progress (a step, a batch of an evaluation, bytes of a save) after which
            a process counts as hanging: it writes the stacks of its threads and ends with exit code 71. Also
            the time that ranks wait for each other at the start.
    """

    strategy: Literal["ddp", "fsdp", "deepspeed"] = "ddp"
    dp_replicate_size: PositiveInt = 1
    dp_shard_size: PositiveInt | None = None
    ep_size: PositiveInt = 1
    cp_size: PositiveInt = 1
    tp_size: PositiveInt = 1
    pp_size: PositiveInt = 1
    pp_schedule: Schedule = "1f1b"
    sync_each_batch: bool = True
    zero_stage: Literal[1, 2, 3] | None = None
    cpu_threads: Annotated[int, Range(gt=0, le=1 << 10)] | None = None
    timeout_seconds: Annotated[int, Range(gt=0, le=2_000_000)] = 1800  # libraries count ms in 32 bits

    def mesh(self, world_size: int) -> MeshSizes:
        """Ranks along each axis; of one process alone all 1, whatever is configured."""
        if world_size == 1:
            return MeshSizes()
        if self.strategy != "fsdp":
            return MeshSizes(dp_replicate=world_size)
        axes = MeshSizes(self.pp_size, self.dp_replicate_size, 1, self.cp_size, self.tp_size)
        shards = self.dp_shard_size or max(1, world_size // math.prod(axes))
        return axes._replace(dp_shard=shards)

    def stages(self, rank: int) -> list[int]:
        """The stages that rank `rank` of a pipeline has, ascending."""
        if self.pp_schedule in ("gpipe", "1f1b"):
            return [rank]
        is_v = self.pp_schedule == "zbv_zero_bubble"
        return [rank, 2 * self.pp_size - 1 - rank if is_v else self.pp_size + rank]

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of inputs and of parameters are computed apart."""
        return self.pp_size > 1 and self.pp_schedule.endswith("zero_bubble")

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline, over all of its ranks."""
        return self.pp_size * len(self.stages(0))

    def check(self, world_size: int) -> Iterator[str]:
        """One line for each contradiction between the sizes of the mesh, strategy and number of processes."""
        if self.strategy != "fsdp":
            for name, none in _FSDP_ONLY.items():
                if (value := getattr(self, name)) != none:
                    expected = f"expected {none or 'none'} with strategy {self.strategy}"
                    yield f"distributed.{name}: {expected}, found {value}; use fsdp"
            return
        if world_size == 1:
            return
        sizes = self.mesh(world_size)
        if math.prod(sizes) != world_size:
            others = [f"{axis}_size" for axis in ("cp", "tp", "pp") if getattr(sizes, axis) > 1]
            names = " * ".join(["dp_replicate_size", "dp_shard_size", *others])
            found = " * ".join(str(getattr(sizes, name.removesuffix("_size"))) for name in names.split(" * "))
            yield f"distributed.{names}: expected the world size, {world_size}, found {found}"
        elif sizes.shared == 1 and sizes.dp_replicate > 1:
            ranks = f"the world size, {world_size}"
            advice = "for replicas that are not sharded use strategy ddp"
            if sizes.pp > 1:
                ranks, advice = f"the ranks of a stage, {sizes.data}", "use dp_shard_size"
            found = sizes.dp_replicate
            yield f"distributed.dp_replicate_size: expected at most half of {ranks}, found {found}; {advice}"
        elif sizes.shared % self.ep_size:
            ranks = f"a replica's {sizes.shared} ranks"
            yield f"distributed.ep_size: expected a divisor of {ranks}, found {self.ep_size}"


_FSDP_ONLY = {
    **{"dp_replicate_size": 1, "dp_shard_size": None, "ep_size": 1},
    **{"cp_size": 1, "tp_size": 1, "pp_size": 1},
}
"""Sizes of a mesh, and their values without one."""
