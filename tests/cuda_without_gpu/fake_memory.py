"""Bytes on the fake device at start-up and while a training step runs, to compare with the estimate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from fake_steps import CUDA, fake_batch, fake_model
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.nn.utils import clip_grad_norm_
from torch.testing._internal.distributed.fake_pg import FakeStore

from llm_pretrain.config.tree import Config
from llm_pretrain.distributed.fsdp import parallelize, rebound_optimizer
from llm_pretrain.distributed.initial_values import materialize
from llm_pretrain.distributed.mesh import Meshes, Place, expert_mesh
from llm_pretrain.forecast.simulation.patches import tracked
from llm_pretrain.forecast.simulation.tracker import Tracker
from llm_pretrain.optim.build import build_optimizer
from llm_pretrain.training.model_setup import build_model
from llm_pretrain.training.step import Objective


@contextmanager
def eight_ranks() -> Iterator[None]:
    """A process group of eight ranks, of which this is the first; nothing is sent."""
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    mesh = init_device_mesh("cuda", (8,))
    try:
        with patch.object(_fully_shard, "_init_default_mesh", lambda *_, **__: mesh):
            yield
    finally:
        dist.destroy_process_group()


def tracked_peak(config: Config, world_size: int = 1) -> int:
    """Peak bytes of the second optimizer step; with `world_size` > 1 of a sharded model, in `eight_ranks`."""
    memory, experts = Tracker("cuda"), expert_mesh(config, "cpu", world_size)
    with FakeTensorMode(allow_non_fake_inputs=True), tracked(memory):
        model: Any = fake_model(config)
        optimizer = build_optimizer(model, config.optimizer, config.training.precision)
        if world_size > 1:
            with rebound_optimizer(model, optimizer):
                parallelize(model, Meshes(experts=experts), Place(), config)
        parameters, objective = list(model.parameters()), Objective(config, world_size)
        steps = config.gradient_accumulation_steps(world_size)
        for _ in range(2):
            memory.begin_step()
            for index in range(steps):
                if world_size > 1:
                    model.set_requires_gradient_sync(config.distributed.sync_each_batch or index == steps - 1)
                    model.set_requires_all_reduce(index == steps - 1)
                batch = fake_batch(config)
                with torch.autocast("cuda", torch.bfloat16):
                    output = model(**batch.model_inputs())
                objective(output, batch.num_loss_tokens).backward()
                del output, batch
            clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return memory.peak()[0]


def saved_bytes(config: Config, backend: str | None = None) -> int:
    """Bytes that a forward pass keeps for the backward pass without parameters; `backend` compiles layers."""
    torch._dynamo.reset()
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.device.type == "cuda":
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with FakeTensorMode(allow_non_fake_inputs=True):
        model = fake_model(config)
        for layer in model.model.layers if backend else ():
            layer.compile(backend=backend)
        own = {each.untyped_storage()._cdata for each in model.parameters()}
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with hooks, torch.autocast("cuda", torch.bfloat16):
            model(**fake_batch(config).model_inputs())
        return sum(each.untyped_storage().nbytes() for key, each in kept.items() if key not in own)


def start_up_peak(config: Config) -> tuple[int, int]:
    """Most bytes while a sharded model gets its memory, and the bytes that remain; in `eight_ranks`."""
    memory = Tracker("cuda")
    with FakeTensorMode(allow_non_fake_inputs=True), tracked(memory):
        with torch.device("meta"):
            model = build_model(config)
        parallelize(model, Meshes(), Place(), config)
        materialize(model, CUDA)
    return memory.peak()[0], memory.totals()[-1]
