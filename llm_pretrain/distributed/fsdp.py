"""Shards a model over a mesh by FSDP2: positions, experts, matrices, and everything else."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from llm_pretrain.config.tree import Config
from llm_pretrain.distributed.mesh import Meshes, Place
from llm_pretrain.model.decoder import Decoder, full_precision_modules
from llm_pretrain.model.kernels import DTYPES
from llm_pretrain.model.moe import Experts
from llm_pretrain.optim.param_groups import replicate_dims, to_local

distributed: Any = torch.distributed  # untyped, as in collectives.py


def parallelize(model: Decoder, meshes: Meshes, place: Place, config: Config) -> None:
    """Divide sequences among ranks that share them, and shard every parameter of a model on the meta device.

    Parameters are sharded over all ranks, or over the ranks of a replica.

    The matrices of a layer are one group: they are all-gathered for the layer's forward pass, freed, and
    all-gathered again for its backward pass; then their gradients are reduce-scattered, and all-reduced over
    replicas. FSDP shards each part of a matrix that tensor parallelism divides over the ranks with this part.
    """
    # imported only for meshes that exist: most runs have none of these
    if meshes.sequence is not None:
        from llm_pretrain.distributed.context_parallel import divide_sequences

        divide_sequences(model, meshes, place)
    precision = layer_precision(config.training.precision)
    if meshes.experts is not None:
        from llm_pretrain.distributed.expert_parallel import shard_experts

        shard_experts(model, meshes.experts, config, precision)
    elif meshes.tp is not None:  # every `tp` rank has whole experts
        for experts in (module for module in model.modules() if isinstance(module, Experts)):
            fully_shard(experts, mesh=meshes.shards, mp_policy=precision)
    if meshes.tp is not None:
        from llm_pretrain.distributed.tensor_parallel import shard_matrices

        shard_matrices(model, meshes.tp)
    sharded = shard_full_precision(model, meshes.shards, meshes.matrices if meshes.tp is not None else None)
    for layer in model.model.layers:
        fully_shard(layer, mesh=meshes.matrices, mp_policy=precision, ignored_params=sharded)
    fully_shard(model, mesh=meshes.shards)
    sum_gradients(model)


def layer_precision(precision: str) -> MixedPrecisionPolicy:
    """Types in which a layer's matrices are gathered and their gradients reduced.

    Matrices are gathered in the type that autocast would cast them to. Gradients are reduced in fp32, as DDP
    accumulates and reduces them. The layer's inputs keep their type: the residual stream is fp32.
    """
    if precision == "fp32":
        return MixedPrecisionPolicy()
    dtype = DTYPES[precision]
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)


def sum_gradients(model: nn.Module) -> None:
    """Make FSDP add the ranks' gradients; torch's default is their mean.

    Each rank's gradient is a summand of the objective's gradient, whatever the parameters are sharded over.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # without the second call, NCCL would multiply by the factor 1 itself, which Gloo cannot
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def shard_full_precision(
    model: nn.Module, mesh: DeviceMesh | None, vocabulary_mesh: DeviceMesh | None = None
) -> set[nn.Parameter]:
    """Shard everything but the matrices of the layers, as one group in fp32.

    Embedding, norms, routers and head compute in fp32, or in autocast's types, as under DDP. They are
    gathered once per forward pass and kept until the backward pass, which begins with the head. FSDP's hooks
    are on the modules around the layers, not on norms and routers, where they would split each layer's
    compiled graph.

    Args:
        model: A decoder.
        mesh: The mesh of replicas and shards that the layers are sharded over. It must be the same object: an
            equal mesh would make a second group of norms, whose sum rounds differently. None for all ranks.
        vocabulary_mesh: Mesh of embedding and head if `tp` divides them already; they are then a group of
            their own. None for `mesh`.

    Returns:
        The sharded parameters, which the layers' groups must ignore.
    """
    assert isinstance(model, Decoder)
    in_fp32 = {parameter for module in full_precision_modules(model) for parameter in module.parameters()}
    matrices = {parameter for parameter in model.parameters() if parameter not in in_fp32}
    stack: Any = model.model
    groups: list[list[Any]] = [[stack, model.lm_head]]
    if vocabulary_mesh is not None:
        fully_shard([stack.embed_tokens, model.lm_head], mesh=vocabulary_mesh, reshard_after_forward=False)
        groups = [[stack], [stack.embed_tokens, model.lm_head]]
    fully_shard(groups[0], mesh=mesh, ignored_params=matrices, reshard_after_forward=False)

    def reshard(*_: Any) -> None:
        """Reshard after a forward pass without gradients, which no backward pass follows."""
        if not torch.is_grad_enabled():
            for group in groups:
                group[0].reshard()

    model.register_forward_hook(reshard)
    return {parameter for parameter in model.parameters() if parameter not in matrices}


