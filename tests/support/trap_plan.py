"""Silent errors that users of other frameworks described, put into the same training on meshes of four ranks.

`docs/traps.md` has the descriptions. `rank_cases.py` runs one step of each in float64, where no error hides
behind rounding, and the same without an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from support import faults
from support.faults import Fault, Patch
from support.mesh_plan import SEQUENCE, Changes, in_float64, meshed
from support.rank_cases import Case
from torch import Tensor

import llm_pretrain.model.moe as moe
from llm_pretrain.data.assembly import Batch
from llm_pretrain.distributed import collectives, context_parallel, expert_parallel, fsdp, tensor_parallel
from llm_pretrain.distributed.pipeline import Pipeline
from llm_pretrain.model.kernels.loss import IGNORE_INDEX
from llm_pretrain.model.moe import Router
from llm_pretrain.training.engine import own_part
from llm_pretrain.training.step import Objective, Step, StepSums, loss_sums

TP_CP_EP = {"tp_size": 2, "cp_size": 2, "ep_size": 2}
TP_CP = {"tp_size": 2, "cp_size": 2}
PP_CP = {"pp_size": 2, "cp_size": 2}
PP_TP = {"pp_size": 2, "tp_size": 2}


def _instead(owner: Any, name: str) -> Callable[[Callable[..., Any]], Fault]:
    """The fault of a function `wrong(original, *arguments)` in the place of one of a module or class."""

    def fault_of(wrong: Callable[..., Any]) -> Fault:
        right = getattr(owner, name)
        changed: Any = lambda *arguments: wrong(right, *arguments)  # noqa: E731
        return lambda patch, engine: patch.setattr(owner, name, changed)

    return fault_of


@_instead(tensor_parallel, "_over_vocabulary")
def _softmax_of_own_rows(right: Any, group: Any, lse: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The normaliser of the loss is that of a rank's rows of the vocabulary."""
    return lse, right(group, lse, target)[1]


