"""Runs whose memory or arithmetic changes on one rank, and sound ones with and without checks of their steps.

`rank_cases.py` runs those of `TWO` in two processes and those of `FOUR` in four.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from support.faults import Fault, Patch
from support.rank_cases import Case

from llm_pretrain.optim.param_groups import to_local
from llm_pretrain.training import trainer

Changes = dict[str, dict[str, Any]]

RANK = 1
"""Where the fault is; 0 in a single process."""
ALWAYS = 1 << 30
MATRIX = "model.layers.0.self_attn.q_proj.weight"
EXPERTS = "model.layers.1.mlp.experts.down_proj"


def flip(tensor: torch.Tensor, bit: int) -> None:
    """Flip one bit of the first number, fp32, that this rank has of a tensor."""
    to_local(tensor).detach().view(-1).view(torch.int32)[0] ^= 1 << bit


def before_step(number: int, act: Callable[[Any], None]) -> Fault:
    """The fault of `act(engine)` on one rank before a step."""

    def fault(patch: Patch, engine: type) -> None:
        step = trainer.Trainer._step

        def stepped(self: Any, micro_batches: Any) -> None:
            if self.progress.step + 1 == number and self.engine.rank == min(RANK, self.engine.world_size - 1):
                act(self.engine)
            step(self, micro_batches)

        patch.setattr(trainer.Trainer, "_step", stepped)

    return fault


def flips(times: int) -> Callable[[torch.Tensor], None]:
    """Flip another bit of a tensor in each of so many calls."""
    calls = itertools.count()

    def act(tensor: torch.Tensor) -> None:
        if (call := next(calls)) < times:
            flip(tensor, 20 - call % 13)

    return act


def on_gradient(act: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A hook that changes a copy of a gradient."""

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        act(gradient)
        return gradient

    return hook


def _after_last_layer(step: int, new_act: Callable[[], Callable[[torch.Tensor], object]]) -> Fault:
    def watch(engine: Any) -> None:
        act = new_act()  # counts its calls: one for each run
        layer = engine.model_and_optimizer()[0].model.layers[1]
        layer.register_forward_hook(lambda module, inputs, output: act(output[0]) and None)

    return before_step(step, watch)


def activation(step: int, times: int) -> Fault:
    """Another bit of the last layer's output flips in each of so many forward passes."""
    return _after_last_layer(step, lambda: flips(times))


def output_gradient(step: int, times: int) -> Fault:
    """The same of the gradient of that output, in backward passes."""

    def new_act() -> Callable[[torch.Tensor], object]:
        flipped = on_gradient(flips(times))
        return lambda output: output.register_hook(flipped)

    return _after_last_layer(step, new_act)


def gradient(step: int, times: int) -> Fault:
    """Another bit of a matrix's gradient flips in each of so many backward passes."""

    def act(engine: Any) -> None:
        flipped, seen = on_gradient(flips(times)), set()

        def watch(module: Any, *_: Any) -> None:
            weight = module.self_attn.q_proj.weight  # while FSDP has gathered it, another object
            if id(weight) not in seen:
                seen.add(id(weight))
                weight.register_hook(flipped)

        layer = engine.model_and_optimizer()[0].model.layers[0]
        watch(layer)
        layer.register_forward_pre_hook(watch)

    return before_step(step, act)


def parameter(step: int, name: str = MATRIX) -> Fault:
    """A bit of a parameter flips in memory."""
    return before_step(step, lambda engine: flip(_named(engine, name), 20))


def moment(step: int, name: str = MATRIX) -> Fault:
    """A bit of an optimizer's moment flips in memory."""

    def act(engine: Any) -> None:
        flip(engine.model_and_optimizer()[1].state[_named(engine, name)]["exp_avg"], 20)

    return before_step(step, act)


def _named(engine: Any, name: str) -> torch.Tensor:
    return dict(engine.model_and_optimizer()[0].named_parameters())[name]


