"""The meshes of replicas, shards and experts that `rank_cases.py` runs in four processes.

Each on both paths, beside the same training under DDP; and one mistake each.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from support import faults
from support.faults import Patch
from support.rank_cases import Case
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from llm_pretrain.distributed import expert_parallel, fsdp, tensor_parallel
from llm_pretrain.model.moe import Router
from llm_pretrain.training.agreement import check_parameters
from llm_pretrain.training.model_setup import build_model, initialize_weights
from llm_pretrain.training.step import loss_sums

Changes = dict[str, dict[str, Any]]

MESHES: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "hsdp": {"dp_replicate_size": 2},
    "ep": {"ep_size": 4},
    "ep fsdp": {"ep_size": 2},
    "ep hsdp": {"dp_replicate_size": 2, "ep_size": 2},
}
DIVIDED: dict[str, dict[str, Any]] = {
    "cp": {"cp_size": 4},
    "cp fsdp": {"cp_size": 2},
    "cp hsdp": {"dp_replicate_size": 2, "cp_size": 2},
    "cp ep": {"cp_size": 2, "ep_size": 2},
    "tp": {"tp_size": 4},
    "tp fsdp": {"tp_size": 2},
    "tp hsdp": {"dp_replicate_size": 2, "tp_size": 2},
    "tp ep": {"tp_size": 2, "ep_size": 4},
    "tp cp ep": {"tp_size": 2, "cp_size": 2, "ep_size": 2},
}
"""Meshes whose ranks divide micro batches."""
ONE_STEP: Changes = {
    "training": {"max_steps": 1, "max_grad_norm": 0.0},
    "data": {"packing": "best_fit"},  # several documents, or ends of them, in a sequence
}
FLOAT64 = {
    f"float64 {scope}": ONE_STEP | {"model": {"router_aux_loss_scope": scope}}
    for scope in ("sequence", "micro_batch", "global_batch")
}
"""In each the balance loss is another sum."""
MATRICES = {
    "float64 dense": ONE_STEP | {"model": {"num_experts": 0}},
    "float64 untied": ONE_STEP
    | {
        "model": {
            **{"tie_word_embeddings": False, "first_k_dense_replace": 1, "n_shared_experts": 2},
            **{"intermediate_size": 68, "moe_intermediate_size": 34},  # 17 rows of a part, over two ranks
        }
    },
}
"""In each other matrices are divided."""
KINDS: dict[str, Changes] = FLOAT64 | {
    "fp32": {},
    "bf16": {"training": {"precision": "bf16"}},
    "long": {"training": {"max_steps": 20}},
    "counts of micro batches": {"model": {"router_aux_loss_scope": "micro_batch"}},
    "global counts": {"model": {"router_aux_loss_scope": "global_batch", "router_bias_update_rate": 0.125}},
    "two experts": {"model": {"num_experts": 2, "num_experts_per_tok": 1}},
    "muon": {"optimizer": {"name": "muon"}},
    "checkpointed": {"training": {"activation_checkpointing": True}, "model": {"hidden_dropout": 0.1}},
    "waiting": {"distributed": {"sync_each_batch": False}},
    "compiled": {"training": {"compile": "on"}},
}


def in_float64(patch: Patch, engine: type) -> None:
    """Parameters of the values that fp32 has, in float64."""

    def build(*arguments: Any) -> Any:
        return build_model(*arguments).double()

    faults.replace_everywhere(patch, build_model, build)


def _divided_twice(patch: Patch, engine: type) -> None:
    _experts_divided(patch, 2.0)


def _times_ranks(patch: Patch, engine: type) -> None:
    _experts_divided(patch, 0.5)


def _experts_divided(patch: Patch, factor: float) -> None:
    """FSDP divides the experts' gradients after their reduction."""
    right = fsdp.sum_gradients

    def wrong(model: Any) -> None:
        right(model)
        for module in model.modules():
            if isinstance(module, expert_parallel.ParallelExperts):
                module.set_gradient_divide_factor(factor)  # type: ignore[operator]  # FSDP's

    faults.replace_everywhere(patch, right, wrong)


def _norm_of_the_rest(patch: Patch, engine: type) -> None:
    def clip(parameters: list[Any], max_norm: float) -> Any:
        dense = [each for each in parameters if each.dim() < 3]
        norm: Any = torch.nn.utils.get_total_norm([each.grad for each in dense])
        scale = (max_norm / (norm.full_tensor() + 1e-6)).clamp(max=1.0)
        for each in parameters:
            each.grad.to_local().mul_(scale)
        return norm.full_tensor()

    faults.replace_everywhere(patch, fsdp.clip_over_meshes, clip)


