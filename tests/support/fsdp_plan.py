"""The cases of fully sharded data parallelism that `rank_cases.py` runs in two processes.

Each on both paths, beside the same training under DDP.
"""

from __future__ import annotations

import sys
from typing import Any

from support.faults import ONE_RANK_NAN, Patch
from support.rank_cases import Case

Changes = dict[str, dict[str, Any]]

KINDS: dict[str, Changes] = {
    "fp32": {"training": {}},
    "bf16": {"training": {"precision": "bf16"}},
    "unclipped": {"training": {"max_grad_norm": 0.0}, "distributed": {"sync_each_batch": False}},
    "bf16 unclipped": {
        "training": {"max_grad_norm": 0.0, "precision": "bf16"},
        "distributed": {"sync_each_batch": False},
    },
    "one expert, tied": {
        "model": {"num_experts": 1, "num_experts_per_tok": 1}
        | {"tie_word_embeddings": True, "hidden_dropout": 0.1}
    },
}
FP16: Changes = {"training": {"precision": "fp16", "max_steps": 4}}
LONG_EXPERTS: Changes = {"training": {"max_steps": 20}}
LONG: Changes = LONG_EXPERTS | {"model": {"num_experts": 0}}


def _stays_ddp(patch: Patch, engine: type) -> None:
    script: Any = sys.modules[engine.__module__]
    plugin = script.fsdp_plugin

    def forgotten(*arguments: Any) -> Any:
        made = plugin(*arguments)
        script.PartialState._shared_state["distributed_type"] = script.DistributedType.MULTI_CPU
        return made

    patch.setattr(script, "fsdp_plugin", forgotten)


def sharded(changes: Changes, strategy: str = "fsdp") -> Changes:
    """`changes` in two steps of three micro batches each, under the strategy."""
    training = {"global_batch_size": 12, "max_steps": 2} | changes.get("training", {})
    return changes | {
        "training": training,
        "distributed": {"strategy": strategy} | changes.get("distributed", {}),
    }


CASES: dict[str, Case] = {}
for kind, changes in KINDS.items():
    for path in ("torchrun", "accelerate"):
        CASES[f"{path} {kind}"] = Case(path, changes=sharded(changes))
    CASES[f"ddp {kind}"] = Case("torchrun", changes=sharded(changes, "ddp"))
for path in ("torchrun", "accelerate"):
    CASES[f"{path} one rank NaN"] = Case(path, (ONE_RANK_NAN,), sharded({}))
CASES |= {
    "torchrun fp16": Case("torchrun", changes=sharded(FP16)),
    "ddp fp16": Case("torchrun", changes=sharded(FP16, "ddp")),
    "torchrun long": Case("torchrun", changes=sharded(LONG)),
    "accelerate long": Case("accelerate", changes=sharded(LONG)),
    "ddp long": Case("accelerate", changes=sharded(LONG, "ddp")),
    "accelerate long, experts": Case("accelerate", changes=sharded(LONG_EXPERTS)),
    "ddp long, experts": Case("torchrun", changes=sharded(LONG_EXPERTS, "ddp")),
    "stays ddp": Case("accelerate", (_stays_ddp,), sharded({})),
}
