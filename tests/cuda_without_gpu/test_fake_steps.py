"""The step of both scripts on a GPU that is not there: it waits for nothing, and both dispatch the same."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_steps import CUDA, DENSE, MOE, Watched, fake_config, fake_model, watched_step
from torch._subclasses.fake_tensor import FakeTensorMode

from llm_pretrain.config.distributed_config import MeshSizes
from llm_pretrain.distributed import expert_parallel
from llm_pretrain.distributed.mesh import Place
from llm_pretrain.model import moe
from llm_pretrain.training import engine as training_engine
from llm_pretrain.training.model_setup import build_model

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": (DENSE, {}),
    "sdpa": (DENSE, {"training": {"attention_implementation": "sdpa"}}),
    "full loss": (DENSE, {"training": {"loss_implementation": "full"}}),
    "z-loss": (DENSE, {"training": {"z_loss_coef": 1e-4}}),
    "fp8": (DENSE, {"training": {"float8": True}}),
    "spikes skipped": (DENSE, {"training": {"spike_action": "skip"}}),
    "ema": (DENSE, {"optimizer": {"ema_decay": 0.999}}),
    "dropout": (DENSE | {"attention_dropout": 0.1, "hidden_dropout": 0.1}, {}),
    "norms, yarn": (
        DENSE
        | {"qk_norm": True, "rope_type": "yarn", "rope_factor": 4.0}
        | {"original_max_position_embeddings": 512},
        {},
    ),
    "moe": (MOE, {}),
    "moe fp32": (MOE, {"training": {"precision": "fp32"}}),
    "moe fp16": (MOE, {"training": {"precision": "fp16"}}),
    "moe checkpointed": (MOE, {"training": {"activation_checkpointing": True}}),
    "moe deterministic": (MOE, {"training": {"deterministic": True}}),
    "moe of an odd width": (MOE | {"moe_intermediate_size": 132}, {}),
    "moe per sequence": (MOE | {"router_aux_loss_scope": "sequence"}, {}),
    "moe global batch": (MOE | {"router_aux_loss_scope": "global_batch"}, {}),
    "moe sigmoid, shared": (
        MOE
        | {"scoring_func": "sigmoid", "n_shared_experts": 2, "first_k_dense_replace": 1}
        | {"router_bias_update_rate": 1e-3},
        {},
    ),
    "moe muon": (MOE, {"optimizer": {"name": "muon"}}),
}
DECIDED_ON_THE_HOST = {"moe fp16", "spikes skipped"}
"""The loss scale, and the detector of spikes that are skipped, are on the host: it waits once a step."""


@pytest.mark.filterwarnings("ignore:.*get_autocast_gpu_dtype:DeprecationWarning")  # torchao
@pytest.mark.parametrize("case", CASES)
def test_a_step_waits_for_nothing_and_both_scripts_take_the_same(case: str):
    model, sections = CASES[case]
    config = fake_config(model, **sections)
    by_hand, accelerated = (watched_step(config, launcher) for launcher in ("torchrun", "accelerate"))
    for step in (by_hand, accelerated):
        assert step.waits == []
        assert step.decisions == (case in DECIDED_ON_THE_HOST)
        assert len(step.operations) > 100
    assert by_hand.operations == accelerated.operations


@pytest.mark.parametrize(
    ("precision", "product"), [("bf16", "_grouped_mm"), ("fp32", "llm_pretrain.rows_times")]
)
def test_no_grouped_product_of_expert_parallelism_is_of_no_rows(
    precision: str, product: str, monkeypatch: pytest.MonkeyPatch
):
    """torch's may refuse them (pytorch/pytorch#192497)."""
    monkeypatch.setattr(expert_parallel.dist, "get_world_size", lambda group: 2)
    config = fake_config(MOE, training={"precision": precision})
    with FakeTensorMode(allow_non_fake_inputs=True), Watched() as watched:
        experts: Any = next(each for each in fake_model(config).modules() if isinstance(each, moe.Experts))
        experts.__class__, experts.group = expert_parallel.ParallelExperts, None
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        x, weight = (
            torch.empty(0, size, dtype=kind, device=CUDA, requires_grad=True)
            for size, kind in ((config.model.hidden_size, dtype), (1, torch.float32))
        )
        out = experts.compute(x, weight, torch.empty(0, dtype=torch.int64, device=CUDA))
        assert out.shape == x.shape
        out.float().sum().backward()
    products = [each for each in watched.operations if product in each]
    assert len(products) >= 4
    assert not [each for each in products if "(0, " in each or ", 0)" in each]


def test_a_copy_to_the_host_is_found(monkeypatch: pytest.MonkeyPatch):
    count = moe.count_assignments
    monkeypatch.setattr(moe, "count_assignments", lambda *a: count(*a).cpu().to("cuda"))
    waits = watched_step(fake_config(MOE)).waits
    assert waits
    assert "moe.py" in waits[0]


@pytest.mark.filterwarnings("ignore:.*get_autocast_gpu_dtype:DeprecationWarning")  # torchao
def test_several_ranks_start_in_fp8():
    """The pass before the first step has as many tokens as FP8's products need."""
    if find_spec("torchao") is None:
        pytest.skip("needs the package torchao")
    with FakeTensorMode(allow_non_fake_inputs=True):
        with CUDA:
            model = build_model(fake_config(DENSE, training={"float8": True}), CUDA)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        engine: Any = SimpleNamespace(
            world_size=2,
            device=CUDA,
            place=Place(MeshSizes(dp_replicate=2)),
            model_and_optimizer=lambda: (model, optimizer),
            forward=lambda batch: model(**batch.model_inputs()),
        )
        with torch.autocast("cuda", torch.bfloat16):
            training_engine.warm_up_backward(engine)
