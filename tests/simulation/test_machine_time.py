"""The time of collectives and operations on a machine, against counts by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining.schedules import _Action

from llm_pretrain.forecast.simulation.patches import tracked
from llm_pretrain.forecast.simulation.timing import Roofline, collective_time
from llm_pretrain.forecast.simulation.trace import idle_time
from llm_pretrain.forecast.simulation.tracker import Collective, Tracker
from llm_pretrain.hardware import CLUSTERS

NO_HOPS = replace(CLUSTERS["h100"], nvlink_microseconds=0, network_microseconds=0)
NVLINK, NETWORK = NO_HOPS.nvlink_gb_per_second * 1e9, NO_HOPS.network_gb_per_second * 1e9
SIZE = 1 << 30
NODE, SIXTEEN, ONE_OF_EACH = tuple(range(8)), tuple(range(16)), tuple(range(0, 64, 8))


def collective(kind: str, ranks: tuple[int, ...], size: int = SIZE) -> Collective:
    return Collective(kind, "group", ranks, size, False, "backward", 0)


@pytest.mark.parametrize(
    ("kind", "ranks", "link", "seconds"),
    [
        ("all_gather", NODE, "nvlink", 7 / 8 * SIZE / NVLINK),
        ("reduce_scatter", NODE, "nvlink", 7 / 8 * SIZE / NVLINK),
        ("all_reduce", NODE, "nvlink", 2 * 7 / 8 * SIZE / NVLINK),
        ("all_gather", SIXTEEN, "network", 15 / 16 * SIZE / (8 * NETWORK)),
        ("all_gather", ONE_OF_EACH, "network", 7 / 8 * SIZE / NETWORK),
        ("all_to_all", NODE, "nvlink", 7 / 8 * SIZE / NVLINK),
        ("all_to_all", SIXTEEN, "network", 8 / 16 * SIZE / NETWORK),
        ("all_gather", (0,), "nvlink", 0.0),
    ],
)
def test_a_collective_takes_as_long_as_its_slowest_link(kind, ranks, link, seconds):
    assert collective_time(collective(kind, ranks), NO_HOPS) == (link, pytest.approx(seconds))


def test_a_ring_of_many_ranks_costs_its_hops():
    machine = replace(NO_HOPS, nvlink_microseconds=1.0, network_microseconds=10.0)
    _, seconds = collective_time(collective("all_gather", tuple(range(64)), size=0), machine)
    assert seconds == pytest.approx((7 * 10 + 56 * 1) * 1e-6)
    _, tree = collective_time(collective("all_reduce", tuple(range(64)), size=0), machine)
    assert tree == pytest.approx(2 * 6 * 10e-6)


def seconds(fuses: bool, function: Any) -> tuple[float, float]:
    """Products' and traffic's seconds, with 1 FLOP and 1 byte a second."""
    machine = replace(NO_HOPS, bf16_tflops=1e-12, fp32_tflops=1e-12, memory_gb_per_second=1e-9)
    roofline = Roofline(machine, fuses=fuses, length=16)
    roofline.tracker = tracker = Tracker("cpu", roofline)
    tracker.phase = "forward"
    inputs = [torch.ones(8, 8) for _ in range(2)]
    with tracked(tracker):
        tracker.micro_batch = 0
        kept = function(*inputs)
    del kept
    return sum(roofline.products.values()), sum(roofline.traffic.values())


def test_a_product_takes_its_operations_or_its_bytes():
    assert seconds(False, lambda a, b: a @ b) == (2 * 8**3, 0)
    assert seconds(False, lambda a, b: a[:1] @ b[:, :1]) == (0, 2 * 32 + 4)


def test_elementwise_operations_move_bytes_and_fused_ones_fewer():
    size = 4 * 8 * 8
    assert seconds(False, lambda a, b: (a + b).exp().sin()) == (0, (3 + 2 + 2) * size)
    assert seconds(True, lambda a, b: (a + b).exp().sin()) == (0, 2 * size)
    assert seconds(True, lambda a, b: (a + b).exp().sin() @ b) == (2 * 8**3, 2 * size)


@pytest.mark.parametrize(
    ("orders", "idle"),
    [
        # forward 1, backward 2: the second rank waits for the first one's forward pass, the first one in the
        # end for the second one's backward pass
        (["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"], 1),
        (["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"], 1),
        # one micro batch at a time
        (["0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1"], 2),
        # gradients of parameters while a rank would wait: 1 of 3 units is left
        (["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1"], 1 / 3),
    ],
)
def test_a_rank_of_a_pipeline_waits_for_what_its_schedule_needs(orders, idle):
    actions = [[_Action.from_str(each) for each in order.split()] for order in orders]
    schedule = SimpleNamespace(pipeline_order=dict(enumerate(actions)))
    assert idle_time(schedule) == pytest.approx(idle)
