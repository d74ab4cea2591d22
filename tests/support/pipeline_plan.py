"""Pipelines that `rank_cases.py` runs, the same training without stages, and one mistake each.

Five layers, of which the first is dense, packed documents and loss masks, every loss of the router, and eight
micro batches a step. Clipping always takes effect.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from support.faults import Fault, Patch
from support.rank_cases import Case

from llm_pretrain.data.assembly import Batch
from llm_pretrain.distributed import pipeline
from llm_pretrain.distributed.pipeline import Pipeline

Changes = dict[str, dict[str, Any]]

KINDS: dict[str, Changes] = {
    "fp32": {},
    "bf16": {"training": {"precision": "bf16"}},
    "global counts": {"model": {"router_aux_loss_scope": "global_batch", "router_bias_update_rate": 0.125}},
    "only z": {"model": {"router_aux_loss_coef": 0.0}},
    "dense": {"model": {"num_experts": 0, "first_k_dense_replace": 0}},
    "checkpointed": {"training": {"activation_checkpointing": True}},
    "average": {"optimizer": {"ema_decay": 0.9}},
}
TIED: Changes = {"model": {"tie_word_embeddings": True}}


def pipelined(changes: Changes, schedule: str | None = None, steps: int = 20, **mesh: Any) -> Changes:
    """`changes` with eight micro batches a step; without a schedule in one process."""
    sizes = {"strategy": "fsdp", "pp_size": 2, "pp_schedule": schedule} | mesh if schedule else {}
    training = {"global_batch_size": 16, "max_steps": steps, "max_grad_norm": 0.5}
    model = {"num_hidden_layers": 5, "first_k_dense_replace": 1, "tie_word_embeddings": False}
    return changes | {
        "data": {"packing": "best_fit"},
        "training": training | changes.get("training", {}),
        "model": model | changes.get("model", {}),
        "distributed": sizes,
    }


def _ones(name: str) -> Fault:
    """The fault of ones in the place of an input of every batch on rank 1."""

    def fault(patch: Patch, engine: type) -> None:
        inputs = Batch.model_inputs

        def wrong(self: Batch) -> dict[str, Any]:
            found = inputs(self)
            if dist.get_rank() == 1:
                found[name] = torch.ones_like(found[name])
                found.pop("document_offsets", None)
            return found

        patch.setattr(Batch, "model_inputs", wrong)

    return fault


def _without_routers(patch: Patch, engine: type) -> None:
    """The losses of the routers of earlier stages count, but get no gradient."""
    right = pipeline._unpacked
    patch.setattr(pipeline, "_unpacked", lambda tensors: right([each.detach() for each in tensors]))


def _own_norm(patch: Patch, engine: type) -> None:
    def clip(self: Pipeline, parameters: Any, max_norm: float) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    patch.setattr(Pipeline, "clip_grad_norm", clip)


KINDS_OF: dict[str, tuple[str, ...]] = {
    "1f1b": ("fp32", "bf16", "checkpointed"),
    "gpipe": ("fp32", "dense", "average"),
    "interleaved_1f1b": ("fp32", "global counts", "checkpointed"),
    "interleaved_zero_bubble": ("fp32", "only z", "dense"),
    "zbv_zero_bubble": ("fp32", "bf16", "global counts", "average"),
}
SHARDED = {"1f1b": "fp32", "gpipe": "global counts", "interleaved_1f1b": "bf16"}
"""Schedules that do not split backward passes, each with one kind."""
CASES: dict[str, Case] = {}
for kind, changes in KINDS.items():
    CASES[f"whole {kind}"] = Case("torchrun", changes=pipelined(changes))
for schedule, kinds in KINDS_OF.items():
    for kind in kinds:
        CASES[f"{schedule} {kind}"] = Case("torchrun", changes=pipelined(KINDS[kind], schedule))
for schedule, kind in SHARDED.items():
    apart = pipelined(KINDS[kind], "1f1b", 5, pp_size=1, sync_each_batch=False)
    CASES[f"fsdp {kind}"] = Case("torchrun", changes=apart)
    CASES[f"{schedule} sharded {kind}"] = Case("torchrun", changes=pipelined(KINDS[kind], schedule, 5))
CASES |= {
    "quick whole": Case("torchrun", changes=pipelined({}, steps=2)),
    "quick 1f1b": Case("torchrun", changes=pipelined({}, "1f1b", 2)),
    "four 1f1b": Case("torchrun", changes=pipelined({}, "1f1b", pp_size=4)),
    "whole tied": Case("torchrun", changes=pipelined(TIED)),
    "1f1b tied": Case("torchrun", changes=pipelined(TIED, "1f1b")),
    "zbv_zero_bubble tied": Case("torchrun", changes=pipelined(TIED, "zbv_zero_bubble")),
    "whole tied bf16": Case("torchrun", changes=pipelined(TIED | KINDS["bf16"])),
    "1f1b tied bf16": Case("torchrun", changes=pipelined(TIED | KINDS["bf16"], "1f1b")),
    "without documents": Case("torchrun", (_ones("document_ids"),), pipelined({}, "1f1b", 2)),
    "without masks": Case("torchrun", (_ones("loss_mask"),), pipelined({}, "1f1b", 2)),
    "without routers": Case("torchrun", (_without_routers,), pipelined({}, "1f1b", 2)),
    "own norm": Case("torchrun", (_own_norm,), pipelined({}, "1f1b", 2)),
}
