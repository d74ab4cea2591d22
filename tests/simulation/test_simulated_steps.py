"""A simulated step: its collectives and its memory against counts by hand and against a computed step."""

from __future__ import annotations

from collections import Counter
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.simulated_meshes import OnCopies

from llm_pretrain.config.loading import from_dict
from llm_pretrain.config.tree import Config
from llm_pretrain.forecast.simulation import trace as trace_module
from llm_pretrain.forecast.simulation.patches import OURS
from llm_pretrain.forecast.simulation.trace import Trace, traced_step
from llm_pretrain.forecast.simulation.tracker import OPTIMIZER, PARAMETERS, Tracker
from llm_pretrain.forecast.simulation.worker import fake_ranks, grouped
from llm_pretrain.model.attention import rotary_frequencies

CPU = torch.device("cpu")
H, INNER, V, L, S, B = 32, 48, 512, 2, 16, 2
HEADS, KEY_HEADS, D = 4, 2, 8
E, K, WIDE = 8, 2, 16
DENSE: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": INNER,
    "num_hidden_layers": L,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "head_dim": D,
    "qk_norm": False,
}
MOE = DENSE | {"num_experts": E, "num_experts_per_tok": K, "moe_intermediate_size": WIDE}
IN_STAGES = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
"""Nothing changes in place what a layer returns to its stage."""
ATTENTION = 2 * H * D * (HEADS + KEY_HEADS)
LAYER = ATTENTION + 3 * H * INNER
REST = 2 * V * H + (2 * L + 1) * H
"""Embedding, head and norms."""


def config(model: dict[str, Any], world_size: int, micro_batches: int = 1, **distributed: Any) -> Config:
    training = {"precision": "fp32", "micro_batch_size": B, "sequence_length": S, "compile": "off"}
    training |= {"global_batch_size": B * world_size * micro_batches}
    training |= {"experts_implementation": "reference", "loss_implementation": "full"}
    distributed = {"strategy": "fsdp", "cpu_threads": 1} | distributed
    return from_dict(
        {"model": model | {"tie_word_embeddings": False}, "training": training, "distributed": distributed}
    )


def simulated(config: Config, world_size: int, **options: Any) -> Trace:
    with fake_ranks(world_size, "fake"):
        return traced_step(config, CPU, **options)


def sizes(trace: Trace, kind: str) -> Counter[tuple[str, int, int]]:
    """Group, ranks and bytes of the collectives of a kind."""
    found = [each for each in trace.collectives if each.kind == kind]
    return Counter((each.group, len(each.ranks), each.size) for each in found)


def test_the_collectives_of_fsdp_and_its_state_are_those_counted_by_hand():
    trace = simulated(config(DENSE, 2), 2)
    assert sizes(trace, "all_gather") == {("world", 2, 4 * REST): 1, ("world", 2, 4 * LAYER): 2 * L}
    assert sizes(trace, "reduce_scatter") == {("world", 2, 4 * REST): 1, ("world", 2, 4 * LAYER): L}
    # loss tokens and digests; the norm; the losses
    assert sum(sizes(trace, "all_reduce").values()) == 3
    share = 4 * (L * LAYER + REST) // 2
    assert trace.held[PARAMETERS] == pytest.approx(share, rel=0.01)  # norms are padded
    assert trace.held[OPTIMIZER] == pytest.approx(2 * trace.held[PARAMETERS], rel=0.01)


@pytest.mark.slow
def test_replicas_reduce_their_shards_once():
    """Three micro batches: two are traced, and the first stands for two."""
    trace = simulated(config(DENSE, 8, 3, dp_replicate_size=2), 8)
    assert sizes(trace, "all_gather") == {
        ("dp_shard", 4, 4 * REST): 2,
        ("dp_shard", 4, 4 * LAYER): 2 * L * 2,
    }
    between = {key: count for key, count in sizes(trace, "all_reduce").items() if key[0] == "dp_replicate"}
    assert between == {("dp_replicate", 2, REST): 1, ("dp_replicate", 2, LAYER): L}


def test_tokens_travel_to_their_experts_and_back():
    trace = simulated(config(MOE, 4, ep_size=2), 4)
    rows = B * S * K
    assert sizes(trace, "all_to_all") == {
        ("ep", 2, 8 * E): L,  # how many rows go where
        ("ep", 2, 4 * rows * H): 4 * L,  # to the experts and back, in both directions
        ("ep", 2, 4 * rows): 2 * L,  # their weights
    }
    experts = E // 2 * 3 * H * WIDE
    assert sizes(trace, "all_gather")[("ep_shard", 2, 4 * experts)] == 2 * L


