"""A lower bound of a step's time on a machine: products, memory traffic and links at their peaks.

An operation takes at least the time of its products at the peak of their dtype, and the time of its bytes at
the memory's bandwidth. In compiled layers, consecutive elementwise operations read only their first inputs
and write only their last results. Computation hides FSDP's collectives, except the first gather and the last
reduction. It hides neither exchanges of tokens, of keys and values, and of the positions and parts of divided
products, nor what a stage of a pipeline receives.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from llm_pretrain.forecast.simulation.tracker import Collective, Tracker
from llm_pretrain.hardware import Cluster

if TYPE_CHECKING:
    from llm_pretrain.forecast.simulation.trace import Trace

_FREE = {
    *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "device"),
    *("_record_function_enter_new", "_record_function_exit", "lift_fresh", "_local_scalar_dense"),
}
_FUSED = {
    *("_to_copy", "clone", "copy_", "sum", "mean", "amax", "logsumexp", "fill_", "zero_", "zeros_like"),
    *("_fused_rms_norm", "_fused_rms_norm_backward"),
}
"""Operations that a compiler fuses, besides those that torch calls pointwise."""
_LOOKED_UP = {"embedding", "index", "index_select", "gather"}
"""Operations that read no more of their first input than they write."""
_LEFT = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
"""Matrix product -> index of the left factor among its tensors."""
_HIDDEN = {"all_gather", "reduce_scatter"}
"""Collectives of FSDP that run beside computation; its all-reduces of gradients do so too."""


class Roofline:
    """Sums the least time of the operations that a `Tracker` observes, by micro batch.

    Args:
        machine: The machine that executes the operations.
        fuses: Whether a compiler fuses elementwise operations.
        length: Tokens of a row; attention is counted over whole rows.
    """

    def __init__(self, machine: Cluster, *, fuses: bool, length: int):
        self.machine, self.fuses, self.length = machine, fuses, length
        self.tracker: Tracker | None = None
        self.products: dict[float, float] = defaultdict(float)
        self.traffic: dict[float, float] = defaultdict(float)
        self._unwritten: dict[int, tuple[str, int]] = {}
        """Number of a storage -> (phase, bytes), for results of fused operations that are not written yet."""

    def __call__(self, func: Any, args: Any, given: list[Tensor], made: list[Tensor]) -> None:
        """Add an operation."""
        assert self.tracker is not None
        device = self.tracker.device
        if self.tracker.micro_batch < 0:  # before the step
            return
        if func.is_view or func._opname in _FREE or not any(x.device.type == device for x in (*given, *made)):
            return
        flops = self._flops(func, given, made)
        is_low = any(each.dtype in (torch.bfloat16, torch.float16) for each in given)
        peak = self.machine.bf16_tflops if is_low else self.machine.fp32_tflops
        computing = flops / (peak * 1e12)
        moving = self._bytes(func, given, made) / (self.machine.memory_gb_per_second * 1e9)
        number = self.tracker.micro_batch if self.tracker.phase != "update" else math.inf
        if computing >= moving:
            self.products[number] += computing
        else:
            self.traffic[number] += moving

    def _flops(self, func: Any, given: list[Tensor], made: list[Tensor]) -> float:
        name = func._opname
        if name in ("_varlen_attn", "_varlen_attn_backward"):
            # forward 2 products, backward 5 (the scores again); only the lower triangle of each
            query = given[0] if name == "_varlen_attn" else given[1]
            products = 2 if name == "_varlen_attn" else 5
            return products * query.numel() * self.length
        if name in ("_grouped_mm", "rows_times_weights", "rows_times_rows"):
            return 2.0 * given[0].numel() * given[1].shape[-1]
        left = _LEFT.get(name.rstrip("_"))
        return 0.0 if left is None else 2.0 * made[0].numel() * given[left].shape[-1]

    def _bytes(self, func: Any, given: list[Tensor], made: list[Tensor]) -> float:
        assert self.tracker is not None
        phase, serial = self.tracker.phase, self.tracker.serial
        is_fused = self.fuses and (torch.Tag.pointwise in func.tags or func._opname in _FUSED)
        read = {serial(each): _size(each) for each in given}
        written = {serial(each): _size(each) for each in made}
        if func._opname in _LOOKED_UP:
            first = serial(given[0])
            read[first] = min(read[first], sum(written.values()))
        total = 0.0
        for key, size in read.items():
            unwritten = self._unwritten.get(key)
            if unwritten is None:
                total += size
            elif not is_fused or unwritten[0] != phase:
                del self._unwritten[key]
                total += unwritten[1] + size
        for key, size in written.items():
            if is_fused and key not in read:
                self._unwritten[key] = (phase, size)
            elif key not in self._unwritten:
                total += size
        return total


def _size(tensor: Tensor) -> int:
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().size())


def collective_time(each: Collective, machine: Cluster) -> tuple[str, float]:
    """(link that bounds a collective, seconds of the collective), for a ring or, if small, for a tree."""
    count = len(each.ranks)
    if count == 1:
        return "nvlink", 0.0
    nodes = len({rank // machine.gpus_per_node for rank in each.ranks})
    beside = count // nodes  # ranks of the group in a node, whose shares of the network add up
    nvlink, network = machine.nvlink_gb_per_second * 1e9, machine.network_gb_per_second * 1e9
    on_nvlink, on_network = machine.nvlink_microseconds * 1e-6, machine.network_microseconds * 1e-6
    if each.kind == "all_to_all":
        inside = each.size * (beside - 1) / count / nvlink
        outside = each.size * (count - beside) / count / network
        link = "network" if outside > inside else "nvlink"
        return link, max(inside, outside) + (on_network if nodes > 1 else on_nvlink)
    link, speed = ("network", network * beside) if nodes > 1 else ("nvlink", nvlink)
    if speed > nvlink:
        link, speed = "nvlink", nvlink
    hops = (nodes - 1) * on_network + (count - nodes) * on_nvlink
    once = each.size * (count - 1) / count / speed + hops
    if each.kind in ("send", "receive"):  # between neighbours in the group
        speed, hop = (network, on_network) if nodes > 1 else (nvlink, on_nvlink)
        return link, each.size / speed + hop
    if each.kind == "broadcast":
        return link, each.size / speed + hops
    if each.kind != "all_reduce":
        return link, once
    tree = 2 * math.log2(count) * (on_network if nodes > 1 else on_nvlink) + 2 * each.size / speed
    return link, min(2 * once, tree)


def step_time(roofline: Roofline, trace: Trace, machine: Cluster) -> dict[str, Any]:
    """The least time of a step as fields of `SimulatedStep`; the micro batch `alike` stands for several."""

    def repeats(micro_batch: float) -> int:
        return trace.repeats if micro_batch == trace.alike else 1

    products = sum(repeats(number) * seconds for number, seconds in roofline.products.items())
    traffic = sum(repeats(number) * seconds for number, seconds in roofline.traffic.items())
    hidden: dict[str, float] = defaultdict(float)
    waited: dict[str, float] = defaultdict(float)
    on_device = [each for each in trace.collectives if not each.on_host]
    of_one = roofline.products[trace.alike] + roofline.traffic[trace.alike]
    of_shards = [index for index, each in enumerate(on_device) if each.of_shards]
    gathers = [index for index in of_shards if on_device[index].kind == "all_gather"]
    reductions = [index for index in of_shards if on_device[index].kind == "reduce_scatter"]
    alone = {*gathers[:1], *reductions[-1:]}
    for index, each in enumerate(on_device):
        link, seconds = collective_time(each, machine)
        of_replicas = each.kind == "all_reduce" and each.group in ("dp_replicate", "ep_replicate")
        is_hidden = of_replicas or (each.of_shards and each.kind in _HIDDEN and index not in alone)
        is_hidden = is_hidden or each.kind == "send"
        (hidden if is_hidden else waited)[link] += repeats(each.micro_batch) * seconds
        if not is_hidden and each.micro_batch == trace.alike:
            of_one += seconds
    times = {"products": products, "traffic": traffic, "hidden": hidden, "waited": waited}
    return times | {"idle": trace.idle * of_one}
