"""Tensor parallelism: the ranks of a group hold parts of the layers' matrices and of the vocabulary.

Outside of the products each rank has a part of the positions of every sequence (sequence parallelism,
arXiv:2205.05198). All positions are gathered before the first matrices of attention or feed-forward, of which
a rank has some heads or inner features. What the last matrix returns is summed over ranks and scattered
again. So outside of the products the ranks are data-parallel: their sums are parts of the step's sums, and
their gradients of norms and routers are parts of the step's gradients.

Shapes: B sequences, S positions of a rank, P ranks of a group, Z = P*S positions of the group, H hidden_size,
C tokens of a chunk.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Module, Parameter

from llm_pretrain.distributed.collectives import all_gather, reduce_scatter
from llm_pretrain.model.attention import Attention, LayerCache
from llm_pretrain.model.decoder import Decoder, OutputHead
from llm_pretrain.model.kernels import (
    DocumentLayout,
    LossSums,
    fused_linear_cross_entropy,
    linear,
    product_dtype,
    softmax_gradient_of_part,
)
from llm_pretrain.model.layers import Embedding, FeedForward, Linear

_BY_ROWS, _BY_COLUMNS = Shard(0), Shard(1)
_PLACEMENTS = {
    **dict.fromkeys(("embed_tokens", "lm_head"), _BY_ROWS),
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), _BY_ROWS),
    **dict.fromkeys(("o_proj", "down_proj"), _BY_COLUMNS),
}
"""Module name -> how its weight is divided: by its outputs (rows) or its inputs (columns)."""


def shard_matrices(model: Decoder, mesh: DeviceMesh) -> None:
    """Divide the matrices of a model on the meta device over the ranks of `mesh`; norms, routers and experts
    stay whole.

    Call it before FSDP shards the model. The model's input is then this rank's positions, but cos, sin and
    documents are those of all positions of the group.
    """
    group, ranks, rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()
    divided: dict[Parameter, Parameter] = {}  # a tied weight is one parameter
    module: Any
    for name, module in model.named_modules():
        if kind := _PARALLEL.get(type(module)):
            module.__class__ = kind
            module.group = group
        if placement := _PLACEMENTS.get(name.rpartition(".")[2]):
            whole = module.weight
            if whole is None:  # another stage has this part of the model
                continue
            if whole not in divided:
                part = whole.detach().chunk(ranks, placement.dim)[rank].contiguous()
                divided[whole] = Parameter(DTensor.from_local(part, mesh, [placement]))
            module.weight = divided[whole]


class ParallelLinear(Linear):
    """This rank's part of a product: some of its outputs, or one summand of all outputs."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features or a part] to [..., a part or out_features]."""
        return linear(input, _local(self.weight))