def _other_replicas(patch: Patch, engine: type) -> None:
    """The second replica begins with the values of another seed."""

    def initialize(model: Any, seed: int, *arguments: Any, **options: Any) -> None:
        initialize_weights(model, seed + dist.get_rank() // 2, *arguments, **options)

    import support.stepping as stepping

    patch.setattr(stepping, "initialize_weights", initialize)


def _compared(patch: Patch, engine: type) -> None:
    """As a run does, parameters are compared once they have values."""
    import support.stepping as stepping

    initialize = stepping.initialize_weights

    def compared(model: Any, *arguments: Any, **options: Any) -> None:
        initialize(model, *arguments, **options)
        ranks: Any = SimpleNamespace(world_size=dist.get_world_size(), pipeline=None)
        check_parameters(ranks, model, "after initialisation")

    patch.setattr(stepping, "initialize_weights", compared)


def _balance_of_each_rank(patch: Patch, engine: type) -> None:
    """The balance loss times the ranks of a group."""
    import llm_pretrain.training.step as step

    def sums(output: Any) -> Any:
        loss, z_loss, aux_loss, router_z_loss = loss_sums(output)
        return loss, z_loss, aux_loss * 4, router_z_loss

    patch.setattr(step, "loss_sums", sums)


def _norms_of_each_part(patch: Patch, engine: type) -> None:
    """What is whole on the `tp` ranks has the gradient of a rank's positions only."""
    shard = fsdp.shard_full_precision

    def wrong(model: Any, mesh: Any, vocabulary_mesh: Any) -> Any:
        return shard(model, vocabulary_mesh, vocabulary_mesh)

    faults.replace_everywhere(patch, shard, wrong)


def _norm_of_own_parts(patch: Patch, engine: type) -> None:
    """A rank clips by the norm of what it holds."""

    def clip(parameters: list[Any], max_norm: float) -> Any:
        own = [each.grad.to_local() for each in parameters]
        norm = torch.nn.utils.get_total_norm(own)
        torch.nn.utils.clip_grads_with_norm_(own, max_norm, norm)
        return norm

    faults.replace_everywhere(patch, fsdp.clip_over_meshes, clip)


def _loss_times_ranks(patch: Patch, engine: type) -> None:
    """Every `tp` rank counts the losses of all of them."""
    patch.setattr(tensor_parallel._Share, "forward", staticmethod(lambda _, total, ranks: total.clone()))


def _gradient_of_a_share(patch: Patch, engine: type) -> None:
    """The gradient of a rank's share of the loss, as if the other shares had none of its rows."""

    def forward(ctx: Any, total: torch.Tensor, ranks: int) -> torch.Tensor:
        ctx.ranks = ranks
        return total / ranks

    patch.setattr(tensor_parallel._Share, "forward", staticmethod(forward))
    patch.setattr(
        tensor_parallel._Share, "backward", staticmethod(lambda ctx, grad: (grad / ctx.ranks, None))
    )


def _with_capacity(patch: Patch, engine: type) -> None:
    """An expert computes no more rows than its share; the others are dropped."""
    compute = expert_parallel.ParallelExperts.compute

    def capped(self: Any, x: torch.Tensor, weight: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        kept = torch.zeros(len(x), 1)
        for number in expert.unique():
            kept[(expert == number).nonzero().flatten()[: len(x) // 4]] = 1.0
        return compute(self, x, weight, expert) * kept

    patch.setattr(expert_parallel.ParallelExperts, "compute", capped)


def _padded_experts(patch: Patch, engine: type) -> None:
    """The router has four more experts, which nobody holds: their probabilities count."""
    routed = Router._sums

    def padded(self: Router, logits: torch.Tensor, *others: Any) -> Any:
        log_scores, probs, *rest = others
        probs = torch.cat([log_scores, log_scores.new_zeros(*log_scores.shape[:-1], 4)], -1).softmax(-1)
        return routed(self, logits, log_scores, probs[..., : logits.shape[-1]], *rest)

    patch.setattr(Router, "_sums", padded)


def _padded_shards(patch: Patch, engine: type) -> None:
    """FSDP shards two experts over four ranks, of which two hold nothing but padding."""

    def whole_experts(*arguments: Any, **options: Any) -> Any:
        return fully_shard(*arguments, **options | {"shard_placement_fn": lambda _: Shard(0)})

    patch.setattr(expert_parallel, "fully_shard", whole_experts)


def _dropped_beside_nothing(patch: Patch, engine: type) -> None:
    """Rows of a rank that gets none back are dropped."""
    exchange = expert_parallel._exchange

    def dropping(rows: Any, sent: list[int], received: list[int], group: Any) -> Any:
        out = exchange(rows, sent, received, group)
        return out * 0 if 0 in received else out

    patch.setattr(expert_parallel, "_exchange", dropping)


ONE_EXPERT: Changes = {"model": {"num_experts": 4, "num_experts_per_tok": 1, "router_aux_loss_coef": 0.0}}


def meshed(changes: Changes, mesh: dict[str, Any] | None) -> Changes:
    """`changes` in three steps of three micro batches on each of four ranks; `mesh` None is DDP."""
    training = {"global_batch_size": 24, "max_steps": 3} | changes.get("training", {})
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    model = {"num_experts": 8, **heads} | changes.get("model", {})
    distributed = changes.get("distributed", {}) | {"strategy": "fsdp"} | mesh if mesh is not None else {}
    return changes | {"training": training, "model": model, "distributed": distributed}


SEQUENCE = FLOAT64["float64 sequence"]
TP = DIVIDED["tp fsdp"]
RECOMPUTED: Changes = {"training": {"activation_checkpointing": True}}
CASES: dict[str, Case] = {}
for kind, changes in KINDS.items():
    special = (in_float64,) if kind in FLOAT64 else ()
    CASES[f"ddp {kind}"] = Case("torchrun", special, meshed(changes, None))
    for mesh, sizes in MESHES.items():
        if kind == "two experts" and sizes.get("ep_size") == 4:
            continue
        for path in ("torchrun", "accelerate"):
            CASES[f"{path} {mesh} {kind}"] = Case(path, special, meshed(changes, sizes))
DIVIDED_KINDS = [*FLOAT64, "fp32", "bf16", "long", "counts of micro batches", "global counts"]
for kind, (mesh, sizes) in itertools.product(DIVIDED_KINDS, DIVIDED.items()):
    special = (in_float64,) if kind in FLOAT64 else ()
    CASES[f"torchrun {mesh} {kind}"] = Case("torchrun", special, meshed(KINDS[kind], sizes))
for kind, changes in MATRICES.items():
    CASES[f"ddp {kind}"] = Case("torchrun", (in_float64,), meshed(changes, None))
for (kind, changes), (mesh, sizes) in itertools.product(MATRICES.items(), DIVIDED.items()):
    if "tp_size" in sizes and ("ep_size" not in sizes or kind == "float64 untied"):
        CASES[f"torchrun {mesh} {kind}"] = Case("torchrun", (in_float64,), meshed(changes, sizes))
for kind, (mesh, sizes) in itertools.product(("fp32", "bf16"), DIVIDED.items()):
    CASES[f"accelerate {mesh} {kind}"] = Case("accelerate", changes=meshed(KINDS[kind], sizes))
for kind in ("waiting", "compiled"):
    CASES[f"torchrun tp fsdp {kind}"] = Case("torchrun", changes=meshed(KINDS[kind], TP))
CASES |= {
    "ddp one expert": Case("torchrun", changes=meshed(ONE_EXPERT, None)),
    "torchrun ep one expert": Case("torchrun", changes=meshed(ONE_EXPERT, MESHES["ep"])),
    "experts times ranks": Case("torchrun", (_times_ranks, in_float64), meshed(SEQUENCE, MESHES["ep fsdp"])),
    "divided twice": Case("torchrun", (_divided_twice, in_float64), meshed(SEQUENCE, MESHES["ep fsdp"])),
    "padded experts": Case("torchrun", (_padded_experts, in_float64), meshed(SEQUENCE, MESHES["ep"])),
    "padded shards": Case("torchrun", (_padded_shards,), meshed(KINDS["two experts"], MESHES["ep fsdp"])),
    "norm of the rest": Case("torchrun", (_norm_of_the_rest,), meshed({}, MESHES["ep fsdp"])),
    "other replicas": Case("torchrun", (_other_replicas,), meshed({}, MESHES["hsdp"])),
    "other replicas, compared": Case("torchrun", (_other_replicas, _compared), meshed({}, MESHES["hsdp"])),
    "other experts, compared": Case("torchrun", (_other_replicas, _compared), meshed({}, MESHES["ep hsdp"])),
    "equal replicas, compared": Case("torchrun", (_compared,), meshed({}, MESHES["ep hsdp"])),
    "balance of each rank": Case("torchrun", (_balance_of_each_rank,), meshed({}, MESHES["ep"])),
    "torchrun tp fsdp recomputed": Case("torchrun", changes=meshed(RECOMPUTED, TP)),
    "norms of each part": Case("torchrun", (_norms_of_each_part, in_float64), meshed(SEQUENCE, TP)),
    "norm of own parts": Case("torchrun", (_norm_of_own_parts,), meshed({}, TP)),
    "loss times ranks": Case("torchrun", (_loss_times_ranks, in_float64), meshed(SEQUENCE, TP)),
    "gradient of a share": Case("torchrun", (_gradient_of_a_share, in_float64), meshed(SEQUENCE, TP)),
    "router losses times ranks": Case(
        "torchrun", (_balance_of_each_rank, in_float64), meshed(SEQUENCE, DIVIDED["tp"])
    ),
    "with capacity": Case("torchrun", (_with_capacity,), meshed({}, MESHES["ep"])),
    "dropped beside nothing": Case("torchrun", (_dropped_beside_nothing,), meshed(ONE_EXPERT, MESHES["ep"])),
}
