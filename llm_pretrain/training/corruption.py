"""Detects silent data corruption: computes a step twice, and compares tensors that several ranks hold.

The computation that equals an earlier one is applied. Tensors are named as in the whole model.
"""

from __future__ import annotations

import hashlib
import math
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from llm_pretrain.checkpoints.folders import folder_name
from llm_pretrain.data.assembly import Batch
from llm_pretrain.distributed.collectives import any_rank
from llm_pretrain.errors import CorruptionError, PretrainError
from llm_pretrain.launch.watchdog import heartbeat
from llm_pretrain.model.decoder import DecoderLayer
from llm_pretrain.optim.param_groups import replicate_dims, to_local
from llm_pretrain.runs.status import Status
from llm_pretrain.training.agreement import bits_sum
from llm_pretrain.training.decision import Decision
from llm_pretrain.training.engine import Engine
from llm_pretrain.training.saving import CheckpointManager
from llm_pretrain.training.step import Step

PASSED, TRANSIENT = "passed", "transient"
"""Values of a row's `train/check`."""


@dataclass(frozen=True)
class Fault:
    """One detected corruption.

    Args:
        step: The step that was checked.
        ranks: Ranks that have the fault, or of which at least one has it.
        devices: Devices of these ranks, in the same order.
        found: What differed, in words.
        transient: Whether the difference was gone when the computation or the comparison was repeated.
    """

    step: int
    ranks: list[int]
    devices: list[str]
    found: str
    transient: bool

    def __str__(self) -> str:
        places = [f"rank {rank} ({device})" for rank, device in zip(self.ranks, self.devices, strict=True)]
        shown = " or ".join(places[:4]) + (f" or {len(places) - 4} more" if len(places) > 4 else "")
        return f"step {self.step}, {shown}: {self.found}"


class Moment(NamedTuple):
    """A moment of a computation; a fault shows at this moment and at later ones, on other ranks too."""

    phase: int
    """`FORWARD`, `SUMS` (of losses), `BACKWARD`, `ADDED` (gradients over ranks) or `CLIPPED` (gradients)."""
    layer: int = 0
    """Layers finished in this phase."""
    part: int = 0
    """Order inside a layer: 0 or 1."""


FORWARD, SUMS, BACKWARD, ADDED, CLIPPED = range(5)


class Computation:
    """Digests of what a forward and backward pass computes on this rank.

    A digest is the sum of a tensor's memory as 64-bit integers, so one flipped bit always changes the digest.
    `values` holds one digest per micro batch for each moment and tensor.
    """

    def __init__(self) -> None:
        self._digests: dict[tuple[Moment, str], list[Tensor]] = {}
        self.values: dict[tuple[Moment, str], list[int]] = {}

    @torch.no_grad()
    def add(self, moment: Moment, name: str, tensor: Tensor) -> None:
        """Add the digest of one micro batch's tensor, or of this rank's shard of it."""
        self._digests.setdefault((moment, name), []).append(bits_sum(to_local(tensor)))

    def add_gradients(self, phase: int, model: nn.Module) -> None:
        """Add the digests of all parameters' gradients."""
        suffix = {ADDED: ", added over the ranks", CLIPPED: ", clipped"}[phase]
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                self.add(Moment(phase), f"gradient of {name}{suffix}", parameter.grad)

    def read(self) -> None:
        """Fill `values`; waits for the device once."""
        digests = [digest for each in self._digests.values() for digest in each]
        found = iter(torch.stack([digest.to(digests[0].device) for digest in digests]).tolist())
        self.values = {key: [next(found) for _ in each] for key, each in self._digests.items()}

    def first_difference(self, other: Computation) -> tuple[Moment, str] | None:
        """The first moment at which the two differ, and the names of what differs; None if all is equal."""
        keys = self.values.keys() | other.values.keys()
        differing = sorted(key for key in keys if self.values.get(key) != other.values.get(key))
        if not differing:
            return None
        moment = differing[0][0]
        return moment, listed([name for each, name in differing if each == moment])


