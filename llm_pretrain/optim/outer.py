"""DiLoCo (arXiv:2311.08105): replicas that train on their own, and an outer optimizer over their mean.

A replica's parameters and moments are optimizer state, saved and restored like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from llm_pretrain.config import DistributedConfig

REPLICA = "replica"
"""Key of the replica's parameter in a parameter's optimizer state."""
OUTER_MOMENTUM = "outer_momentum"
"""Key of the outer optimizer's momentum, the same in all replicas."""
BUCKET_BYTES = 25 << 20
"""Bytes that are averaged in one collective."""


class OuterOptimizer:
    """The outer optimizer of a run, whose model holds the run's parameters, the same on every rank.

    Args:
        optimizer: The inner optimizer, of the run's parameters.
        config: H = `outer_steps`, the learning rate and the momentum.
        num_replicas: R, ranks.
        reduce_sum: Sums a tensor over the ranks.
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
        run_values = {}
        for parameter in self._parameters():
            own = self.optimizer.state.get(parameter, {}).get(REPLICA)
            run_values[parameter] = parameter.data if own is not None else parameter.data.clone()
            if own is not None:
                parameter.data = own
        try:
            yield
        finally:
            for parameter, tensor in run_values.items():
                if state := self.optimizer.state.get(parameter):
                    state[REPLICA] = parameter.data
                parameter.data = tensor

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
            states = [self.optimizer.state[parameter] for parameter in bucket]
            apart = [p - state[REPLICA] for p, state in zip(bucket, states, strict=True)]
            mean = self.reduce_sum(torch.cat([each.flatten() for each in apart])) / self.num_replicas
            parts = mean.split([each.numel() for each in apart])
            for parameter, state, part in zip(bucket, states, parts, strict=True):
                difference = part.view_as(parameter)
                state[OUTER_MOMENTUM].mul_(momentum).add_(difference)
                parameter.sub_(difference.add(state[OUTER_MOMENTUM], alpha=momentum), alpha=rate)
                state[REPLICA].copy_(parameter)

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _buckets(self) -> Iterator[list[Tensor]]:
        """The parameters that a step has updated, in lists of about `BUCKET_BYTES`."""
        bucket: list[Tensor] = []
        for parameter in self._parameters():
            if not self.optimizer.state.get(parameter):
                continue  # it has never had a gradient
            if bucket and sum(each.nbytes for each in bucket) + parameter.nbytes > BUCKET_BYTES:
                yield bucket
                bucket = []
            bucket.append(parameter)
        if bucket:
            yield bucket


def _create_state(optimizer: Optimizer, *_: object) -> None:
    for parameter, state in optimizer.state.items():
        if REPLICA not in state:
            state[REPLICA] = parameter.detach().clone()
            state[OUTER_MOMENTUM] = torch.zeros_like(parameter)
