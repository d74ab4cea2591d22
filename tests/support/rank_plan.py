"""The cases of `traps/test_traps_ranks.py`: our code on either path, and one mistake each."""

from __future__ import annotations

from support import faults
from support.rank_cases import Case

BF16 = {"training": {"precision": "bf16"}}
DROPOUT = {"model": {"hidden_dropout": 0.2}}
UNCLIPPED = {"training": {"max_grad_norm": 0.0, "max_steps": 1}}
ROUTER_BIAS = {"model": {"router_bias_update_rate": 0.125}}
GLOBAL_BALANCE = {
    "model": {"router_aux_loss_scope": "global_batch", "router_aux_loss_coef": 1.0},
    "training": {"max_grad_norm": 0.0, "activation_checkpointing": True},
}
FEW_TOKENS_PER_EXPERT = {"model": {"num_experts": 32, "num_experts_per_tok": 1}}

CASES: dict[str, Case] = {}
for path in ("torchrun", "accelerate"):
    CASES[f"{path} fp32"] = Case(path)
    CASES[f"{path} counted"] = Case(path, counted=True)
    CASES[f"{path} bf16"] = Case(path, changes=BF16)
    CASES[f"{path} dropout"] = Case(path, changes=DROPOUT)
    CASES[f"{path} unclipped"] = Case(path, changes=UNCLIPPED)
    CASES[f"{path} global balance"] = Case(path, changes=GLOBAL_BALANCE)
    CASES[f"{path} buffers"] = Case(path, (faults.OWN_BUFFERS,), ROUTER_BIAS)
    CASES[f"{path} read late"] = Case(path, (faults.OWN_BUFFERS, faults.WAITING), ROUTER_BIAS)
    CASES[f"{path} one rank NaN"] = Case(path, (faults.ONE_RANK_NAN,))
CASES |= {
    "torchrun read late, NaN": Case("torchrun", (faults.WAITING, faults.ONE_RANK_NAN), ROUTER_BIAS),
    "skip by own loss": Case("torchrun", (faults.ONE_RANK_NAN, faults.skip_by_own_loss)),
    "counts of one rank": Case("torchrun", (faults.COUNTS_OF_ONE_RANK,), GLOBAL_BALANCE),
    "few tokens per expert": Case("torchrun", changes=FEW_TOKENS_PER_EXPERT),
    "another optimizer": Case("torchrun", (faults.another_optimizer,)),
    "another bucket size": Case("torchrun", (faults.SMALL_BUCKETS,)),
    "divided elsewhere": Case("torchrun", (faults.DIVIDED_ELSEWHERE,)),
    "every micro batch reduced": Case("torchrun", (faults.EVERY_MICRO_BATCH,)),
    "every micro batch counted": Case("torchrun", (faults.EVERY_MICRO_BATCH,), counted=True),
    "dropout by rank": Case("torchrun", (faults.DROPOUT_BY_RANK,), DROPOUT),
    "mean per rank": Case("torchrun", (faults.MEAN_PER_RANK,), UNCLIPPED),
    "sharded twice": Case("accelerate", (faults.SHARDED_TWICE,)),
    "filled up": Case("accelerate", (faults.FILLED_UP,)),
    "not sharded": Case("torchrun", (faults.NOT_SHARDED,)),
    "prepared schedule": Case("accelerate", (faults.PREPARED_SCHEDULE,)),
    "broadcast buffers": Case("torchrun", (faults.BROADCAST_BUFFERS, faults.OWN_BUFFERS), ROUTER_BIAS),
    "no_sync kept": Case("torchrun", (faults.NO_SYNC_KEPT,)),
    "no wait": Case("accelerate", (faults.NO_WAIT,)),
    "experts in a list": Case("torchrun", (faults.experts_in_a_list,), FEW_TOKENS_PER_EXPERT),
    "static graph": Case("torchrun", (faults.STATIC_GRAPH,)),
    "static graph, first pass unreduced": Case("torchrun", (faults.STATIC_GRAPH, faults.NO_EMPTY_STEP)),
    "no accumulate": Case("accelerate", (faults.NO_ACCUMULATE,)),
}