def listed(names: Sequence[str]) -> str:
    """Up to three names of tensors, and how many more there are, for a message."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


class CorruptionCheck:
    """Checks steps, and the state before a save; collective.

    Args:
        decide: The run's decision on a step; its engine is prepared.
        checkpoints, status: Those of the run.
        warn: Prints a line on rank 0.
        flush: Writes the rows of all steps so far.
    """

    def __init__(
        self,
        decide: Decision,
        checkpoints: CheckpointManager,
        status: Status,
        warn: Callable[[str], None],
        flush: Callable[[], None],
    ):
        self.config, self.engine, self.progress = decide.config, decide.engine, decide.progress
        self.decide = decide
        self.checkpoints, self.status, self.warn, self.flush = checkpoints, status, warn, flush

    def is_due(self, step: int) -> bool:
        """Whether this step is checked: every N-th, the last, and those that a checkpoint follows."""
        every, last = self.config.training.check_every, self.config.training.max_steps
        return every > 0 and (step % every == 0 or step == last or self.checkpoints.is_due(step))

    def take_step(self, micro_batches: Sequence[Batch]) -> Step:
        """Compute a step at most three times, until two computations have the same bits; only then apply it.

        Raises:
            CorruptionError: on every rank, if no two agree, or if ranks hold different parameters or moments.
        """
        self.flush()
        number = self.progress.step + 1
        is_alike = self.compare_replicas(number)
        passes: list[Computation] = []
        for _ in range(3):
            heartbeat(f"checking step {number}")
            step, accepted = self._compute(micro_batches, passes)
            if step.skipped == "no_loss_tokens":  # nothing was computed
                return step
            if accepted:
                break
        else:
            raise self._error(self._locate(number, passes, transient=False))
        step.check = PASSED if is_alike and len(passes) == 2 else TRANSIENT
        if len(passes) > 2:
            fault = self._locate(number, passes[:2], transient=True)
            self._record(fault, "computed again, two of three computations have the same bits")
        self.status.checked = number
        return step

    def compare_replicas(self, step: int) -> bool:
        """Whether parameters, buffers and optimizer state are equal on all ranks that hold them.

        False if they differ at first and are equal when they are read again.

        Raises:
            CorruptionError: on every rank.
        """
        if self.engine.world_size == 1:
            return True
        heartbeat(f"comparing what ranks hold alike at step {step}")
        digests = self._alike_digests()
        if self._are_alike(digests):
            return True
        differing = self._differing(digests)
        again = self._alike_digests()
        is_transient = self._are_alike(again)
        fault = self._fault(
            step, differing if is_transient else self._differing(again), transient=is_transient
        )
        if not is_transient:
            raise self._error(fault)
        self._record(fault, "read again, it is the same on all ranks")
        return False

    def notes(self) -> list[str]:
        """What is not compared, for the console."""
        parameters = self.engine.model_and_optimizer()[0].parameters()
        if all(held_part(parameter, self.engine)[1] == 1 for parameter in parameters):
            return [
                "training.check_every: no two processes hold the same, so parameters and moments are not "
                "compared"
            ]
        return []

    def _compute(self, micro_batches: Sequence[Batch], passes: list[Computation]) -> tuple[Step, bool]:
        """Compute the step as one more of `passes`; apply it if an earlier pass equals it on all ranks."""
        engine, own, accepted = self.engine, Computation(), False
        model, scaler = engine.model_and_optimizer()[0], engine.scaler
        scale = scaler.state_dict()

        def before_clipping(step: Step) -> None:  # clipping changes all gradients if one is wrong
            if step.sums.vector is not None:
                own.add(Moment(SUMS), "sums of losses and counts", step.sums.vector)
            own.add_gradients(ADDED, model)

        def decide(step: Step) -> bool:
            nonlocal accepted
            own.add_gradients(CLIPPED, model)
            own.add(Moment(CLIPPED), "gradient norm", torch.as_tensor(step.grad_norm))
            own.read()
            if passes:
                accepted = not all(any_rank(engine, *(own.values != each.values for each in passes)))
            passes.append(own)
            return accepted and self.decide(step)

        with observed(model, own):
            step = Step.begin(micro_batches, engine, decide, before_clipping)
            if step.num_loss_tokens:
                engine.train_step(step)
                step.micro_batches = ()
        if not accepted:
            scaler.load_state_dict(scale)
        return step, accepted

    def _locate(self, step: int, passes: Sequence[Computation], *, transient: bool) -> Fault:
        """The fault that makes computations of a step differ, on the ranks where a difference shows first."""
        pairs = [(a, b) for number, a in enumerate(passes) for b in passes[number + 1 :]]
        own = min(filter(None, (a.first_difference(b) for a, b in pairs)), default=None)
        found = {rank: each for rank, each in enumerate(self.engine.gather_objects(own)) if each}
        first = min(moment for moment, _ in found.values())
        where = {rank: name for rank, (moment, name) in found.items() if moment == first}
        names = " or ".join(dict.fromkeys(where.values()))
        if first.phase == ADDED and self.engine.world_size > 1:
            names += " (each rank's own part was the same or could not be observed: any may have computed it)"
        return self._fault(step, (list(where), f"{names} differs when computed again"), transient=transient)

    def _alike_digests(self) -> dict[str, dict[str, int]]:
        """Part of the state (`held_part`) -> tensor name -> digest, if other ranks hold the part too."""
        model, optimizer = self.engine.model_and_optimizer()
        tensors = {name: each for name, each in model.state_dict().items() if isinstance(each, Tensor)}
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{key} of {name}"] = value
        parts: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            part, holders = held_part(tensor, self.engine)
            if holders > 1:
                parts.setdefault(part, {})[name] = bits_sum(to_local(tensor)).to(self.engine.device)
        return {
            part: dict(zip(each, torch.stack(list(each.values())).tolist(), strict=True))
            for part, each in parts.items()
        }

    def _are_alike(self, digests: Mapping[str, Mapping[str, int]]) -> bool:
        """Whether all ranks that hold a part have equal digests of it; all ranks get the same answer."""
        own = {part: hashlib.sha256(repr(each).encode()).digest() for part, each in digests.items()}
        found: dict[str, bytes] = {}
        return all(
            found.setdefault(part, digest) == digest
            for each in self.engine.gather_objects(own)
            for part, digest in each.items()
        )

    def _differing(self, digests: Mapping[str, Mapping[str, int]]) -> tuple[list[int], str]:
        """The ranks that differ from the majority, all if there is none; and what differs, in words."""
        everywhere = self.engine.gather_objects(digests)
        ranks: set[int] = set()
        names: dict[str, None] = {}
        for part in dict.fromkeys(part for each in everywhere for part in each):
            holders = [rank for rank, each in enumerate(everywhere) if part in each]
            for name in dict.fromkeys(name for rank in holders for name in everywhere[rank][part]):
                values = {rank: everywhere[rank][part].get(name) for rank in holders}
                (common, count), *others = Counter(values.values()).most_common()
                if others:
                    names[name] = None
                    has_majority = 2 * count > len(holders)
                    ranks |= {rank for rank in holders if not has_majority or values[rank] != common}
        return sorted(ranks), f"{listed(list(names))} differs between ranks that hold the same"

    def _fault(self, step: int, found: tuple[list[int], str], *, transient: bool) -> Fault:
        device = f"{self.engine.device} of {socket.gethostname()}"
        devices = self.engine.gather_objects(device)
        ranks, what = found
        return Fault(step, ranks, [devices[rank] for rank in ranks], what, transient)

    def _record(self, fault: Fault, outcome: str) -> None:
        self.status.add_fault(asdict(fault))
        self.warn(f"silent data corruption at {fault}; {outcome}; training goes on, but replace the device")

    def _error(self, fault: Fault) -> CorruptionError:
        self.status.add_fault(asdict(fault))
        with suppress(PretrainError):  # a save in the background may be the last checked one
            self.checkpoints.wait(last=True)
        checked = self.status.checked or 0
        sound = [step for step in self.checkpoints.store.committed() if step <= checked]
        if sound:
            path = self.checkpoints.folder.checkpoints / folder_name(max(sound))
            advice = (
                f"the last checked checkpoint is {path}: move later ones out of its folder, and start again"
            )
        else:
            advice = "no checkpoint has been checked: start again from the beginning"
        error = CorruptionError(
            f"training.check_every: silent data corruption at {fault}; it did not go away when repeated; "
            f"replace the device; {advice}"
        )
        error.shared = True
        return error


def held_part(tensor: Tensor, engine: Engine) -> tuple[str, int]:
    """The part of a tensor that this rank holds, in words, and the number of ranks that hold this part. Ranks
    that hold the same part get the same words."""
    stages, stage = engine.place.sizes.pp, engine.place.pp
    mesh: Any = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return f"stage {stage}", engine.world_size // stages
    sharded: Any = tensor
    dims = [dim for dim in range(mesh.ndim) if dim not in replicate_dims(sharded)]
    place = [mesh.get_coordinate()[dim] for dim in dims]
    sizes = [mesh.size(dim) for dim in dims]
    layout = f"{mesh.mesh_dim_names} {sharded.placements}"
    holders = engine.world_size // (stages * math.prod(sizes))
    return f"stage {stage}, {place} of {sizes}, {layout}", holders


@contextmanager
def observed(model: nn.Module, computation: Computation) -> Iterator[None]:
    """Inside the block, add to `computation` the layers' outputs, and gradients before ranks add them.

    FSDP gathers sharded parameters when a module begins its forward pass, so hooks are set on them then. With
    compiled layers, modules get no hooks, since torch would compile these too.
    """
    handles: list[Any] = []
    layers = {name: module for name, module in model.named_modules() if isinstance(module, DecoderLayer)}
    count = len(list(model.get_submodule("model.layers").children()))  # of all stages, to compare moments
    seen: set[int] = set()

    def backward(name: str, part: int) -> Moment:
        found = re.search(r"\blayers\.(\d+)", name)
        if found:
            return Moment(BACKWARD, count - int(found[1]), part)
        return Moment(BACKWARD, count + 1 if "embed_tokens" in name else 0, part)

    def watch(name: str, parameter: Tensor) -> None:
        if parameter.requires_grad and id(parameter) not in seen:
            seen.add(id(parameter))
            moment = backward(name, 1)
            note = f"gradient of {name}"
            handles.append(parameter.register_hook(lambda gradient: computation.add(moment, note, gradient)))

    def gathered(prefix: str) -> Callable[..., None]:
        def hook(module: nn.Module, *_: Any) -> None:
            for name, parameter in module.named_parameters(prefix):
                watch(name, parameter)

        return hook

    def outputs(name: str) -> Callable[..., None]:
        layer = int(name.rpartition(".")[2])

        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            hidden = output[0]
            computation.add(Moment(FORWARD, layer), f"output of {name}", hidden)
            if hidden.requires_grad:
                moment, note = backward(name, 0), f"gradient of the output of {name}"
                hidden.register_hook(lambda gradient: computation.add(moment, note, gradient))

        return hook

    is_compiled = any(module._compiled_call_impl is not None for module in layers.values())
    is_sharded = any(hasattr(parameter, "device_mesh") for parameter in model.parameters())
    for name, parameter in () if is_sharded else model.named_parameters():
        watch(name, parameter)
    if not is_compiled:
        for name, module in layers.items():
            handles.append(module.register_forward_hook(outputs(name)))
        for name, module in model.named_modules() if is_sharded else ():
            if any(True for _ in module.parameters()):
                handles.append(module.register_forward_pre_hook(gathered(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
