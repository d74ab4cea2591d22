"""DiLoCo (arXiv:2311.08105): replicas that train on their own, and an outer optimizer over their mean.

A replica is one rank, or several that share its state. Its parameters and moments are optimizer state,
sharded, saved and restored like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from llm_pretrain.config import DistributedConfig
from llm_pretrain.optim.sharded import as_sharded, to_local

REPLICA = "replica"
"""Key of the replica's parameter in a parameter's optimizer state."""
OUTER_MOMENTUM = "outer_momentum"
"""Key of the outer optimizer's momentum, the same in all replicas."""
BUCKET_BYTES = 25 << 20
"""Bytes that are averaged in one collective."""


class OuterOptimizer:
    """The outer optimizer of a run, whose model holds the run's parameters, the same in every replica.

    Args:
        optimizer: The inner optimizer, of the run's parameters, which the ranks of a replica may share.
        config: H = `outer_steps`, the learning rate and the momentum.
        num_replicas: R.
        reduce_sum: Sums a tensor over the ranks that hold the same part of the R replicas.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        config: DistributedConfig,
        num_replicas: int,
        reduce_sum: Callable[[Tensor], Tensor],
    ):
        self.optimizer, self.config = optimizer, config
        self.num_replicas, self.reduce_sum = num_replicas, reduce_sum
        optimizer.register_step_post_hook(_create_state)

    @contextmanager
    def replica(self) -> Iterator[None]:
        """A block that computes with, and updates, this rank's replica instead of the run's parameters."""
        states = {parameter: self.optimizer.state.get(parameter) for parameter in self._parameters()}
        run_values = {
            parameter: to_local(parameter).detach().clone()
            for parameter, state in states.items()
            if not state
        }
        for parameter, state in states.items():
            if state:
                _exchange(parameter, state[REPLICA])
        try:
            yield
        finally:
            for parameter, state in states.items():
                if state:
                    _exchange(parameter, state[REPLICA])
                else:  # its first step, if any, has made the replica
                    to_local(parameter).detach().copy_(run_values[parameter])

    @torch.no_grad()
    def step(self, number: int) -> None:
        """After every H-th step, move the parameters by the mean of the replicas, which start there again.

        With d = parameter - mean of the replicas: m ← momentum · m + d; parameter ← parameter - rate · (d +
        momentum · m). Collective.

        Args:
            number: Steps of the run, the one before this call included.
        """
        if number % self.config.outer_steps:
            return
        rate, momentum = self.config.outer_learning_rate, self.config.outer_momentum
        for bucket in self._buckets():
            apart = [(parameter - replica).flatten() for parameter, replica, _ in bucket]
            mean = self.reduce_sum(torch.cat(apart)) / self.num_replicas
            parts = mean.split([each.numel() for each in apart])
            for (parameter, replica, outer_momentum), part in zip(bucket, parts, strict=True):
                difference = part.view_as(parameter)
                outer_momentum.mul_(momentum).add_(difference)
                parameter.sub_(difference.add(outer_momentum, alpha=momentum), alpha=rate)
                replica.copy_(parameter)

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _buckets(self) -> Iterator[list[tuple[Tensor, Tensor, Tensor]]]:
        """This rank's parts of the parameters that a step has updated, of their replicas and outer momentums,
        in lists of about `BUCKET_BYTES` of parameters."""
        bucket: list[tuple[Tensor, Tensor, Tensor]] = []
        filled = 0
        for parameter in self._parameters():
            state = self.optimizer.state.get(parameter)
            if not state:
                continue  # it has never had a gradient
            part = to_local(parameter).detach()
            if bucket and filled + part.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, filled = [], 0
            bucket.append((part, to_local(state[REPLICA]), to_local(state[OUTER_MOMENTUM])))
            filled += part.nbytes
        if bucket:
            yield bucket


@torch.no_grad()
def _exchange(parameter: Tensor, other: Tensor) -> None:
    """Exchange the values of two tensors, those of sharded ones in place: FSDP gathers from its memory."""
    if as_sharded(parameter) is None:
        parameter.data, other.data = other.data, parameter.data
        return
    left, right = to_local(parameter).detach(), to_local(other)
    kept = left.clone()
    left.copy_(right)
    right.copy_(kept)


def _create_state(optimizer: Optimizer, *_: object) -> None:
    for parameter, state in optimizer.state.items():
        if REPLICA not in state:
            state[REPLICA] = parameter.detach().clone()
            state[OUTER_MOMENTUM] = torch.zeros_like(parameter)