@pytest.mark.slow
def test_positions_are_gathered_and_scattered_around_divided_products():
    trace = simulated(config(DENSE, 2, tp_size=2), 4)
    # ids; hidden states before attention, MLP and head; labels, mask and parts of the losses; backwards the
    # gradients of embedding, attention and MLP, whose positions were scattered
    gathered = sizes(trace, "all_gather")
    assert gathered["tp", 2, 4 * B * S * H] == (2 * L + 1) + (2 * L + 1)
    assert sizes(trace, "reduce_scatter")["tp", 2, 4 * B * S * H] == (2 * L + 1) + (2 * L + 1)
    assert gathered["dp_shard", 2, 4 * LAYER // 2] == 2 * L
    assert {each.group for each in trace.collectives if each.of_shards} == {"dp_shard", "world"}


@IN_STAGES
@pytest.mark.pipeline
@pytest.mark.parametrize(
    ("rank", "kind", "other"),
    [(0, "send", "receive"), pytest.param(2, "receive", "send", marks=pytest.mark.slow)],
)
def test_a_stage_sends_hidden_states_and_receives_gradients(rank, kind, other):
    size, micro_batches = 4 * B * S * H, 4
    batch = config(DENSE, 2, micro_batches, pp_size=2)
    with fake_ranks(4, "fake", rank):
        trace = traced_step(batch, CPU)
    assert sizes(trace, kind)["pp", 2, size] == micro_batches
    assert sizes(trace, other)["pp", 2, size] == micro_batches
    assert trace.idle == 1  # of a micro batch: stages less one
    own = L // 2 * LAYER + V * H + (L // 2 * 2 + rank // 2) * H
    assert trace.held[PARAMETERS] == pytest.approx(4 * own / 2, rel=0.02)


@IN_STAGES
@pytest.mark.pipeline
@pytest.mark.slow
def test_middle_micro_batches_of_a_pipeline_stand_for_more(monkeypatch):
    batch = config(DENSE, 2, 8, pp_size=2)
    with fake_ranks(4, "fake"):
        few = traced_step(batch, CPU)
    monkeypatch.setattr(trace_module, "_steady", lambda config, count: count)
    with fake_ranks(4, "fake"):
        every = traced_step(batch, CPU)
    assert (few.repeats > 1, every.repeats) == (True, 1)
    assert few.idle == every.idle
    assert grouped(few) == grouped(every)
    assert abs(few.peak - every.peak) <= 8 * 8  # the losses of each micro batch


def test_a_simulated_peak_is_a_computed_one(monkeypatch):
    """To the byte; a storage whose end is not seen would change it."""
    alone = config(MOE, 1, micro_batches=2)
    computed = simulated(alone, 1, real=OnCopies())
    assert simulated(alone, 1).peak == computed.peak
    monkeypatch.setattr(Tracker, "_free", lambda self, key: self._serials.pop(key))
    assert simulated(alone, 1).peak > computed.peak


def test_one_micro_batch_stands_for_all_but_the_last():
    two, five = (simulated(config(DENSE, 2, micro_batches=count), 2) for count in (2, 5))
    assert (two.repeats, five.repeats) == (1, 4)
    assert [each[:4] for each in two.collectives] == [each[:4] for each in five.collectives]
    # ids, labels, mask and digest of the other micro batches
    assert five.peak - two.peak == 3 * ((4 * 8 + 1) * B * S + 8 * 8)


def test_padded_experts_are_found():
    trace = simulated(config(MOE, 16), 16)
    assert trace.padding is not None
    assert (trace.padding.rows, trace.padding.ranks) == (E, 16)
    assert trace.padding.name.endswith("mlp.experts.gate_up_proj")
    expected = 1 + E * 3 * H * WIDE * L / (REST + L * (ATTENTION + E * H + E * 3 * H * WIDE))
    assert trace.padding.factor == pytest.approx(expected, rel=0.02)


def test_a_simulation_leaves_nothing_behind():
    names = [name for name, why in OURS.items() if "Triton" not in why]
    before = [resolve_name(name) for name in names]
    simulated(config(DENSE, 2), 2)
    assert [resolve_name(name) for name in names] == before
    assert rotary_frequencies.cache_info().currsize == 0
    assert not dist.is_initialized()