class ParallelAttention(Attention):
    """`Attention` of which each rank of `group` computes some heads, for the positions of all ranks."""

    group: dist.ProcessGroup

    def forward(
        self,
        x_BSH: Tensor,
        cos: Tensor,
        sin: Tensor,
        layout: DocumentLayout,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """[B, S, H] to [B, S, H], this rank's positions; the other arguments are for all positions."""
        x_BZH = _gather(x_BSH.to(product_dtype(x_BSH)), self.group)
        return _scatter_sum(super().forward(x_BZH, cos, sin, layout, cache), self.group)


class ParallelFeedForward(FeedForward):
    """`FeedForward` of which each rank of `group` computes some inner features, for all ranks' positions."""

    group: dist.ProcessGroup

    def forward(self, x_BSH: Tensor) -> Tensor:
        """[B, S, H] to [B, S, H], this rank's positions."""
        x_BZH = _gather(x_BSH.to(product_dtype(x_BSH)), self.group)
        return _scatter_sum(super().forward(x_BZH), self.group)


class ParallelEmbedding(Embedding):
    """`Embedding` of which each rank of `group` holds consecutive rows."""

    group: dist.ProcessGroup

    def forward(self, input: Tensor) -> Tensor:
        """int64 [B, S] to [B, S, H], this rank's positions."""
        weight = _local(self.weight)
        row_BZ = _all_positions(input, self.group) - dist.get_rank(self.group) * len(weight)
        is_own_BZ = (row_BZ >= 0) & (row_BZ < len(weight))
        x_BZH = F.embedding(torch.where(is_own_BZ, row_BZ, 0), weight)
        return _scatter_sum(torch.where(is_own_BZ[..., None], x_BZH, 0), self.group)


class ParallelHead(OutputHead):
    """`OutputHead` of which each rank of `group` holds consecutive rows, for the positions of all ranks."""

    group: dist.ProcessGroup

    def forward(
        self, hidden_BSH: Tensor, labels: Tensor | None = None, mask: Tensor | None = None
    ) -> LossSums:
        """The token losses of this rank's positions, and its share of the group's loss sums.

        No rank has whole logits. The gradient is that of the group's sums with respect to this rank's rows.
        So all ranks must differentiate the same objective. Arguments are those of `OutputHead.forward`.
        """
        assert labels is not None, "the logits of a divided vocabulary are on no rank"
        assert mask is not None
        group, weight = self.group, _local(self.weight)
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        sums = fused_linear_cross_entropy(
            _gather(hidden_BSH.to(product_dtype(hidden_BSH)), group),
            weight,
            _all_positions(labels, group),
            _all_positions(mask, group),
            self.kernels.z_loss_coef,
            functools.partial(
                softmax_gradient_of_part,
                first=rank * len(weight),
                combine=functools.partial(_over_vocabulary, group),
            ),
        )
        own = sums.token_losses.chunk(ranks, 1)[rank]
        return LossSums(_Share.apply(sums.loss, ranks), _Share.apply(sums.z_loss, ranks), own)  # pyright: ignore[reportArgumentType] (torch's stub of apply)


_PARALLEL: dict[type[Module], type[Module]] = {
    Linear: ParallelLinear,
    Attention: ParallelAttention,
    FeedForward: ParallelFeedForward,
    Embedding: ParallelEmbedding,
    OutputHead: ParallelHead,
}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _over_vocabulary(group: dist.ProcessGroup, lse: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """[C] each: logsumexp of the whole vocabulary's logits, and the logit of the label."""
    parts = all_gather(torch.stack([lse, target]), group).view(-1, 2, len(lse))
    return parts[:, 0].logsumexp(0), parts[:, 1].sum(0)


def _all_positions(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather [B, S, ...] of every rank, in rank order, to [B, Z, ...]."""
    return all_gather(x, group).unflatten(0, (-1, len(x))).transpose(0, 1).flatten(1, 2)


def _sum_of_own_positions(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum [B, Z, ...] over ranks, in x's type, and return this rank's positions [B, S, ...]."""
    parts = x.unflatten(1, (dist.get_world_size(group), -1)).transpose(0, 1)
    return reduce_scatter(parts.flatten(0, 1), group)


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _Gather.apply(x, group)  # pyright: ignore[reportReturnType] (torch's stub of apply)


def _scatter_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _ScatterSum.apply(x, group)  # pyright: ignore[reportReturnType] (torch's stub of apply)


class _Gather(torch.autograd.Function):
    """`_all_positions`. Each rank multiplies its own matrices by the result, so the gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_positions(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _sum_of_own_positions(grads[0], ctx.group), None


class _ScatterSum(torch.autograd.Function):
    """`_sum_of_own_positions`; every summand has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _sum_of_own_positions(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _all_positions(grads[0], ctx.group), None


class _Share(torch.autograd.Function):
    """An equal share of a sum that every rank has, with the gradient of the whole sum.

    All shares add up to the sum once, and each rank's parameters get the gradient of the whole sum.
    """

    @staticmethod
    def forward(ctx: Any, total: Tensor, ranks: int) -> Tensor:
        ctx.set_materialize_grads(False)  # zeros for a loss without a coefficient would cost the head twice
        return total / ranks

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads[0], None
