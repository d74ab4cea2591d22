"""Gets and sets the state that a checkpoint holds: tensors under flat names, and scalars as JSON.

Parameters and buffers keep their own names; optimizer state is named `optimizer.state.PARAMETER.KEY`.
0-dimensional tensors (AdamW's `step`) and plain numbers become JSON scalars, which represent both exactly:
tensor formats differ in how they treat empty shapes.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from llm_pretrain.checkpoints.manifest import (
    OPTIMIZER_STATE,
    Manifest,
    OptimizerEntry,
    ScalarEntry,
    ScalerEntry,
    TensorEntry,
)
from llm_pretrain.distributed.initial_values import local_part
from llm_pretrain.errors import CheckpointError
from llm_pretrain.optim.ema import AVERAGE, DECAY
from llm_pretrain.optim.param_groups import as_sharded, replicate_dims

if TYPE_CHECKING:
    from llm_pretrain.distributed.pipeline import Pipeline

_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable", "maximize"}


@dataclass
class TrainingState:
    """State of a model and an optimizer; the tensors share memory with model and optimizer.

    Args:
        model: State dict of the model, with both names of a tied parameter.
        optimizer: State dict of the optimizer by parameter name; None if the optimizer has no state yet.
        tensors: Flat name → tensor with at least one dimension; a tied parameter has its first name only.
        tied: Second name → first name of tied parameters.
        places: Flat name of a scalar → the dictionary that holds it, and its key there.
    """

    model: dict[str, Any]
    optimizer: dict[str, Any] | None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    places: dict[str, tuple[dict[str, Any], str]] = field(default_factory=dict)

    @property
    def scalars(self) -> dict[str, ScalarEntry]:
        """Every scalar by its flat name."""
        return {name: _encode(container[key]) for name, (container, key) in self.places.items()}


def assign(container: dict[str, Any], key: str, value: Any) -> None:
    """Set a scalar in a state dict or an optimizer's group; a tensor is filled in place."""
    if isinstance(container.get(key), Tensor):
        container[key].fill_(value)
    else:
        container[key] = value


def describe_tensors(tensors: Mapping[str, Tensor]) -> dict[str, TensorEntry]:
    """Type and shape of each tensor, as in a manifest; a sharded tensor has its global shape."""
    return {
        name: {"dtype": _dtype_name(tensor), "shape": list(tensor.shape)} for name, tensor in tensors.items()
    }


def meta_tensors(described: Mapping[str, TensorEntry]) -> dict[str, Tensor]:
    """Tensors on the meta device, with the described types and shapes."""
    return {
        name: torch.empty(each["shape"], dtype=getattr(torch, each["dtype"]), device="meta")
        for name, each in described.items()
    }


def raw_module(model: nn.Module) -> nn.Module:
    """The module inside DDP and `torch.compile`: its parameters have names without a wrapper's prefix.

    A wrapper has no direct parameters, and its only child is called `module` or `_orig_mod`.
    """
    while True:
        children = dict(model.named_children())
        inner = children.get("module", children.get("_orig_mod"))
        if inner is None or len(children) > 1 or any(True for _ in model.parameters(recurse=False)):
            return model
        model = inner