@_instead(tensor_parallel, "_over_vocabulary")
def _vocabulary_of_each_rank(right: Any, group: Any, lse: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The normaliser has the whole vocabulary once for every rank."""
    whole, label = right(group, lse, target)
    return whole + math.log(dist.get_world_size(group)), label


def _tokens_of_each_rank(patch: Patch, engine: type) -> None:
    """A rank divides by the loss tokens among its own positions, times the ranks."""
    begin: Any = Step.begin.__func__  # type: ignore[attr-defined]  # a class method's

    def wrong(cls: type[Step], micro_batches: Sequence[Batch], engine: Any, *others: Any) -> Step:
        own = sum(int(batch.loss_mask.sum()) for batch in micro_batches)
        step = begin(cls, micro_batches, engine, *others)
        step.num_loss_tokens = own * engine.world_size
        return step

    patch.setattr(Step, "begin", classmethod(wrong))


def _recomputed_in_another_group(patch: Patch, engine: type) -> None:
    """The recomputation in the backward pass gathers the positions of other ranks."""
    gather, divide, groups = tensor_parallel._gather, context_parallel.divide_sequences, []

    def divided(model: Any, meshes: Any, place: Any) -> None:
        groups.append(meshes.cp)
        divide(model, meshes, place)

    def wrong(x: Tensor, group: Any) -> Tensor:
        in_backward = torch._C._current_graph_task_id() >= 0
        return gather(x, groups[-1] if in_backward else group)

    faults.replace_everywhere(patch, divide, divided)
    patch.setattr(tensor_parallel, "_gather", wrong)


@_instead(Router, "forward")
def _mask_of_another_part(right: Any, router: Any, x: Tensor, mask: Tensor, *others: Any) -> Any:
    """A router counts its positions by the loss mask of another rank's."""
    (group,) = router.total.args
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    parts = collectives.all_gather(mask, group).chunk(ranks)
    return right(router, x, parts[(rank + 1) % ranks], *others)


@_instead(context_parallel, "_total")
def _own_number_of_tokens(right: Any, group: Any, counts: Tensor) -> Tensor:
    """The balance loss divides the counts of whole sequences by the tokens of a rank's part."""
    total = right(group, counts)
    total[:, -1] = counts[:, -1]
    return total


@_instead(moe, "balance_sum")
def _counts_overwritten(
    right: Any, probs: Tensor, chosen: Tensor, mask: Tensor, total: Any
) -> tuple[Tensor, Tensor]:
    """A rank's counts are overwritten by their sum over ranks, which is then added again."""
    aux_loss, counts = right(probs, chosen, mask, total)
    return aux_loss, total(counts)


@_instead(Objective, "__init__")
def _loss_times_cp(right: Any, objective: Objective, config: Any, world_size: int) -> None:
    right(objective, config, world_size)
    objective.factor *= config.distributed.cp_size


@_instead(context_parallel, "reduce_scatter")
def _dropped_reduction(right: Any, parts: Tensor, group: Any) -> Tensor:
    """The gradient of gathered keys and values is a rank's own: the sum over ranks is not used."""
    return parts.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()


def _with_part(patch: Patch, change: Any) -> None:
    """A rank's part of a batch with the fields that `change(part, whole, place)` gives."""

    def wrong(batch: Batch, place: Any) -> Batch:
        part = own_part(batch, place)
        return replace(part, **change(part, batch, place))

    faults.replace_everywhere(patch, own_part, wrong)


def _first_positions(part: Batch, whole: Batch, place: Any) -> dict[str, Tensor]:
    return {"position_ids": whole.position_ids[:, : part.position_ids.shape[1]]}


def _positions_from_zero(patch: Patch, engine: type) -> None:
    """Queries and keys are rotated as if a rank had the first positions."""
    _with_part(patch, _first_positions)


def _documents_dropped(patch: Patch, engine: type) -> None:
    """Sequences are one document."""

    def change(part: Batch, whole: Batch, place: Any) -> dict[str, Any]:
        return {"document_ids": torch.ones_like(whole.document_ids), "document_offsets": None}

    _with_part(patch, change)


def _labels_after_the_cut(patch: Patch, engine: type) -> None:
    """Labels are the next of a rank's own tokens, also at the end of a chunk."""

    def change(part: Batch, whole: Batch, place: Any) -> dict[str, Tensor]:
        following = part.input_ids.roll(-1, 1)
        return {"labels": torch.where(part.labels == IGNORE_INDEX, part.labels, following)}

    _with_part(patch, change)


@_instead(StepSums, "reduce")
def _loss_of_own_chunks(right: Any, sums: StepSums, engine: Any) -> Tensor:
    """What is logged is summed over `tp`, not over `cp`."""
    assert sums.vector is not None
    dist.all_reduce(sums.vector, group=engine.meshes.tp.get_group())
    return sums.vector


@_instead(expert_parallel, "_exchange")
def _weights_of_own_experts(
    right: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Any
) -> Tensor:
    """Routing weights get a gradient from the experts of their own rank only."""
    if rows.shape[1] == 1:
        rank, is_own = dist.get_rank(group), torch.zeros_like(rows, dtype=torch.bool)
        begin = sum(sent[:rank])
        is_own[begin : begin + sent[rank]] = True
        rows = torch.where(is_own, rows, rows.detach())
    return right(rows, sent, received, group)


def _tied_counted_twice(patch: Patch, engine: type) -> None:
    """The norm has the tied matrix of the first stage and of the last."""
    clip, is_tied_copy = Pipeline.clip_grad_norm, Pipeline.is_tied_copy

    def wrong(self: Pipeline, parameters: list[Tensor], max_norm: float) -> Tensor:
        Pipeline.is_tied_copy = lambda self, name: False  # type: ignore[method-assign]
        try:
            return clip(self, parameters, max_norm)
        finally:
            Pipeline.is_tied_copy = is_tied_copy  # type: ignore[method-assign]

    patch.setattr(Pipeline, "clip_grad_norm", wrong)


def _halved_divisor(model: Any, sum_gradients: Any = fsdp.sum_gradients) -> None:
    sum_gradients(model)
    for module in model.modules():
        if isinstance(module, expert_parallel.ParallelExperts):
            module.set_gradient_divide_factor(0.5)  # type: ignore[operator]  # FSDP's


def _norms_of_each_part(patch: Patch, engine: type) -> None:
    """What is whole on the `tp` ranks has the gradient of a rank's positions only."""
    shard = fsdp.shard_full_precision
    faults.replace_everywhere(
        patch, shard, lambda model, mesh, vocabulary_mesh: shard(model, vocabulary_mesh, vocabulary_mesh)
    )


def _times_ranks(output: Any) -> Any:
    loss, z_loss, aux_loss, router_z_loss = loss_sums(output)
    return loss, z_loss, aux_loss * 4, router_z_loss


def _norm_of(gradients: Callable[[list[Any]], list[Any]]) -> Fault:
    """The fault of a norm of other gradients than all of them."""

    def clip(parameters: list[Any], max_norm: float) -> Any:
        norm: Any = torch.nn.utils.get_total_norm(gradients(parameters))
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    return faults.replacing(fsdp.clip_over_meshes, clip)


MEAN_OF_RANKS = faults.replacing(fsdp.sum_gradients, lambda model: None)
"""FSDP divides by the ranks that it shards over, of which some have the same micro batch."""
EXPERTS_TIMES_RANKS = faults.replacing(fsdp.sum_gradients, _halved_divisor)
BALANCE_OF_EACH_RANK = faults.replacing(loss_sums, _times_ranks)
"""The balance loss times the ranks of a group."""
OWN_PARTS = _norm_of(lambda parameters: [each.grad.to_local() for each in parameters])
NO_EXPERTS = _norm_of(lambda parameters: [each.grad for each in parameters if each.dim() < 3])


class Trap(NamedTuple):
    """An error, the mesh that has it, and the figure of `test_mesh_traps.figures` that shows it.

    `least`: what the figure is at least; of a run without errors it is below 1e-12. `kind`: of the run.
    """

    fault: Fault
    mesh: dict[str, int]
    figure: str
    least: float
    kind: str = "ddp"


TRAPS: dict[str, Trap] = {
    "softmax of own rows": Trap(_softmax_of_own_rows, TP_CP_EP, "losses", 0.05),
    "vocabulary of each rank": Trap(_vocabulary_of_each_rank, TP_CP_EP, "losses", 0.05),
    "tokens of each rank": Trap(_tokens_of_each_rank, TP_CP_EP, "gradients", 1e-3),
    "recomputed in another group": Trap(_recomputed_in_another_group, TP_CP, "gradients", 0.1, "ddp dense"),
    "mask of another part": Trap(_mask_of_another_part, TP_CP_EP, "gradients", 1e-3),
    "own number of tokens": Trap(_own_number_of_tokens, TP_CP_EP, "gradients", 0.1),
    "counts overwritten": Trap(_counts_overwritten, TP_CP_EP, "sums", 0.1),
    "loss times cp": Trap(_loss_times_cp, TP_CP_EP, "gradients", 0.1),
    "mean of ranks": Trap(MEAN_OF_RANKS, TP_CP_EP, "gradients", 0.1),
    "dropped reduction": Trap(_dropped_reduction, TP_CP_EP, "gradients", 0.1),
    "positions from zero": Trap(_positions_from_zero, TP_CP_EP, "gradients", 0.1),
    "documents dropped": Trap(_documents_dropped, TP_CP_EP, "gradients", 1e-3),
    "labels after the cut": Trap(_labels_after_the_cut, TP_CP_EP, "losses", 1e-4),
    "loss of own chunks": Trap(_loss_of_own_chunks, TP_CP_EP, "losses", 0.1),
    "weights of own experts": Trap(_weights_of_own_experts, TP_CP_EP, "gradients", 0.1),
    "tied counted twice": Trap(_tied_counted_twice, PP_CP, "norms", 1e-3),
    "norms of each part": Trap(_norms_of_each_part, {"tp_size": 2}, "gradients", 0.1),
    "router losses times ranks": Trap(BALANCE_OF_EACH_RANK, {"tp_size": 4}, "gradients", 0.1),
    "experts times ranks": Trap(EXPERTS_TIMES_RANKS, {"ep_size": 2}, "gradients", 0.4),
    "norm without the experts": Trap(NO_EXPERTS, {"ep_size": 2}, "norms", 1e-3),
    "norm of own parts": Trap(OWN_PARTS, {"tp_size": 2}, "norms", 1e-3),
}
KINDS: Changes = {"ddp": {}, "ddp dense": {"num_experts": 0}}
"""Runs without a mesh, and what they change in the model."""
RIGHT = {
    "tp cp ep": (TP_CP_EP, "ddp"),
    "pp cp": (PP_CP, "ddp"),
    "pp tp": (PP_TP, "ddp"),
    "tp cp dense": (TP_CP, "ddp dense"),
}


def _case(mesh: dict[str, int] | None, kind: str, *fault: Fault) -> Case:
    """One step of eight sequences of packed documents with ragged loss masks."""
    training = SEQUENCE["training"] | {
        "global_batch_size": 8,
        "activation_checkpointing": kind == "ddp dense",
    }
    changes = {
        "training": training,
        "model": SEQUENCE["model"] | KINDS[kind],
        "data": {"packing": "best_fit"},
    }
    return Case("torchrun", (*fault, in_float64), meshed(changes, mesh))


CASES = {kind: _case(None, kind) for kind in KINDS}
CASES |= {name: _case(*case) for name, case in RIGHT.items()}
CASES |= {name: _case(trap.mesh, trap.kind, trap.fault) for name, trap in TRAPS.items()}
