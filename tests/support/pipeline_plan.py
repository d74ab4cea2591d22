"""Pipelines that `rank_cases.py` runs, and the same training in one process; and one mistake each.

Five layers, of which the first is dense, packed documents and loss masks, every loss of the router, and eight
micro batches a step. Clipping always takes effect.
"""

from __future__ import annotations

from typing import Any

from support.rank_cases import Case

Changes = dict[str, dict[str, Any]]

SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble")
KINDS: dict[str, Changes] = {
    "fp32": {},
    "bf16": {"training": {"precision": "bf16"}},
    "global counts": {"model": {"router_aux_loss_scope": "global_batch", "router_bias_update_rate": 0.125}},
    "only z": {"model": {"router_aux_loss_coef": 0.0}},
    "dense": {"model": {"num_experts": 0, "num_experts_per_tok": 2, "first_k_dense_replace": 0}},
    "tied": {"model": {"tie_word_embeddings": True}},
    "checkpointed": {"training": {"activation_checkpointing": True}},
    "ema": {"optimizer": {"ema_decay": 0.9}},
}


def pipelined(changes: Changes, schedule: str | None = None, steps: int = 5, **mesh: Any) -> Changes:
    """`changes` with eight micro batches a step; without a schedule in one process."""
    sizes = {"strategy": "fsdp", "pp_size": 2, "pp_schedule": schedule} | mesh if schedule else {}
    return changes | {
        "data": {"packing": "best_fit"},
        "training": {"global_batch_size": 16, "max_steps": steps, "max_grad_norm": 0.5}
        | changes.get("training", {}),
        "model": {"num_hidden_layers": 5, "first_k_dense_replace": 1, "tie_word_embeddings": False}
        | changes.get("model", {}),
        "distributed": sizes,
    }


CASES: dict[str, Case] = {}
for kind, changes in KINDS.items():
    CASES[f"whole {kind}"] = Case("torchrun", changes=pipelined(changes))
    for schedule in SCHEDULES:
        CASES[f"{schedule} {kind}"] = Case("torchrun", changes=pipelined(changes, schedule))
CASES["quick whole"] = Case("torchrun", changes=pipelined({}, steps=3))
CASES["quick 1f1b"] = Case("torchrun", changes=pipelined({}, "1f1b", steps=3))
for kind in ("fp32", "bf16", "global counts"):
    changes = KINDS[kind]
    CASES[f"fsdp {kind}"] = Case("torchrun", changes=pipelined(changes, "1f1b", pp_size=1, sync_each_batch=False))
    for schedule in SCHEDULES:
        CASES[f"{schedule} sharded {kind}"] = Case("torchrun", changes=pipelined(changes, schedule))
CASES["fsdp ep"] = Case("torchrun", changes=pipelined({}, "1f1b", pp_size=1, sync_each_batch=False, ep_size=2))
CASES["1f1b ep"] = Case("torchrun", changes=pipelined({}, "1f1b", ep_size=2))
CASES["interleaved_1f1b ep"] = Case("torchrun", changes=pipelined({}, "interleaved_1f1b", ep_size=2))
CASES["cp"] = Case("torchrun", changes=pipelined({}, "1f1b", pp_size=1, cp_size=2))
CASES["1f1b cp"] = Case("torchrun", changes=pipelined({}, "1f1b", cp_size=2))
