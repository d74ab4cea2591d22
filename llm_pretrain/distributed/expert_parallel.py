"""Expert parallelism: the ranks of a group hold different experts, and tokens travel to their experts.

Otherwise these ranks are data-parallel. However unevenly the router spreads the tokens, every assignment is
computed: experts have no capacity limit, and no token is dropped.

Shapes: T tokens of this rank, H hidden_size, E experts, K experts per token, P ranks of a group, n = E / P
experts of a rank, R = T*K assignments of this rank's tokens, M rows that this rank computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter

from llm_pretrain.config.tree import Config
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.model.kernels import combine, dispatch, inverse_order, product_dtype, uncompiled
from llm_pretrain.model.moe import Experts
from llm_pretrain.optim.param_groups import to_local


def shard_experts(model: Decoder, mesh: DeviceMesh, config: Config, precision: MixedPrecisionPolicy) -> None:
    """Shard the experts of a model on the meta device over groups of `ep_size` neighbouring ranks.

    Rank p of a group holds the n experts from p*n on. FSDP shards these over the ranks of a replica with
    equal p: by whole experts if the number of these ranks divides n, else by rows. Each layer's experts are
    an FSDP group of their own. Call this before the rest is sharded. `mesh` is an `expert_mesh`,
    `precision` that of the layers.
    """
    ep, shards = mesh["ep"], mesh["ep_shard"].size()
    names = mesh.mesh_dim_names or ()
    holders = mesh["ep_replicate", "ep_shard"] if "ep_replicate" in names else mesh["ep_shard"]
    by_rows = (config.model.num_experts // ep.size()) % shards != 0
    for module in model.modules():
        if isinstance(module, Experts):
            module.__class__ = ParallelExperts
            module.__dict__.pop("forward", None)  # of a compiled layer
            object.__setattr__(module, "group", ep.get_group())
            for name, parameter in module.named_parameters():
                part = parameter.detach().chunk(ep.size())[ep.get_local_rank()]
                setattr(module, name, Parameter(DTensor.from_local(part, ep, [Shard(0)])))
            fully_shard(
                module,
                mesh=holders,
                mp_policy=precision,
                shard_placement_fn=lambda _: Shard(int(by_rows)),
            )


class ParallelExperts(Experts):
    """`Experts` of which each rank of `group` holds n consecutive ones."""

    group: dist.ProcessGroup

    def forward(self, x_TH: Tensor, weights_TK: Tensor, chosen_TK: Tensor) -> Tensor:
        """`Experts.forward` over the ranks of the group (collective: all of them call it)."""
        return _compute_where_held(self, x_TH, weights_TK, chosen_TK)

    def compute(self, x_MH: Tensor, weight_M1: Tensor, expert_M: Tensor) -> Tensor:
        """[M, H]: for each row, the output of this rank's expert of this number, times the routing weight."""
        rows = len(x_MH)
        if not rows:  # torch's product on CUDA may refuse none (pytorch/pytorch#192497)
            x_MH, weight_M1 = F.pad(x_MH, (0, 0, 0, 1)), F.pad(weight_M1, (0, 0, 0, 1))
            expert_M = F.pad(expert_M, (0, 1))
        return super().forward(x_MH, weight_M1, expert_M[:, None])[:rows]

    def parameters_to_multiply(self) -> tuple[Tensor, Tensor]:
        """This rank's part of both parameters."""
        gate_up, down = super().parameters_to_multiply()
        return to_local(gate_up), to_local(down)


@uncompiled  # the numbers of rows differ from batch to batch
def _compute_where_held(experts: ParallelExperts, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """[T, H]: each assignment's row goes to its expert's rank, comes back, and is added to its token."""
    group, ranks = experts.group, dist.get_world_size(experts.group)
    sorted_expert, order = chosen.flatten().sort(stable=True)
    sent_E = sorted_expert.new_zeros(experts.num_experts)
    sent_E.scatter_add_(0, sorted_expert, torch.ones_like(sorted_expert))  # bincount would add two waits
    received_Pn = torch.empty_like(sent_E)
    dist.all_to_all_single(received_Pn, sent_E, group=group)
    sent, received = _rows_by_rank(sent_E, received_Pn, ranks)
    local_Pn = torch.arange(experts.num_experts // ranks, device=x.device).repeat(ranks)
    expert_M = torch.repeat_interleave(local_Pn, received_Pn, output_size=sum(received))

    token_R, inverse_TK = order // chosen.shape[1], inverse_order(order, chosen)
    x_RH = dispatch(x.to(product_dtype(x)), token_R, inverse_TK)
    weight_R1 = dispatch(weights.reshape(-1, 1), order, inverse_TK.view(-1, 1))
    # the weights travel too: multiplied here, they would be rounded in other places than without a group
    x_MH, weight_M1 = (_exchange(rows, sent, received, group) for rows in (x_RH, weight_R1))
    y_RH = _exchange(experts.compute(x_MH, weight_M1, expert_M), received, sent, group)
    return combine(y_RH, token_R, inverse_TK).to(x.dtype)


def _rows_by_rank(sent_E: Tensor, received_Pn: Tensor, ranks: int) -> tuple[list[int], list[int]]:
    """Numbers of rows that this rank sends to, and receives from, each rank of the group.

    This is a layer's only wait for the device: the host must know the sizes of the exchange.
    """
    sent, received = torch.stack([sent_E, received_Pn]).view(2, ranks, -1).sum(2).tolist()
    return sent, received


def _exchange(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
    """Send `rows` to the ranks of the group, and return the rows from every rank, in rank order."""
    return _Exchange.apply(rows, sent, received, group)  # pyright: ignore[reportReturnType] (torch's stub of apply)


class _Exchange(torch.autograd.Function):
    """An exchange of rows, whose gradient is the exchange back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
        ctx.back = (received, sent, group)
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), list(received), list(sent), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _Exchange.apply(grads[0], *ctx.back), None, None, None  # pyright: ignore[reportReturnType] (torch's stub of apply)