def collect_state(model: nn.Module, optimizer: Optimizer) -> TrainingState:
    """Collect the state to save.

    `get_state_dict` is not called if the optimizer has no state: it would take a step to create the state,
    and that step would be counted.

    Raises:
        CheckpointError: a parameter is in half precision, or optimizer state has an unsupported type.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict  # takes a second

    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype.itemsize < 4:
            raise CheckpointError(
                f"{name}: expected a parameter in float32, found {_dtype_name(parameter)}; "
                "resume state is saved in full precision only (training.precision sets the autocast type)"
            )
    if optimizer.state:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return _flatten(model, model_state, optimizer_state)
    return _flatten(model, get_model_state_dict(model), None)


def collect_targets(model: nn.Module, optimizer: Optimizer, without_state: list[str]) -> TrainingState:
    """Collect the state to load into: fill its tensors and scalars, then call `apply_state`.

    The function first creates the optimizer's state, because torch silently drops entries without a target.
    Parameters in `without_state` had no state when the checkpoint was saved, and get none here.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict

    optimizer.state.clear()
    optimizer.zero_grad(set_to_none=True)  # with pending gradients torch would not create the state
    names = _names_in(model, optimizer)
    if set(names.values()) <= set(without_state):
        return _flatten(model, get_model_state_dict(model), None)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    for parameter, name in names.items():
        if name in without_state:
            optimizer.state.pop(parameter, None)
            optimizer_state["state"].pop(name, None)  # type: ignore[union-attr]  # torch types it as anything
    return _flatten(model, model_state, optimizer_state)


def match_average(content: Manifest, target: TrainingState, optimizer: Optimizer) -> None:
    """Leave out the parameters' average (EMA), in place, if only one of checkpoint and optimizer has it."""
    groups, states = content.optimizer["groups"], (target.optimizer or {"state": {}})["state"]
    if any(DECAY in group for group in groups) == (DECAY in optimizer.defaults):
        return
    for entries in (content.tensors, target.tensors, *groups, *states.values(), *optimizer.state.values()):
        for name in [key for key in entries if key == DECAY or f".{key}".endswith(f".{AVERAGE}")]:
            del entries[name]


def apply_state(model: nn.Module, optimizer: Optimizer, state: TrainingState) -> None:
    """Load the filled state into the model and the optimizer; every parameter must be present."""
    from torch.distributed.checkpoint import state_dict

    options = state_dict.StateDictOptions
    state_dict.set_model_state_dict(model, state.model, options=options(strict=True))
    if state.optimizer is not None:
        # strict=False allows parameters without state; `state_differences` has compared the names.
        own = options(strict=False)
        empty = [(group, dict(group)) for group in optimizer.param_groups if not group["params"]]
        state_dict.set_optimizer_state_dict(model, optimizer, state.optimizer, options=own)
        for group, settings in empty:  # torch drops the settings of a group without parameters
            group.update(settings)


def describe_optimizer(model: nn.Module, optimizer: Optimizer) -> OptimizerEntry:
    """The optimizer's class, its groups with all scalars, and the parameters without state."""
    names = _names_in(model, optimizer)
    groups = []
    for group in optimizer.param_groups:
        scalars = {key: _plain(f"param_groups.{key}", group[key]) for key in group if key != "params"}
        groups.append({"params": [names[parameter] for parameter in group["params"]], **scalars})
    stateless = [name for parameter, name in names.items() if not optimizer.state.get(parameter)]
    return {"class": type(optimizer).__name__, "groups": groups, "without_state": stateless}


def restore_groups(model: nn.Module, optimizer: Optimizer, saved: OptimizerEntry) -> list[str]:
    """Restore the state that an optimizer keeps in its groups; returns warnings.

    The learning rate, and keys that are no arguments of the constructor, are state and are restored. Other
    hyperparameters follow the configuration: a changed one takes effect, with a warning.
    """
    groups = describe_optimizer(model, optimizer)["groups"]
    own = dict(model.named_parameters())  # in a pipeline, the parameters of this rank's stages
    saved_names = [[name for name in group["params"] if name in own] for group in saved["groups"]]
    if [group["params"] for group in groups] != saved_names:
        return ["the optimizer's groups differ from the checkpoint's: the new settings are used"]
    warnings = []
    for group, now, then in zip(optimizer.param_groups, groups, saved["groups"], strict=True):
        for key, value in then.items():
            if key == "params" or key in _IMPLEMENTATION or now.get(key) == value:
                continue
            if key == "lr" or key not in optimizer.defaults:
                assign(group, key, value)
            else:
                warnings.append(
                    f"optimizer {key} was {value} when the checkpoint was saved and is {now.get(key)} now: "
                    "the new value is used"
                )
    return list(dict.fromkeys(warnings))