def checked(every: int, **changes: dict[str, Any]) -> Changes:
    """The changes of a configuration, with a check of every `every`-th of four steps."""
    training = {"max_steps": 4, "check_every": every, "global_batch_size": 8, "precision": "fp32"}
    return changes | {"training": training | changes.get("training", {})}


FSDP = {"distributed": {"strategy": "fsdp"}}
HSDP = {"distributed": {"strategy": "fsdp", "dp_replicate_size": 2}}
EP_HSDP = {"distributed": {"strategy": "fsdp", "dp_replicate_size": 2, "ep_size": 2}}

SOUND_FOUR: dict[str, Changes] = {
    "ep hsdp": EP_HSDP,
    "tp": {"distributed": {"strategy": "fsdp", "tp_size": 2}},
    "cp": {"distributed": {"strategy": "fsdp", "cp_size": 2}},
}
SOUND: dict[str, Changes] = {
    "ddp": {"model": {"router_bias_update_rate": 0.125, "hidden_dropout": 0.1}},
    "ddp bf16": {"training": {"precision": "bf16"}, "model": {"router_aux_loss_scope": "global_batch"}},
    "fsdp": FSDP | {"model": {"router_bias_update_rate": 0.125}},
    "fsdp bf16": FSDP | {"training": {"precision": "bf16", "activation_checkpointing": True}},
    "muon, average": {"optimizer": {"name": "muon", "ema_decay": 0.9}},
}
"""Both launchers take these steps with every step checked, and with none."""
SOUND_TORCHRUN: dict[str, Changes] = {
    "ddp fp16": {"training": {"precision": "fp16"}},
    "pipeline": {"distributed": {"strategy": "fsdp", "pp_size": 2}},
}
FLIPS: dict[str, Fault] = {
    "activation": activation(3, ALWAYS),
    "gradient": gradient(3, ALWAYS),
    "parameter": parameter(3),
    "moment": moment(4),
    "activation once": activation(4, 1),
    "gradient once": gradient(4, 1),
}
"""Every second step is checked, so the fourth finds them."""


TWO: dict[str, Case] = {
    f"torchrun pipeline, {kind}": Case("torchrun", (fault,), checked(2, **SOUND_TORCHRUN["pipeline"]))
    for kind, fault in (
        ("activation", FLIPS["activation"]),
        ("output gradient", output_gradient(3, ALWAYS)),
    )
}
FOUR: dict[str, Case] = {}
for path in ("torchrun", "accelerate"):
    for kind, changes in (SOUND | (SOUND_TORCHRUN if path == "torchrun" else {})).items():
        for every in (0, 1):
            TWO[f"{path} {kind}, {every}"] = Case(path, changes=checked(every, **changes))
    for kind, fault in FLIPS.items():
        TWO[f"{path} ddp, {kind}"] = Case(path, (fault,), checked(2))
        if kind not in ("parameter", "moment"):  # FSDP's parts are held once
            TWO[f"{path} fsdp, {kind}"] = Case(path, (fault,), checked(2, **FSDP))
    FOUR[f"{path} ddp, parameter"] = Case(path, (parameter(3),), checked(2))
    FOUR[f"{path} ddp, moment"] = Case(path, (moment(4),), checked(2))
    for kind, fault in FLIPS.items():
        FOUR[f"{path} hsdp, {kind}"] = Case(path, (fault,), checked(2, **HSDP))
    FOUR[f"{path} ep hsdp, parameter"] = Case(path, (parameter(3, EXPERTS),), checked(2, **EP_HSDP))
    FOUR[f"{path} ep hsdp, moment"] = Case(path, (moment(4, EXPERTS),), checked(2, **EP_HSDP))
    for kind, changes in SOUND_FOUR.items():
        for flipped in ("activation", "gradient"):
            FOUR[f"{path} {kind}, {flipped}"] = Case(path, (FLIPS[flipped],), checked(2, **changes))
        for every in (0, 1):
            FOUR[f"{path} {kind}, {every}"] = Case(path, changes=checked(every, **changes))

CASES = TWO | FOUR
