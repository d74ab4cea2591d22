"""What a checkpoint holds: every tensor under one flat name, every scalar as JSON, and the way back.

Knows nothing of files. Parameters and buffers keep their own names, optimizer state is called
`optimizer.state.PARAMETER.KEY`. Tensors without dimensions (AdamW's `step`) and plain numbers are
scalars: Python's JSON carries both exactly, whatever a version of the tensor format makes of an empty
shape, and nothing is left that would have to be pickled.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from llm_pretrain.errors import CheckpointError

_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable", "maximize"}


@dataclass
class TrainingState:
    """Live views of a model's and an optimizer's state: writing into them writes into the training.

    Args:
        model: Full state dict of the model, both names of a tied parameter included.
        optimizer: State dict of the optimizer by parameter name; None while it has no state.
        tensors: Flat name → tensor with at least one dimension; tied parameters once.
        tied: Second name → first name of tied parameters.
    """

    model: dict[str, Any]
    optimizer: dict[str, Any] | None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    places: dict[str, tuple[dict[str, Any], str]] = field(default_factory=dict)

    @property
    def scalars(self) -> dict[str, dict[str, Any]]:
        """Flat name → `{"dtype", "value"}` of every scalar."""
        return {name: _encode(container[key]) for name, (container, key) in self.places.items()}

    def set_scalar(self, name: str, value: Any) -> None:
        """Write a value that was read from `scalars` back to its place, exactly."""
        container, key = self.places[name]
        if isinstance(container[key], Tensor):
            container[key].fill_(value)
        else:
            container[key] = value

    def describe_tensors(self) -> dict[str, dict[str, Any]]:
        """Flat name → `{"dtype", "shape"}`, the shapes those of the whole tensors."""
        return {
            name: {"dtype": _dtype_name(tensor), "shape": list(tensor.shape)}
            for name, tensor in self.tensors.items()
        }


def raw_module(model: nn.Module) -> nn.Module:
    """The module inside DDP and `torch.compile`, whose parameters have their plain names.

    A wrapper has one child, called `module` or `_orig_mod`, and no parameters of its own.
    """
    while True:
        children = dict(model.named_children())
        inner = children.get("module", children.get("_orig_mod"))
        if inner is None or len(children) > 1 or any(True for _ in model.parameters(recurse=False)):
            return model
        model = inner


def whole_state(
    model: nn.Module, *, keep: bool, copy: bool = False, instead: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The model's state dict without a sharded tensor in it; collective where it has any.

    Gathered tensor by tensor, so that a device holds one of them whole at a time, and kept in the memory of
    the processor where `keep` says so, of one rank for example. What is not sharded is copied where `copy`
    says so, else live. A name in `instead` (`averages`) has that tensor.

    Returns:
        Empty where not kept.
    """
    state = {}
    for name, own in raw_module(model).state_dict().items():
        tensor: Any = instead.get(name, own) if instead else own
        gather = getattr(tensor, "full_tensor", None)
        whole = gather() if gather else tensor
        if keep:
            state[name] = whole.cpu() if gather else whole.clone() if copy else whole
    return state


def collect_state(model: nn.Module, optimizer: Optimizer) -> TrainingState:
    """State to save. An optimizer that has not stepped yet is left as it is.

    (`get_state_dict` would make it step once to create its state, and count that step.)

    Raises:
        CheckpointError: a parameter is in half precision, or the optimizer keeps what cannot be saved.
    """
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
    """State to load into, after which only `apply_state` is left to do.

    The optimizer's is created first: what has no place to go would be dropped without a word. Parameters
    in `without_state` had none when the checkpoint was saved, and have none here.
    """
    optimizer.state.clear()
    optimizer.zero_grad(set_to_none=True)  # pending gradients would keep the state from being created
    names = _names_in(model, optimizer)
    if set(names.values()) <= set(without_state):
        return _flatten(model, get_model_state_dict(model), None)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    for parameter, name in names.items():
        if name in without_state:
            optimizer.state.pop(parameter, None)
            optimizer_state["state"].pop(name, None)  # type: ignore[union-attr]  # torch types it as anything
    return _flatten(model, model_state, optimizer_state)


def apply_state(model: nn.Module, optimizer: Optimizer, state: TrainingState) -> None:
    """Hand filled targets to the model and the optimizer; every parameter must be there."""
    set_model_state_dict(model, state.model, options=StateDictOptions(strict=True))
    if state.optimizer is not None:
        # A parameter without state is no error here: `state_differences` has compared the names.
        set_optimizer_state_dict(model, optimizer, state.optimizer, options=StateDictOptions(strict=False))


def describe_optimizer(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's class, its groups with every scalar, and the parameters that have no state."""
    names = _names_in(model, optimizer)
    groups = []
    for group in optimizer.param_groups:
        scalars = {key: _plain(f"param_groups.{key}", group[key]) for key in group if key != "params"}
        groups.append({"params": [names[parameter] for parameter in group["params"]], **scalars})
    stateless = [name for parameter, name in names.items() if not optimizer.state.get(parameter)]
    return {"class": type(optimizer).__name__, "groups": groups, "without_state": stateless}


def restore_groups(model: nn.Module, optimizer: Optimizer, saved: dict[str, Any]) -> list[str]:
    """Bring back what an optimizer keeps in its groups; returns warnings.

    Hyper-parameters are the configuration's to decide: a changed one takes effect and is reported.
    The learning rate and everything the optimizer was not constructed with are state, and restored.
    """
    groups = describe_optimizer(model, optimizer)["groups"]
    if [group["params"] for group in groups] != [group["params"] for group in saved["groups"]]:
        return ["the optimizer's groups are others than the checkpoint's: the new settings are used"]
    warnings = []
    for group, now, then in zip(optimizer.param_groups, groups, saved["groups"], strict=True):
        for key, value in then.items():
            if key == "params" or key in _IMPLEMENTATION or now.get(key) == value:
                continue
            if key == "lr" or key not in optimizer.defaults:
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = value
            else:
                warnings.append(
                    f"optimizer {key} was {value} when the checkpoint was saved and is {now.get(key)} now: "
                    "the new value is used"
                )
    return list(dict.fromkeys(warnings))


def scaler_state(scaler: Any) -> dict[str, Any] | None:
    """State of an enabled gradient scaler; None without one (a disabled one has nothing to say)."""
    return dict(scaler.state_dict()) if _is_enabled(scaler) else None


def restore_scaler(scaler: Any, saved: dict[str, Any] | None) -> list[str]:
    """Load a scaler's state where both sides have one; returns warnings where only one has."""
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
            _place(state, f"optimizer.state.{parameter}.{key}", entries, key)
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


def _encode(value: Any) -> dict[str, Any]:
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
