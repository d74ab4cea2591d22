"""The cases of Muon in several processes that `rank_cases.py` runs in two of them.

On both paths, whole and sharded; and one mistake.
"""

from __future__ import annotations

from typing import Any

from support.faults import ONE_RANK_NAN, Fault, orthogonalised_in_parts
from support.rank_cases import Case

Changes = dict[str, dict[str, Any]]

UNCLIPPED = {"max_grad_norm": 0.0}
KINDS: dict[str, Changes] = {
    "clipped": {},
    "four experts": {"training": UNCLIPPED},
    # one rank holds two of them, the other one; and one rank the only one
    "three experts": {"model": {"num_experts": 3}, "training": UNCLIPPED},
    "one expert": {
        "model": {"num_experts": 1, "num_experts_per_tok": 1, "n_shared_experts": 1},
        "training": UNCLIPPED,
    },
    "bf16, averaged": {
        "training": UNCLIPPED | {"precision": "bf16"},
        "optimizer": {"ema_decay": 0.5},
    },
    "a class by its path": {"training": UNCLIPPED, "optimizer": {"name": "support.lion.Lion"}},
}


def case_of(path: str, strategy: str, changes: Changes, *faults: Fault) -> Case:
    """Three steps of three micro batches each under the strategy."""
    optimizer = {"name": "muon", "muon_learning_rate": 0.05} | changes.get("optimizer", {})
    training = {"precision": "fp32"} | changes.get("training", {})
    training |= {"global_batch_size": 12, "max_steps": 3}
    distributed = {"strategy": strategy, "sync_each_batch": False}  # as DDP sums
    return Case(
        path, faults, changes | {"optimizer": optimizer, "training": training, "distributed": distributed}
    )


CASES: dict[str, Case] = {}
for kind, changes in KINDS.items():
    for path in ("torchrun", "accelerate"):
        for strategy in ("ddp", "fsdp"):
            CASES[f"{path} {strategy} {kind}"] = case_of(path, strategy, changes)
for path in ("torchrun", "accelerate"):
    CASES[f"{path} one rank NaN"] = case_of(path, "fsdp", {}, ONE_RANK_NAN)
FP16: Changes = {"training": UNCLIPPED | {"precision": "fp16"}}
CASES |= {
    "torchrun ddp fp16": case_of("torchrun", "ddp", FP16),
    "torchrun fsdp fp16": case_of("torchrun", "fsdp", FP16),
    "in parts": case_of("torchrun", "fsdp", KINDS["four experts"], orthogonalised_in_parts),
}
