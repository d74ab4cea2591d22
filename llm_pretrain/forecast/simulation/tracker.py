"""Records what a step does: which storages exist at any time, its collectives, and its operations."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llm_pretrain.optim.param_groups import to_local

_KINDS = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "alltoall_base_": "all_to_all",
    "allgather_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "receive",
}
"""torch's operation -> kind of collective."""

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer state"
GATHERED = "gathered parameters"
WHOLE_GRADIENTS = "gradients before they are reduced"
ACTIVATIONS = "activations"
BATCHES = "batches and buffers"
TEMPORARIES = "temporaries"


class Collective(NamedTuple):
    """One collective of a step.

    Args:
        kind: `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all`, `broadcast`; or `send` or `receive`
            between neighbouring stages of a pipeline.
        group: `world`, or the mesh dimension's name.
        ranks: Ranks of the group.
        size: Bytes of a rank's largest tensor: the output of an all-gather, the input of the other kinds.
        on_host: Whether the tensor is on the host.
        phase: `forward`, `backward` or `update`.
        micro_batch: Number of the micro batch, from 0; -1 before the first.
        of_shards: Whether FSDP uses it to gather parameters or to reduce gradients. Other collectives are
            part of a layer's computation.
    """

    kind: str
    group: str
    ranks: tuple[int, ...]
    size: int
    on_host: bool
    phase: str
    micro_batch: int
    of_shards: bool = False


