"""The meshes of replicas, shards and experts that `rank_cases.py` runs in four processes, or in three.

Each on both paths, beside the same training under DDP; and one mistake each.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from support import faults, stepping
from support.faults import Patch
from support.rank_cases import Case

from llm_pretrain.training.agreement import check_parameters
from llm_pretrain.training.model_setup import build_model, initialize_weights

Changes = dict[str, dict[str, Any]]

MESHES: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "hsdp": {"dp_replicate_size": 2},
    "ep": {"ep_size": 4},
    "ep fsdp": {"ep_size": 2},
    "ep hsdp": {"dp_replicate_size": 2, "ep_size": 2},
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
ONE_STEP: Changes = {
    "training": {"max_steps": 1, "max_grad_norm": 0.0},
    "data": {"packing": "best_fit"},  # several documents, or ends of them, in a sequence
}
SCOPES = {
    f"float64 {scope}": ONE_STEP | {"model": {"router_aux_loss_scope": scope}}
    for scope in ("sequence", "micro_batch", "global_batch")
}
"""In each the balance loss is another sum."""
FLOAT64 = SCOPES | {
    "float64 dense": ONE_STEP | {"model": {"num_experts": 0}},
    "float64 untied": ONE_STEP
    | {
        "model": {
            **{"tie_word_embeddings": False, "first_k_dense_replace": 1, "n_shared_experts": 2},
            **{"intermediate_size": 68, "moe_intermediate_size": 34},  # 17 rows of a part, over two ranks
        }
    },
}
KINDS: dict[str, Changes] = {
    "quick": {"training": {"max_steps": 2, "global_batch_size": 8}},
    "fp32": {},
    "bf16": {"training": {"precision": "bf16"}},
    "long": {"training": {"max_steps": 20}},
    "global counts": {"model": {"router_aux_loss_scope": "global_batch", "router_bias_update_rate": 0.125}},
    "one expert": {"model": {"num_experts": 4, "num_experts_per_tok": 1, "router_aux_loss_coef": 0.0}},
    "two experts": {"model": {"num_experts": 2, "num_experts_per_tok": 1}},
    "muon": {"optimizer": {"name": "muon"}},
    "checkpointed": {"training": {"activation_checkpointing": True}, "model": {"hidden_dropout": 0.1}},
    "recomputed": {"training": {"activation_checkpointing": True}},
    "waiting": {"distributed": {"sync_each_batch": False}},
}
MESHES_OF: dict[str, tuple[str, ...]] = {
    "float64 sequence": tuple(MESHES),
    "float64 micro_batch": ("hsdp", "ep fsdp", "cp ep", "tp fsdp", "tp cp ep"),
    "float64 global_batch": ("ep hsdp", "cp hsdp", "tp ep", "tp cp ep"),
    "float64 dense": ("tp", "tp hsdp"),
    "float64 untied": ("tp fsdp", "tp ep", "tp cp ep"),
    "quick": ("tp cp ep",),
    "fp32": tuple(MESHES),
    "bf16": ("fsdp", "ep hsdp", "cp hsdp", "tp fsdp", "tp cp ep"),
    "long": ("cp ep", "tp hsdp"),
    "global counts": ("ep hsdp", "tp cp ep"),
    "one expert": ("ep",),
    "two experts": ("ep fsdp",),
    "muon": ("hsdp", "ep fsdp"),
    "checkpointed": ("ep hsdp",),
    "recomputed": ("tp fsdp",),
    "waiting": ("hsdp", "tp fsdp"),
}
"""Each mesh with each kind of which it may get other numbers."""


def in_float64(patch: Patch, engine: type) -> None:
    """Parameters of the values that fp32 has, in float64."""

    def build(*arguments: Any) -> Any:
        return build_model(*arguments).double()

    faults.replace_everywhere(patch, build_model, build)


def _other_replicas(patch: Patch, engine: type) -> None:
    """The second replica begins with the values of another seed; as in a run, parameters are compared."""

    def initialize(model: Any, seed: int, *arguments: Any, **options: Any) -> None:
        initialize_weights(model, seed + dist.get_rank() // 2, *arguments, **options)
        ranks: Any = SimpleNamespace(world_size=dist.get_world_size(), pipeline=None)
        check_parameters(ranks, model, "after initialisation")

    patch.setattr(stepping, "initialize_weights", initialize)


def meshed(changes: Changes, mesh: dict[str, Any] | None) -> Changes:
    """`changes` in three steps of three micro batches on each of four ranks; `mesh` None is DDP."""
    training = {"global_batch_size": 24, "max_steps": 3} | changes.get("training", {})
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    model = {"num_experts": 8, **heads} | changes.get("model", {})
    distributed = changes.get("distributed", {}) | {"strategy": "fsdp"} | mesh if mesh is not None else {}
    return changes | {"training": training, "model": model, "distributed": distributed}


SEQUENCE = SCOPES["float64 sequence"]
CASES: dict[str, Case] = {
    "other replicas": Case("torchrun", (_other_replicas,), meshed({}, MESHES["ep hsdp"]))
}
for kind, names in MESHES_OF.items():
    changes, special = (FLOAT64 | KINDS)[kind], (in_float64,) if kind in FLOAT64 else ()
    CASES[f"ddp {kind}"] = Case("torchrun", special, meshed(changes, None))
    for mesh in names:
        for path in ("torchrun",) if kind in FLOAT64 else ("torchrun", "accelerate"):
            CASES[f"{path} {mesh} {kind}"] = Case(path, special, meshed(changes, MESHES[mesh]))
ON_FOUR = tuple(CASES)

THREE = {"fsdp": {}, "ep": {"ep_size": 3}}
KINDS_OF_THREE = {
    kind: changes | {"model": changes["model"] | {"num_experts": 6}} for kind, changes in SCOPES.items()
}
ON_THREE = {
    f"three {mesh} {kind}": Case("torchrun", (in_float64,), meshed(changes, sizes))
    for kind, changes in KINDS_OF_THREE.items()
    for mesh, sizes in THREE.items()
}
"""In three processes, where a mean is no power of two."""
CASES |= ON_THREE
