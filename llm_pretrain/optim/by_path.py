"""Optimizers of other packages: classes with torch's interface, by their import paths."""

from __future__ import annotations

from copy import deepcopy
from importlib import import_module
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from llm_pretrain.config.tree import OptimizerConfig
from llm_pretrain.errors import ConfigError
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.optim.param_groups import parameter_groups
from llm_pretrain.text import type_and_reason


def build(model: Decoder, config: OptimizerConfig, precision: str) -> Optimizer:
    """The named class over all parameters, in AdamW's groups; arguments are those of `build_optimizer`."""
    return _construct(config, parameter_groups(model, config))


def imported(path: str) -> type[Optimizer]:
    """The class at an import path such as `my_package.Lion`.

    Raises:
        ConfigError: it cannot be imported, or is no optimizer.
    """
    module, _, name = path.rpartition(".")
    try:
        found = getattr(import_module(module), name)
    except Exception as error:
        raise _error(
            "name", "a class that can be imported (installed, or in PYTHONPATH)", path, error
        ) from error
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise _error("name", "a subclass of torch.optim.Optimizer", path)
    return found


def _construct(config: OptimizerConfig, groups: list[dict[str, Any]]) -> Optimizer:
    found, options, decay = imported(config.name), config.options, config.weight_decay
    # groups set it too; this makes a class without weight decay, or an option `weight_decay`, an error
    decays = {"weight_decay": decay} if decay or "weight_decay" in options else {}
    try:
        return found(groups, lr=config.learning_rate, **decays, **options)  # type: ignore[call-arg]  # its own
    except Exception as error:
        expected = f"what {config.name} takes besides lr and weight_decay"
        raise _error("options", expected, f"{options} with weight_decay {decay}", error) from error


def measured_moments(config: OptimizerConfig) -> float:
    """Number of fp32 values that the class keeps for each element of a matrix, from a trial.

    Raises:
        ConfigError: the class cannot be built or cannot step, keeps tensors of other shapes, or would train
            differently after a resume, because a checkpoint does not hold all of its state.
    """
    straight, stopped = _Trial(config), _Trial(config)
    matrix = straight.parameters[0]
    try:
        straight.take_steps(range(3))
        stopped.take_steps(range(1))
        stopped.load(straight)
        straight.take_steps(range(3, 15))
        stopped.take_steps(range(3, 15))
        state = {key: torch.as_tensor(value) for key, value in straight.optimizer.state[matrix].items()}
    except Exception as error:
        expected = "a class whose step() needs no argument and runs on a CPU too"
        raise _error("name", expected, config.name, error) from error
    kept = [value for value in state.values() if value.dim()]
    if any(value.shape != matrix.shape for value in kept):
        raise _error("name", "a class with numbers and tensors of a parameter's shape as state", config.name)
    if not all(map(torch.equal, straight.parameters, stopped.parameters)):
        raise _error(
            "name", "a class whose steps follow from its `state`, which checkpoints hold", config.name
        )
    return sum(value.nbytes for value in kept) / (4 * matrix.numel())


class _Trial:
    """The class over small parameters that replace the ones it was built with, as in a run."""

    def __init__(self, config: OptimizerConfig):
        self.parameters = [Parameter(torch.ones(shape)) for shape in ((4, 6), (2, 4, 6), (6,))]
        groups = [{"params": [Parameter(each.detach().to("meta"))]} for each in self.parameters]
        self.optimizer = _construct(config, groups)
        for group, parameter in zip(self.optimizer.param_groups, self.parameters, strict=True):
            group["params"] = [parameter]

    def take_steps(self, numbers: range) -> None:
        """Take steps with gradients that depend only on the number of the step."""
        for number in numbers:
            generator = torch.Generator().manual_seed(number)
            for parameter in self.parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            self.optimizer.step()

    @torch.no_grad()
    def load(self, other: _Trial) -> None:
        """Copy from `other` what a checkpoint holds."""
        for parameter, value in zip(self.parameters, other.parameters, strict=True):
            parameter.copy_(value)
        state = deepcopy(other.optimizer.state_dict()["state"])
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": state})


def _error(setting: str, expected: str, found: str, error: Exception | None = None) -> ConfigError:
    said = f": {type_and_reason(error)}" if error else ""
    return ConfigError(f"optimizer.{setting}: expected {expected}, found {found}{said}")