def clip_over_meshes(parameters: list[Tensor], max_norm: float) -> Tensor:
    """torch's `clip_grad_norm_` for parameters that are sharded over different meshes, as experts may be.

    The norms of all meshes are combined in the order of the parameters, as Accelerate's
    `_clip_grad_norm_dtensor_aware` does.

    Returns:
        The norm before clipping, 0-dim.
    """
    trained: list[Any] = [each for each in parameters if each.grad is not None]
    norms: list[Any] = [
        get_total_norm([trained[number].grad for number in numbers]) for numbers in _by_mesh(trained).values()
    ]
    total = torch.linalg.vector_norm(torch.stack([norm.full_tensor() for norm in norms]))
    clip_to_norm(trained, max_norm, total)
    return total


foreach_norm: Any = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage] (clip_grad_norm_ calls it)


def gradient_norms(parameters: list[Any]) -> Tensor:
    """The norm of each parameter's gradient over all its shards, [parameters] (collective)."""
    found: list[Any] = [None] * len(parameters)
    for mesh, numbers in _by_mesh(parameters).items():
        norms: Any = foreach_norm([parameters[number].grad for number in numbers])
        stacked = torch.stack([getattr(norm, "_local_tensor", norm) for norm in norms])
        if mesh is not None:
            stacked = DTensor.from_local(stacked, mesh, norms[0].placements, run_check=False).full_tensor()
        for number, norm in zip(numbers, stacked.unbind(), strict=True):  # no copy of the numbers to a GPU
            found[number] = norm
    return torch.stack(found)


def clip_to_norm(parameters: list[Any], max_norm: float, total: Tensor) -> None:
    """torch's `clip_grads_with_norm_` for parameters that may be sharded, over whatever meshes."""
    for mesh, numbers in _by_mesh(parameters).items():
        norm = total if mesh is None else DTensor.from_local(total, mesh, run_check=False)
        clip_grads_with_norm_([parameters[number] for number in numbers], max_norm, norm)


def _by_mesh(parameters: list[Any]) -> dict[Any, list[int]]:
    """Mesh -> numbers of its parameters in the list; the key None has those that are not sharded."""
    numbers: dict[Any, list[int]] = {}
    for number, parameter in enumerate(parameters):
        numbers.setdefault(getattr(parameter, "device_mesh", None), []).append(number)
    return numbers


def replicated_digests(
    model: nn.Module, world_size: int, digest: Callable[[Tensor], Tensor]
) -> dict[str, int]:
    """A digest of each parameter and buffer that more than one rank holds (collective).

    If several replicas each shard a tensor, its digest is the sum of the digests of one replica's shards. A
    tensor that is held once is left out, except in a pipeline's stage, whose mesh is smaller than the world.

    Args:
        model: Unwrapped.
        world_size: Ranks.
        digest: Digest of a rank's part of a tensor; int64, 0-dim.
    """
    by_mesh: dict[DeviceMesh | None, dict[str, Any]] = {}
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, DTensor):
            if isinstance(tensor, Tensor):
                by_mesh.setdefault(None, {})[name] = tensor
        elif tensor.device_mesh.size() < world_size or replicate_dims(tensor):
            by_mesh.setdefault(tensor.device_mesh, {})[name] = tensor
    found: dict[str, int] = {}
    for mesh, tensors in by_mesh.items():
        sums = torch.stack([digest(to_local(each)) for each in tensors.values()])
        if mesh is not None:
            replicated = replicate_dims(next(iter(tensors.values())))
            for dim in range(mesh.ndim):
                if dim not in replicated:
                    distributed.all_reduce(sums, group=mesh.get_group(dim))
        found |= zip(tensors, sums.tolist(), strict=True)
    return found


@contextmanager
def rebound_optimizer(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Let the block replace the parameters of `model`, then put the new ones into the optimizer's groups.

    Sharding a model, or moving it off the meta device, makes new parameters with the same names.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = []
    yield
    parameters = dict(model.named_parameters())
    for group, own in zip(optimizer.param_groups, groups, strict=True):
        # in a pipeline, only the parameters of this rank's stages
        group["params"] = [parameters[name] for name in own if name in parameters]


def clear_mesh_caches() -> None:
    """Drop the references from device meshes to destroyed process groups.

    DTensor caches every mesh. A cached mesh keeps Gloo's threads alive, which sometimes abort a finished run
    at interpreter exit ("terminate called without an active exception"), and DTensor would use it in place of
    the next run's equal mesh in this process.
    """
    from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    gc.collect()  # FSDP holds meshes in reference cycles
    for mesh in [each for each in gc.get_objects() if type(each).__name__ == "DeviceMesh"]:
        getattr(mesh, "_pg_registry", {}).clear()