def scaler_state(scaler: Any) -> ScalerEntry | None:
    """State of the gradient scaler; None if there is none or it is disabled."""
    return scaler.state_dict() if _is_enabled(scaler) else None


def restore_scaler(scaler: Any, saved: ScalerEntry | None) -> list[str]:
    """Load a scaler's state; returns a warning if only the checkpoint or only this run has a scaler."""
    if saved is not None and _is_enabled(scaler):
        scaler.load_state_dict(saved)
    elif saved is not None:
        return [
            f"the checkpoint's loss scale {saved['scale']:g} is not used: there is no gradient scaler now"
        ]
    elif _is_enabled(scaler):
        return [f"the checkpoint has no loss scale: it starts at {scaler.get_scale():g}"]
    return []


def _is_enabled(scaler: Any) -> bool:
    return scaler is not None and scaler.is_enabled()


def _flatten(
    model: nn.Module, model_state: dict[str, Any], optimizer_state: dict[str, Any] | None
) -> TrainingState:
    state = TrainingState(model_state, optimizer_state, tied=_tied_names(model, model_state))
    for name in model_state:
        if name not in state.tied:
            _place(state, name, model_state, name)
    for parameter, entries in (optimizer_state or {"state": {}})["state"].items():
        for key in entries:
            _place(state, f"{OPTIMIZER_STATE}{parameter}.{key}", entries, key)
    return state


def _place(state: TrainingState, name: str, container: dict[str, Any], key: str) -> None:
    value = container[key]
    if isinstance(value, Tensor) and value.dim() > 0:
        state.tensors[name] = value
    elif isinstance(value, Tensor | bool | int | float):
        state.places[name] = (container, key)
    else:
        raise CheckpointError(f"{name}: expected a tensor or a number, found {type(value).__name__}")


def _tied_names(model: nn.Module, saved: Collection[str]) -> dict[str, str]:
    first: dict[int, str] = {}
    tied = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            if name in saved and first.setdefault(id(tensor), name) != name:
                tied[name] = first[id(tensor)]
    return tied


def _names_in(model: nn.Module, optimizer: Optimizer) -> dict[Tensor, str]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {parameter: names[parameter] for group in optimizer.param_groups for parameter in group["params"]}


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _encode(value: Any) -> ScalarEntry:
    if isinstance(value, Tensor):
        return {"dtype": _dtype_name(value), "value": value.item()}
    return {"dtype": type(value).__name__, "value": value}


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(name, item) for item in value]
    if isinstance(value, Tensor) and value.dim() == 0:
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(f"optimizer {name}: expected a number or text, found {type(value).__name__}")


@dataclass(frozen=True)
class Piece:
    """A tensor, or a part of one.

    Args:
        name: Name of the whole tensor.
        tensor: The part, on any device; it shares memory with the training state unless it is a copy.
        offsets: Start of the part within the whole tensor, for each dimension.
    """

    name: str
    tensor: Tensor
    offsets: tuple[int, ...]

    def corners(self) -> int:
        """A signed sum of 64-bit hashes of the part's corners, modulo 2^64.

        The sums of all pieces add up to the sum of the whole tensor only if the pieces have its type and each
        element once: corners inside the tensor then cancel.
        """
        edges = [((at, -1), (at + size, 1)) for at, size in zip(self.offsets, self.tensor.shape, strict=True)]
        total = 0
        for corner in itertools.product(*edges):
            text = f"{self.name}/{self.tensor.dtype}/{[at for at, _ in corner]}"
            sign = math.prod(sign for _, sign in corner)
            total += sign * int.from_bytes(sha256(text.encode()).digest()[:8], "little")
        return total % (1 << 64)


