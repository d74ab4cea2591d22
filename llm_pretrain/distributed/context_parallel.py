"""Context parallelism: the ranks of a group compute different positions of the same sequences.

Each rank gathers the keys and values of all positions. So its queries attend within their documents as they
would on one rank.

Shapes: B sequences, S positions, s = S / P positions of each of P ranks, M key and value heads, D head_dim.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from llm_pretrain.distributed.collectives import all_gather, reduce_scatter
from llm_pretrain.distributed.mesh import Meshes, Place, cp_chunks
from llm_pretrain.model.attention import Attention
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.model.kernels import DocumentLayout, part_attention, uncompiled
from llm_pretrain.model.moe import Router


def divide_sequences(model: Decoder, meshes: Meshes, place: Place) -> None:
    """Make a model compute only this rank's positions of every micro batch (see `own_part`).

    Attention gathers over `meshes.cp`. Routers add their counts of a whole sequence over `meshes.sequence`,
    because `tp` ranks divide the positions further.
    """
    for module in model.modules():
        if isinstance(module, Attention) and meshes.cp is not None:
            module.attend = functools.partial(_attend, meshes.cp, place)
        elif isinstance(module, Router) and meshes.sequence is not None:
            module.total = functools.partial(_total, meshes.sequence)


def _total(group: Any, counts: Tensor) -> Tensor:
    """Counts added over the ranks of the group."""
    total = counts.clone()
    dist.all_reduce(total, group=group)
    return total


@uncompiled  # documents differ from batch to batch
def _attend(
    group: Any,
    place: Place,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: DocumentLayout,
    dropout: float,
) -> Tensor:
    """`document_attention` of this rank's positions."""
    assert dropout == 0, "dropout of divided sequences would depend on the mesh"
    if query.device.type != "cpu":
        key = key.to(value.dtype)  # as the kernels do
    key, value = (_Gather.apply(each, group, place.sizes.cp) for each in (key, value))
    chunks = cp_chunks(place.cp, place.sizes.cp, key.shape[1])
    return part_attention(query, key, value, layout, chunks)


class _Gather(torch.autograd.Function):
    """Gathers [B, s, M, D] of each rank to [B, S, M, D], in order of the positions.

    The backward pass adds the gradient over the ranks, in at least fp32.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any, ranks: int) -> Tensor:
        gathered = all_gather(own, group)
        ctx.group, ctx.ranks = group, ranks
        early, late = gathered.unflatten(0, (ranks, -1)).chunk(2, 2)  # a rank's two `cp_chunks`
        return torch.cat([*early, *late.flip(0)], 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        chunks = grads[0].to(wide).chunk(2 * ctx.ranks, 1)
        parts = torch.cat([torch.cat([chunks[rank], chunks[-1 - rank]], 1) for rank in range(ctx.ranks)])
        return reduce_scatter(parts, ctx.group).to(grads[0].dtype), None, None
