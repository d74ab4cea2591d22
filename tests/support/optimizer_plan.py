"""The cases of Muon in several processes that `rank_cases.py` runs in two of them.

On both paths, whole and sharded.
"""

from __future__ import annotations

from typing import Any

from support.rank_cases import Case

Changes = dict[str, dict[str, Any]]

UNCLIPPED = {"max_grad_norm": 0.0}
KINDS: dict[str, Changes] = {
    "clipped": {},
    "one expert": {  # that one rank holds
        "model": {"num_experts": 1, "num_experts_per_tok": 1, "n_shared_experts": 1},
        "training": UNCLIPPED,
    },
    "bf16, averaged": {
        "training": UNCLIPPED | {"precision": "bf16"},
        "optimizer": {"ema_decay": 0.5},
    },
    "a class by its path": {"training": UNCLIPPED, "optimizer": {"name": "support.lion.Lion"}},
}


def case_of(path: str, strategy: str, changes: Changes) -> Case:
    """Two steps of three micro batches each under the strategy."""
    optimizer = {"name": "muon", "muon_learning_rate": 0.05} | changes.get("optimizer", {})
    training = {"precision": "fp32"} | changes.get("training", {})
    training |= {"global_batch_size": 12, "max_steps": 2}
    distributed = {"strategy": strategy, "sync_each_batch": False}  # as DDP sums
    sections = {"optimizer": optimizer, "training": training, "distributed": distributed}
    return Case(path, changes=changes | sections)


CASES: dict[str, Case] = {}
for kind, changes in KINDS.items():
    for path in ("torchrun", "accelerate"):
        for strategy in ("ddp", "fsdp"):
            CASES[f"{path} {strategy} {kind}"] = case_of(path, strategy, changes)