def own_pieces(tensors: dict[str, Tensor], *, rank: int, world_size: int) -> list[Piece]:
    """The pieces that `rank` writes, so that all ranks together write every element once.

    Whole tensors are distributed over ranks, balanced by size. Each rank writes its part of a sharded tensor;
    if several ranks hold equal parts, those are distributed over the ranks. All holders of a part compute the
    same writer without a collective.
    """
    pieces, of_whole, of_parts = [], [0] * world_size, [0] * world_size
    for name, tensor in tensors.items():
        part, offsets = local_part(tensor)
        if (sharded := as_sharded(tensor)) is not None:
            (holder, holders), loads = _replica(sharded), of_parts
        else:
            holder, holders, loads = rank, world_size, of_whole
        writer = min(range(holders), key=loads.__getitem__)
        loads[writer] += part.nbytes
        if writer == holder and (part.numel() or not tensor.numel()):
            pieces.append(Piece(name, part, offsets))
    return pieces


def held_pieces(
    tensors: dict[str, Tensor], *, rank: int, world_size: int, pipeline: Pipeline | None = None
) -> list[Piece]:
    """`own_pieces`, where the ranks of one pipeline stage share the stage's tensors."""
    if pipeline is not None:
        tensors = {name: tensor for name, tensor in tensors.items() if not pipeline.is_tied_copy(name)}
        holders = world_size // pipeline.size
        rank, world_size = rank % holders, holders
    return own_pieces(tensors, rank=rank, world_size=world_size)


def _replica(sharded: Any) -> tuple[int, int]:
    """Index of this rank among the ranks that hold equal parts of a sharded tensor, and their number."""
    mesh, number, count = sharded.device_mesh, 0, 1
    for dim in replicate_dims(sharded):
        number = number * mesh.size(dim) + mesh.get_local_rank(dim)
        count *= mesh.size(dim)
    return number, count


class HostBuffers:
    """Copies pieces to the CPU, into buffers that the next copy reuses; for CUDA tensors they are pinned.

    The next copy overwrites a copy, so the copy must be written to disk by then. Pieces share buffers of
    `BUFFER_BYTES`, since torch rounds the size of a pinned buffer up to a power of two. All processes of a
    machine together pin at most half of its memory; further buffers are not pinned, and slower.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._layout: object = None
        self._places: list[Tensor] = []

    def pieces(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Copy the tensors of pieces to the CPU; returns pieces with the copies."""
        pieces = list(pieces)
        layout = [(each.name, each.offsets, each.tensor.shape, each.tensor.dtype) for each in pieces]
        if layout != self._layout:
            self._allocate(pieces)
            self._layout = layout
        copies = [
            replace(piece, tensor=place.copy_(piece.tensor.detach(), non_blocking=True))
            for piece, place in zip(pieces, self._places, strict=True)
        ]
        if any(piece.tensor.is_cuda for piece in pieces):
            torch.cuda.synchronize()  # the copies are asynchronous
        return copies

    def _allocate(self, pieces: list[Piece]) -> None:
        """Give every piece a place in a buffer."""
        self._buffers, self._places = [], []
        sizes = [max(64, -(-piece.tensor.nbytes // 64) * 64) for piece in pieces]  # aligned
        may_pin = 0
        if any(piece.tensor.is_cuda for piece in pieces):
            processes = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
            may_pin = psutil.virtual_memory().total // 2 // processes
        left, used = sum(sizes), 0
        for piece, size in zip(pieces, sizes, strict=True):
            if not self._buffers or used + size > self._buffers[-1].nbytes:
                room = max(size, min(left, BUFFER_BYTES))
                pinned = 1 << (room - 1).bit_length()
                self._buffers.append(torch.empty(room, dtype=torch.uint8, pin_memory=pinned <= may_pin))
                may_pin -= pinned
                used = 0
            place = self._buffers[-1][used : used + piece.tensor.nbytes].view(piece.tensor.dtype)
            self._places.append(place.view(piece.tensor.shape))
            used, left = used + size, left - size


BUFFER_BYTES = 1 << 30
