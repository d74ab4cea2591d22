"""The cases of fully sharded data parallelism that `rank_cases.py` runs in two processes.

Each on both paths, beside the same training under DDP; and one mistake each.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from support import faults
from support.faults import ONE_RANK_NAN, Patch
from support.rank_cases import Case

from llm_pretrain.distributed import fsdp
from llm_pretrain.launch.checks import check_strategy

Changes = dict[str, dict[str, Any]]

KINDS: dict[str, Changes] = {
    "fp32": {"training": {}},
    "bf16": {"training": {"precision": "bf16"}},
    "unclipped": {"training": {"max_grad_norm": 0.0}, "distributed": {"sync_each_batch": False}},
    "bf16 unclipped": {
        "training": {"max_grad_norm": 0.0, "precision": "bf16"},
        "distributed": {"sync_each_batch": False},
    },
    "unclipped, every batch": {"training": {"max_grad_norm": 0.0}},
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


def _stays_ddp(patch: Patch, engine: type) -> None:
    script: Any = sys.modules[engine.__module__]
    plugin = script.fsdp_plugin

    def forgotten(*arguments: Any) -> Any:
        made = plugin(*arguments)
        script.PartialState._shared_state["distributed_type"] = script.DistributedType.MULTI_CPU
        return made

    patch.setattr(script, "fsdp_plugin", forgotten)


def _all_low(patch: Patch, engine: type) -> None:
    """Norms, routers, embedding and head in bf16 too."""
    fully_shard = fsdp.fully_shard
    policy = fsdp.layer_precision("bf16")
    patch.setattr(fsdp, "fully_shard", lambda *a, **k: fully_shard(*a, **k, mp_policy=policy))


@contextmanager
def _old_parameters(model: Any, optimizer: Any) -> Iterator[None]:
    for group in optimizer.param_groups:
        group["params"] = []
    yield
    optimizer.add_param_group({"params": [torch.zeros(1)]})


def _by_address(patch: Patch, engine: type) -> None:
    """`prepare` finds the optimizer's sharded parameters by their addresses; stops where they are others."""
    script: Any = sys.modules[engine.__module__]
    shard, names, optimizers = script.shard_full_precision, [], []

    def named(model: Any) -> list[list[str]]:
        own = {parameter: name for name, parameter in model.named_parameters()}
        return [[own.get(each, "") for each in group["params"]] for group in optimizers[0].param_groups]

    @contextmanager
    def unbound(model: Any, optimizer: Any) -> Iterator[None]:
        optimizers.append(optimizer)
        names.extend(named(model))
        yield
        same = [None] * dist.get_world_size()
        dist.all_gather_object(same, named(model) == names)
        if not all(same):
            raise RuntimeError("the optimizer has other parameters")

    def sharded(model: Any, mesh: Any) -> Any:
        ignored = shard(model, mesh)
        parameters = dict(model.named_parameters())
        for group, own in zip(optimizers[0].param_groups, names, strict=True):
            group["params"] = [parameters[name] for name in own]
        return ignored

    patch.setattr(script, "rebound_optimizer", unbound)
    patch.setattr(script, "shard_full_precision", sharded)


UNCOMPARED = faults.replacing(check_strategy, lambda *_: None)
OLD_PARAMETERS = faults.replacing(fsdp.rebound_optimizer, _old_parameters)


def sharded(changes: Changes, strategy: str = "fsdp") -> Changes:
    """`changes` in three steps of three micro batches each, under the strategy."""
    training = {"global_batch_size": 12, "max_steps": 3} | changes.get("training", {})
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
    "stays ddp, uncompared": Case("accelerate", (_stays_ddp, UNCOMPARED), sharded({})),
    "all in low precision": Case("torchrun", (_all_low,), sharded(KINDS["bf16 unclipped"])),
    "every micro batch reduced": Case("torchrun", (faults.EVERY_REDUCED,), sharded(KINDS["unclipped"])),
    "by address": Case("accelerate", (_by_address,), sharded(KINDS["one expert, tied"])),
    "old parameters": Case("torchrun", (OLD_PARAMETERS,), sharded({})),
}
