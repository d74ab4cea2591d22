"""Fully sharded data parallelism (FSDP2): the parts that both launch paths share."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer

from llm_pretrain.model import Decoder, full_precision_modules

_LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}


def layer_precision(precision: str) -> MixedPrecisionPolicy:
    """Types in which a layer's matrices are gathered and their gradients reduced.

    Gathered in the type that autocast would cast them to, and reduced in fp32, as DDP accumulates and
    reduces. The layer's inputs keep their type: the residual stream is fp32.
    """
    if (dtype := _LOW_PRECISION.get(precision)) is None:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)


def shard_full_precision(model: nn.Module) -> set[nn.Parameter]:
    """Shard everything but the matrices of the layers, as one group in fp32.

    Embedding, norms, routers and head compute in fp32, or in autocast's types, as under DDP. They are
    gathered once per forward pass and kept until the backward pass, which begins with the head. FSDP's hooks
    are on the modules around the layers, not on norms and routers, where they would split each layer's
    compiled graph.

    Returns:
        The sharded parameters, which the layers' groups must ignore.
    """
    assert isinstance(model, Decoder)
    in_fp32 = {parameter for module in full_precision_modules(model) for parameter in module.parameters()}
    matrices = {parameter for parameter in model.parameters() if parameter not in in_fp32}
    stack: Any = model.model
    fully_shard([stack, model.lm_head], ignored_params=matrices, reshard_after_forward=False)

    def reshard(*_: Any) -> None:
        """Reshard after a forward pass without gradients, which no backward pass follows."""
        if not torch.is_grad_enabled():
            stack.reshard()

    model.register_forward_hook(reshard)
    return {parameter for parameter in model.parameters() if parameter not in matrices}


@contextmanager
def rebound_optimizer(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """A block in which to shard `model`; afterwards the optimizer's groups hold the sharded parameters.

    Sharding replaces the model's parameters by new ones of the same names. Inside the block neither the
    groups nor this function refer to the unsharded parameters, so that their memory is freed group by group.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = []
    names.clear()
    yield
    parameters = dict(model.named_parameters())
    for group, own in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [parameters[name] for name in own]


def clear_mesh_caches() -> None:
    """Drop the references from device meshes to destroyed process groups.

    DTensor caches every mesh. A cached mesh keeps Gloo's threads alive, which sometimes abort a finished run
    at interpreter exit ("terminate called without an active exception").
    """
    gc.collect()  # FSDP holds meshes in reference cycles
    for mesh in [each for each in gc.get_objects() if type(each).__name__ == "DeviceMesh"]:
        getattr(mesh, "_pg_registry", {}).clear()
