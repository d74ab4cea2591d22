"""The cases of fully sharded data parallelism that `rank_cases.py` runs in two processes.

Each on both paths, beside the same training under DDP; and one mistake each.
"""

from __future__ import annotations

from typing import Any

from support.mutation import Edit
from support.rank_cases import Case
from support.rank_plan import ACCELERATE, ONE_RANK_NAN, TORCHRUN

SHARDING = "llm_pretrain/training/sharding.py"

Changes = dict[str, dict[str, Any]]

KINDS: dict[str, Changes] = {
    "fp32": {"training": {}},
    "bf16": {"training": {"precision": "bf16"}},
    "unclipped": {"training": {"max_grad_norm": 0.0}},
    "bf16 unclipped": {"training": {"max_grad_norm": 0.0, "precision": "bf16"}},
    "checkpointed": {"training": {"activation_checkpointing": True, "precision": "bf16"}},
    "one expert, tied": {
        "model": {"num_experts": 1, "num_experts_per_tok": 1}
        | {"tie_word_embeddings": True, "hidden_dropout": 0.1}
    },
    "global counts": {"model": {"router_aux_loss_scope": "global_batch", "router_bias_update_rate": 0.125}},
}
FP16: Changes = {"training": {"precision": "fp16", "max_steps": 4}}
LONG_EXPERTS: Changes = {"training": {"max_steps": 20}}
LONG: Changes = LONG_EXPERTS | {"model": {"num_experts": 0}}

STAYS_DDP = Edit(ACCELERATE, '_shared_state["distributed_type"] = DistributedType.MULTI_GPU', "_shared_state")
UNCOMPARED = Edit(
    ACCELERATE,
    "        check_strategy(config, self.accelerator.distributed_type.value, self.world_size)\n",
    "",
)
ALL_LOW = Edit(SHARDING, "reshard_after_forward=False)", "mp_policy=layer_precision('bf16'))")
STALE = Edit(
    TORCHRUN,
    "    adopt_parameters(model, optimizer, names)\n",
    "    optimizer.add_param_group({'params': [torch.zeros(1)]})\n",
)
EVERY_REDUCED = Edit(TORCHRUN, "set_requires_gradient_sync(is_last)", "set_requires_gradient_sync(True)")
BY_ADDRESS = Edit(
    ACCELERATE,
    "# `prepare` tells parameters by their address, and empty parts have none\n",
    "\n            if not all(self.gather_objects(release_parameters(model, optimizer) == names)):\n"
    "                raise RuntimeError('the optimizer has other parameters')\n",
)


def sharded(changes: Changes, strategy: str = "fsdp") -> Changes:
    """`changes` in three steps of three micro batches each, under the strategy."""
    training = {"global_batch_size": 12, "max_steps": 3} | changes.get("training", {})
    return changes | {"training": training, "distributed": {"strategy": strategy}}


CASES: dict[str, Case] = {}
for kind, changes in KINDS.items():
    for path in ("torchrun", "accelerate"):
        CASES[f"{path} {kind}"] = Case(path, changes=sharded(changes))
    CASES[f"ddp {kind}"] = Case("torchrun", changes=sharded(changes, "ddp"))
for path in ("torchrun", "accelerate"):
    CASES[f"{path} one rank NaN"] = Case(path, (ONE_RANK_NAN[path],), sharded({}))
CASES |= {
    "torchrun fp16": Case("torchrun", changes=sharded(FP16)),
    "ddp fp16": Case("torchrun", changes=sharded(FP16, "ddp")),
    "torchrun long": Case("torchrun", changes=sharded(LONG)),
    "accelerate long": Case("accelerate", changes=sharded(LONG)),
    "ddp long": Case("accelerate", changes=sharded(LONG, "ddp")),
    "accelerate long, experts": Case("accelerate", changes=sharded(LONG_EXPERTS)),
    "ddp long, experts": Case("torchrun", changes=sharded(LONG_EXPERTS, "ddp")),
    "stays ddp": Case("accelerate", (STAYS_DDP,), sharded({})),
    "stays ddp, uncompared": Case("accelerate", (STAYS_DDP, UNCOMPARED), sharded({})),
    "all in low precision": Case("torchrun", (ALL_LOW,), sharded(KINDS["bf16 unclipped"])),
    "every micro batch reduced": Case("torchrun", (EVERY_REDUCED,), sharded(KINDS["unclipped"])),
    "by address": Case("accelerate", (BY_ADDRESS,), sharded(KINDS["one expert, tied"])),
    "old parameters": Case("torchrun", (STALE,), sharded({})),
}