class Tracker(TorchDispatchMode):
    """A mode that counts every storage on the device while it exists, and records every collective.

    Enter it through `patches.tracked`, which also reports storages that are freed or resized in place.

    Args:
        device: Type of the device.
        observe: Called with every operation that is no collective.
    """

    def __init__(self, device: str, observe: Any = None):
        super().__init__()
        self.device, self.observe = device, observe
        self.collectives: list[Collective] = []
        self.phase, self.micro_batch = "start", -1
        self._serials: dict[int, int] = {}
        self._kinds: list[str] = []
        self._log: list[tuple[int, int]] = []
        """(serial number of a storage, its size from here on)."""
        self._reduced: list[tuple[int, int, int]] = []
        """(micro batch, layer, place in the log) of each reduction by FSDP."""
        self._buffers: set[int] = set()
        """Storages into which FSDP gathers next, or from which it reduces next."""
        self._start = 0
        self._phases: list[tuple[int, str]] = []
        """(place in the log at which a phase begins, phase)."""
        self._is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A block in which nothing is counted or recorded."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def begin_step(self) -> None:
        """Start the step: peak and collectives before this call do not count."""
        self.collectives.clear()
        self._reduced.clear()
        self.micro_batch = -1
        self._start = len(self._log)
        self._phases = [(self._start, "start")]

    def name(self, kind: str, tensors: Iterable[Any]) -> None:
        """Set the kind of tensors. It replaces an earlier kind, except parameters and optimizer state."""
        for tensor in tensors:
            storage = to_local(tensor).untyped_storage()
            serial = self._serials.get(storage._cdata)
            if serial is not None and self._kinds[serial] not in (PARAMETERS, OPTIMIZER):
                self._kinds[serial] = kind

    def serial(self, tensor: Tensor) -> int:
        """Unique number of a tensor's storage, unlike its address, which a later storage may get."""
        address: int = tensor.untyped_storage()._cdata
        return self._serials.get(address, -address)

    def peak(self) -> tuple[int, dict[str, int]]:
        """(most bytes at once since `begin_step`, bytes of each kind of tensor then, largest first)."""
        totals = self.totals()
        place = max(range(self._start, len(totals)), key=totals.__getitem__)
        sizes = dict(self._log[: place + 1])  # the last size of each
        held: dict[str, int] = {}
        for serial, size in sizes.items():
            held[self._kinds[serial]] = held.get(self._kinds[serial], 0) + size
        kinds = sorted(held, key=held.__getitem__, reverse=True)
        return totals[place], {kind: held[kind] for kind in kinds if held[kind]}

    def highest(self, layers: int) -> dict[str, int]:
        """Most bytes in each part of a step with sharded parameters; each is linear in the number of layers.

        The parts belong to the last micro batch, which has most gradients: its forward pass, and its backward
        pass up to each of these reductions of gradients: of its first layer; its second (the first layer's
        are there too); its last but one (the last layer's parameters are gathered); its last; all. In the
        layers between, memory rises or falls evenly. In a pipeline the parts are the phases.
        """
        totals = self.totals()
        ends = {layer: place for number, layer, place in self._reduced if number == self.micro_batch}
        if len(ends) < layers or layers < 3:  # nothing is sharded, or other stages have layers
            found: dict[str, int] = {}
            for (start, phase), (end, _) in itertools.pairwise([*self._phases, (len(totals) - 1, "")]):
                found[phase] = max([found.get(phase, 0), *totals[start : end + 1]])
            return found
        begins = {phase: place for place, phase in self._phases}  # the last of each
        begun, turned = begins["forward"], begins["backward"]
        parts = {
            "forward": (begun, turned),
            "first layer": (turned, ends[layers - 1]),
            "second layer": (ends[layers - 1], ends[layers - 2]),
            "last layer but one": (ends[2], ends[1]),
            "last layer": (ends[1], ends[0]),
            "end": (ends[0], len(totals) - 1),
        }
        return {name: max(totals[start : end + 1]) for name, (start, end) in parts.items()}

    def enter(self, phase: str, micro_batch: int) -> None:
        """Record that a phase of a micro batch begins."""
        self.phase, self.micro_batch = phase, micro_batch
        self._phases.append((len(self._log), phase))

    def resized(self, storage: Any, size: int) -> None:
        """Record the new size of a storage: FSDP resizes the storages into which it gathers."""
        self._note(storage, GATHERED)
        serial = self._serials[storage._cdata]
        self._kinds[serial] = GATHERED
        self._log.append((serial, size))

    def reduced(self, layer: int) -> None:
        """Record that FSDP has reduced gradients of a layer; a layer may have several groups of them."""
        self._reduced.append((self.micro_batch, layer, len(self._log)))

    def totals(self) -> list[int]:
        """Bytes after each entry of the log."""
        sizes = [0] * len(self._kinds)
        total, totals = 0, []
        for serial, size in self._log:
            total += size - sizes[serial]
            sizes[serial] = size
            totals.append(total)
        return totals

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # operations on local tensors, and collectives, follow
        out = func(*args, **(kwargs or {}))
        if self._is_paused:
            return out
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        made = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        if func.namespace in ("c10d", "_c10d_functional"):
            self._collective(func, args, given)
        elif func.namespace == "fsdp":
            self.name(WHOLE_GRADIENTS if func._opname == "chunk_cat" else GATHERED, given)
            self._buffers = {_storage(each) for each in (*given, *made)}
        if func is torch.ops.aten.add.Tensor and _is_sum_of_gradients():
            self._replace(args[1])
        for each in made:
            tensor = to_local(each)
            if tensor.device.type == self.device:
                self._note(tensor.untyped_storage(), self._kind())
        if self.observe is not None and func.namespace not in ("c10d", "_c10d_functional"):
            self.observe(func, args, given, made)
        return out

    def _kind(self) -> str:
        return {"start": BATCHES, "forward": ACTIVATIONS}.get(self.phase, TEMPORARIES)

    def _note(self, storage: Any, kind: str) -> None:
        """Count a storage from its first appearance on."""
        key = storage._cdata
        if key in self._serials:
            return
        serial = self._serials[key] = len(self._kinds)
        self._kinds.append(kind)
        self._log.append((serial, storage.size()))
        weakref.finalize(storage, self._free, key).atexit = False

    def _replace(self, tensor: Tensor) -> None:
        """Stop counting a tensor, because the result of an operation takes its place."""
        if (serial := self._serials.get(tensor.untyped_storage()._cdata)) is not None:
            self._log.append((serial, 0))

    def _free(self, key: int) -> None:
        self._log.append((self._serials.pop(key), 0))
        self._buffers.discard(key)

    def _collective(self, func: Any, args: Any, given: list[Tensor]) -> None:
        kind = _KINDS.get(func._opname)
        if kind is None:  # such as the wait for a result
            return
        group = _group(tree_leaves(args))
        largest = max(given, key=lambda each: each.numel() * each.element_size())
        size, ranks = largest.numel() * largest.element_size(), tuple(dist.get_process_group_ranks(group))
        on_host = largest.device.type != self.device
        name = group.group_desc.removeprefix("mesh_") if len(ranks) < dist.get_world_size() else "world"
        of_shards = _storage(largest) in self._buffers
        self.collectives.append(
            Collective(kind, name, ranks, size, on_host, self.phase, self.micro_batch, of_shards)
        )
        if kind == "all_gather" and of_shards:
            self.name(GATHERED, [largest])
        elif kind == "reduce_scatter" and of_shards:
            self.name(GRADIENTS, given)
            self.name(WHOLE_GRADIENTS, [largest])


def _storage(tensor: Tensor) -> int:
    return to_local(tensor).untyped_storage()._cdata


def _is_sum_of_gradients() -> bool:
    """Whether autograd itself, and no Python code, called the operation that is being dispatched.

    Autograd adds two gradients of a tensor in place, but not fake ones, nor while a mode observes operations.
    """
    frame = sys._getframe(1).f_back
    while frame is not None and frame.f_code.co_name in ("_fn", "inner"):  # torch's, around a dispatch
        frame = frame.f_back
    return frame is None or frame.f_code.co_name == "_engine_run_backward"


def _group(arguments: list[Any]) -> Any:
    """The process group among an operation's arguments: an object, or its name as the last text."""
    for each in arguments:
        if type(each).__name__ == "ScriptObject" and "ProcessGroup" in str(each._type()):
            return dist.ProcessGroup.unbox(each)
    names = [each for each in arguments if isinstance(each, str)]
    distributed: Any = dist.distributed_c10d
    return distributed._resolve_process_group(names[-1])
