"""The `distributed` section of the configuration: how processes share a training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from llm_pretrain.config.schema import Fraction, PositiveFloat, PositiveInt, Range


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
        sync_each_batch: With `fsdp`, reduce-scatter the gradients of every micro batch. Otherwise every rank
            keeps whole gradients in fp32 until a step's last micro batch: less traffic, 4 bytes more for each
            parameter of the model.
        zero_stage: What ZeRO shards: 1 optimizer state; 2 also gradients; 3 also parameters. Default: the
            stage given to `accelerate launch`, else 2.
        cpu_threads: Threads per process. Default: OMP_NUM_THREADS if it was exported, else cores / processes
            on this machine.
        outer: `diloco`: every process, or with `fsdp` each of `dp_replicate_size` replicas, trains alone, by
            its own gradients; every `outer_steps` steps the replicas' mean moves the run's parameters
            (arXiv:2311.08105). Far less traffic, but another algorithm: what is trained depends on the number
            of replicas. Evaluations, weights and checkpoints hold the run's parameters. Default: none.
        outer_steps: Steps between two outer steps; a divisor of `training.max_steps`.
        outer_learning_rate: Of the outer steps, SGD on parameters minus the mean of the replicas.
        outer_momentum: Nesterov momentum of the outer steps.
        timeout_seconds: Time without progress (a step, a batch of an evaluation, bytes of a save) after which
            a process counts as hanging: it writes the stacks of its threads and ends with exit code 71. Also
            the time that ranks wait for each other at the start.
    """

    strategy: Literal["ddp", "fsdp", "deepspeed"] = "ddp"
    dp_replicate_size: PositiveInt = 1
    dp_shard_size: PositiveInt | None = None
    ep_size: PositiveInt = 1
    sync_each_batch: bool = True
    zero_stage: Literal[1, 2, 3] | None = None
    cpu_threads: Annotated[int, Range(gt=0, le=1 << 10)] | None = None
    outer: Literal["diloco"] | None = None
    outer_steps: PositiveInt = 100
    outer_learning_rate: PositiveFloat = 0.7
    outer_momentum: Fraction = 0.9
    timeout_seconds: Annotated[int, Range(gt=0, le=2_000_000)] = 1800  # libraries count ms in 32 bits

    def shard_size(self, world_size: int) -> int:
        """Ranks that share the state of the model under FSDP."""
        return 1 if world_size == 1 else self.dp_shard_size or max(1, world_size // self.dp_replicate_size)

    def num_replicas(self, world_size: int) -> int:
        """Replicas of the state of the model under DDP and FSDP."""
        return world_size // self.shard_size(world_size) if self.strategy == "fsdp" else world_size

    def check(self, world_size: int) -> Iterator[str]:
        """One line for each contradiction between the sizes of the mesh, strategy and number of processes."""
        if self.strategy != "fsdp":
            for name, none in (("dp_replicate_size", 1), ("dp_shard_size", None), ("ep_size", 1)):
                if (value := getattr(self, name)) != none:
                    expected = f"expected {none or 'none'} with strategy {self.strategy}"
                    yield f"distributed.{name}: {expected}, found {value}; use fsdp"
            return
        outer = f"with distributed.outer {self.outer}"
        if self.outer and self.dp_replicate_size == 1:
            yield f"distributed.dp_replicate_size: expected 2 or more {outer}, found 1"
        if self.outer and self.ep_size > 1:
            yield f"distributed.ep_size: expected 1 {outer}, found {self.ep_size}"
        if world_size == 1:
            return
        replicas, shards = self.dp_replicate_size, self.shard_size(world_size)
        if replicas * shards != world_size:
            yield (
                "distributed.dp_replicate_size * dp_shard_size: expected the world size, "
                f"{world_size}, found {replicas} * {shards}"
            )
        elif shards == 1:
            yield (
                "distributed.dp_replicate_size: expected at most half of the world size, "
                f"{world_size}, found {replicas}; for replicas that are not sharded use strategy ddp"
            )
        elif shards % self.ep_size:
            yield (
                f"distributed.ep_size: expected a divisor of a replica's {shards} ranks, found {self.ep_size}"
            )
