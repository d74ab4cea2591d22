"""Graphs of the compiled layers: one a kind of layer, unbroken, whatever documents a batch has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_memory import eight_ranks
from fake_steps import DENSE, MOE, fake_batch, fake_config, fake_model
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel

from llm_pretrain.config.tree import Config
from llm_pretrain.distributed.fsdp import parallelize
from llm_pretrain.distributed.mesh import Meshes, Place
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.model.layers import RMSNorm
from llm_pretrain.training.engine import DDP_OPTIONS
from llm_pretrain.training.model_setup import RECOMPILE_LIMIT, compile_layers
from llm_pretrain.training.step import Objective

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's tracing does what its warnings advise against

PIECES = (64, 128, 64, 256, 512, 128)
"""Padded numbers of documents in the batches that are computed."""


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A real process group of one rank, since DDP waits for what it sends."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def compiled(
    config: Config, *, sharded: bool = False, counted: bool = False, evaluated: bool = False
) -> tuple[int, Counter[str]]:
    """Graphs and breaks of steps over differently packed batches.

    `counted`: each after a pass for the global batch's expert counts; `evaluated`: then without gradients.
    """
    torch._dynamo.reset()
    counters.clear()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model: Any = fake_model(config)
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")
        if sharded:
            parallelize(model, Meshes(), Place(), config)
        objective = Objective(config, 1)
        for pieces in PIECES:
            batch = fake_batch(config, pieces)
            with torch.autocast("cuda", torch.bfloat16):
                if counted:
                    with torch.no_grad():
                        counts = model(**batch.model_inputs()).expert_counts
                    batch = replace(batch, global_expert_counts=counts)
                output = model(**batch.model_inputs())
            objective(output, batch.num_loss_tokens).backward()
        if evaluated:
            model.eval()
            with torch.no_grad():
                for pieces in PIECES:
                    model(**fake_batch(config, pieces).model_inputs())
    return counters["stats"]["unique_graphs"], Counter(counters["graph_break"])


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "dense": (DENSE, {}, 1),
    "checkpointed": (DENSE, {"activation_checkpointing": True}, 1),
    "sdpa": (DENSE, {"attention_implementation": "sdpa"}, 1),
    "dropout": (DENSE | {"attention_dropout": 0.1, "hidden_dropout": 0.1}, {}, 1),
    "fp8": (DENSE, {"float8": True}, 1),
    "moe": (MOE, {}, 1),
    "moe fp32": (MOE, {"precision": "fp32"}, 1),
    "moe checkpointed": (MOE, {"activation_checkpointing": True}, 1),
    "dense layers and experts": (MOE | {"first_k_dense_replace": 1, "n_shared_experts": 1}, {}, 2),
}
"""Model, training settings and the number of kinds of layers."""
VARIABLE = 2
"""Graphs of a kind: the first number of documents, then any number."""


@pytest.mark.parametrize("case", [*CASES, "dense, sharded", "moe, sharded", "moe checkpointed, sharded"])
def test_a_layer_is_one_graph(case: str):
    name, _, sharded = case.partition(", ")
    model, training, kinds = CASES[name]
    with eight_ranks() if sharded else nullcontext():
        graphs, breaks = compiled(fake_config(model, training=training), sharded=bool(sharded))
    assert not breaks
    assert kinds <= graphs <= VARIABLE * kinds


TORCH_LIMIT = 8
"""Torch's own limit of a layer's graphs."""


@pytest.mark.parametrize("limit", [RECOMPILE_LIMIT, TORCH_LIMIT])
def test_all_graphs_of_a_run_are_within_the_limit(limit: int):
    """Both kinds of layers, counted, trained and evaluated; beyond the limit a layer runs uncompiled."""
    model = MOE | {"first_k_dense_replace": 1, "router_aux_loss_scope": "global_batch"}
    config = fake_config(model, training={"activation_checkpointing": True})
    settings: Any = torch._dynamo.config
    expected = nullcontext() if limit == RECOMPILE_LIMIT else pytest.raises(FailOnRecompileLimitHit)
    with settings.patch(recompile_limit=limit, fail_on_recompile_limit_hit=True), expected:
        graphs, breaks = compiled(config, counted=True, evaluated=True)
        assert not breaks
        assert TORCH_LIMIT < graphs < RECOMPILE_LIMIT, graphs


@pytest.mark.usefixtures("one_rank")
def test_ddp_splits_no_graph(monkeypatch: pytest.MonkeyPatch):
    """Two layers under DDP, on the CPU; its hooks do not depend on the device."""
    torch._dynamo.reset()
    compile_module, graphs = torch.nn.Module.compile, []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compile_module(self, backend=keep))
    config = fake_config(DENSE, training={"compile": "on", "precision": "fp32"})
    model = Decoder(config.model)
    compile_layers(model, config)
    ddp = DistributedDataParallel(model, **DDP_OPTIONS | {"bucket_cap_mb": 1})
    ids = torch.zeros(1, 16, dtype=torch.int64)
    for _ in range(2):
        ddp(input_ids=ids, labels=ids).loss_sum.backward()
    assert len(graphs) == 1


def test_a_break_in_a_layer_is_found(monkeypatch: pytest.MonkeyPatch):
    forward = RMSNorm.forward

    def prints(self: RMSNorm, x: torch.Tensor) -> torch.Tensor:
        print("a norm")
        return forward(self, x)

    monkeypatch.setattr(RMSNorm, "forward", prints)
    _, breaks = compiled(fake_config(DENSE))
    assert breaks
