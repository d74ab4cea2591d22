"""Shards a model over a mesh: positions, experts, matrices, and everything else."""

from __future__ import annotations

from torch.distributed.fsdp import fully_shard

from llm_pretrain.config.tree import Config
from llm_pretrain.distributed.fsdp import layer_precision, shard_full_precision, sum_gradients
from llm_pretrain.distributed.mesh import Meshes, Place
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.model.moe import Experts


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

        shard_experts(model, meshes.experts, config)
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
