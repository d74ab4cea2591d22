"""Fully sharded data parallelism: the parts that both launch paths must do alike.

Which parameters stay in fp32, who the optimizer's parameters are once they are sharded, their parts and
wholes, and the check that what was asked for is what runs. Sharding layer by layer is the engines' business.
"""

from __future__ import annotations

import gc
import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from llm_pretrain.config import Config
from llm_pretrain.errors import ConfigError
from llm_pretrain.model import Decoder, full_precision_modules

_LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}
_STRATEGIES = {"FSDP": "fsdp", "DEEPSPEED": "deepspeed"}
"""Accelerate's kinds of launch that are not data parallelism alone, and what the configuration calls them."""


def layer_precision(precision: str) -> MixedPrecisionPolicy:
    """How a layer's matrices are gathered and their gradients reduced.

    Gathered in the type that autocast would cast them to anyway, and reduced in fp32, in which DDP
    accumulates and reduces. The layer's inputs keep their type: the residual stream is fp32.
    """
    if (dtype := _LOW_PRECISION.get(precision)) is None:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)


def shard_full_precision(model: nn.Module) -> None:
    """Shard, as one group in fp32, everything but the matrices of the layers.

    Embedding, norms, routers and head compute in fp32, or cast what autocast casts, as under DDP. They are
    gathered once per forward pass and kept until the gradients are there, since the head's come first.
    """
    assert isinstance(model, Decoder)
    modules = full_precision_modules(model)
    fully_shard(modules, reshard_after_forward=False)

    def reshard(*_: Any) -> None:
        """Without a backward pass nothing else would, and the module would go on showing whole parameters."""
        if not torch.is_grad_enabled():
            first: Any = modules[0]
            first.reshard()

    model.register_forward_hook(reshard)


def release_parameters(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Names of the optimizer's parameters, group by group; the groups are left empty.

    Sharding replaces a model's parameters by new ones. As long as the optimizer holds the old ones, their
    memory is not free.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    released = []
    for group in optimizer.param_groups:
        released.append([names[parameter] for parameter in group["params"]])
        group["params"] = []
    return released


def adopt_parameters(model: nn.Module, optimizer: Optimizer, names: list[list[str]]) -> None:
    """Fill the optimizer's groups with the model's parameters of these names."""
    parameters = dict(model.named_parameters())
    for group, own in zip(optimizer.param_groups, names, strict=True):
        group["params"] = [parameters[name] for name in own]


def whole_norm(norm: Tensor | float) -> Tensor | float:
    """A norm of all ranks' gradients, left on the device; collective where it is still spread over them."""
    is_spread = hasattr(norm, "full_tensor")
    return norm.full_tensor() if is_spread else norm  # type: ignore[operator]  # a DTensor's


def own_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, in its memory: all of it where nothing is sharded."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def gathered(part: Tensor, like: DTensor) -> Tensor:
    """The whole of which every rank has the part that it has of `like`; collective."""
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    ).full_tensor()


def split_as(whole: Tensor, like: DTensor) -> Tensor:
    """The part of `whole`, which every rank has, that this rank has of `like`; no collective."""
    spread = DTensor.from_local(whole, like.device_mesh, [Replicate()], run_check=False)
    return spread.redistribute(placements=like.placements).to_local()


def as_sharded(tensor: Tensor) -> DTensor | None:
    """The tensor, known to be spread over the ranks; None where it is not."""
    return tensor if isinstance(tensor, DTensor) else None


def forget_process_groups() -> None:
    """Let process groups end that were destroyed, by name only, while a mesh still held them.

    Every mesh stays in caches of DTensor's, and with it gloo's threads, which now and then abort a finished
    run as the interpreter leaves ("terminate called without an active exception").
    """
    gc.collect()  # FSDP's own holders are cycles
    for mesh in [each for each in gc.get_objects() if type(each).__name__ == "DeviceMesh"]:
        getattr(mesh, "_pg_registry", {}).clear()


def check_strategy(config: Config, distributed_type: str, world_size: int) -> None:
    """Stop when Accelerate has set up another strategy than the configuration asks for.

    A request for FSDP that Accelerate cannot serve, on a CPU for example, becomes DDP without a word, with
    the whole model in every process.

    Args:
        config: What is asked for.
        distributed_type: Accelerate's word for what it has set up.
        world_size: Of one process nothing is sharded, whatever is asked for.

    Raises:
        ConfigError: naming both.
    """
    found = _STRATEGIES.get(distributed_type, "ddp")
    if world_size > 1 and found != config.distributed.strategy:
        raise ConfigError(
            f"distributed.strategy: {config.distributed.strategy}, but Accelerate has set up {found} "
            f"({distributed_type}); see configs/accelerate/ for files that launch each strategy"
        )


def check_fsdp_version() -> None:
    """Stop when the launch file asks for FSDP's first version, which Accelerate's files mean by default.

    Raises:
        ConfigError: naming both versions.
    """
    asked = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("1", "true")
    if asked and (version := os.environ.get("FSDP_VERSION", "1")) != "2":
        raise ConfigError(
            f"distributed.strategy: fsdp is FSDP version 2, but accelerate runs fsdp_version {version}; set "
            "fsdp_version: 2 under fsdp_config, as configs/accelerate/fsdp2.yaml does"
        )
