"""Optimizers keep what they declare, nobody asks for their names, and a class by its path trains as ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.engines import run_engine, small_config
from support.launching import (
    ROOT,
    Finished,
    assert_same_tensors,
    checkpoint_tensors,
    launch,
    tiny_options,
    train,
)
from support.lion import Lion
from torch.nn import Parameter

from llm_pretrain.config.loading import load_config
from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.config.optimizers import OPTIMIZERS
from llm_pretrain.config.tree import Config, OptimizerConfig
from llm_pretrain.errors import ConfigError
from llm_pretrain.memory import estimate_memory
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.optim.build import build_optimizer, moments
from llm_pretrain.optim.param_groups import parameter_role
from llm_pretrain.training.decision import decides_on_device

LION = "support.lion.Lion"
NAMED_IN = ("config/optimizers.py", "config/tree.py", "optim/")
"""Where an optimizer's name may stand: its declaration, the default, its own file."""


@pytest.mark.parametrize("name", [*OPTIMIZERS, LION])
def test_an_optimizer_keeps_what_it_declares(name: str):
    model = Decoder(
        ModelConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, num_experts=2, num_experts_per_tok=1,
        )
    )  # fmt: skip
    config = OptimizerConfig(name=name)
    optimizer = build_optimizer(model, config)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for where, parameter in model.named_parameters():
        kept = [value for value in optimizer.state[parameter].values() if value.dim()]
        assert {value.shape for value in kept} == {parameter.shape}
        assert len(kept) == moments(config, parameter_role(where, parameter)), where


def test_nothing_else_asks_for_an_optimizer_s_name():
    for path in sorted((ROOT / "llm_pretrain").rglob("*.py")):
        if not path.relative_to(ROOT / "llm_pretrain").as_posix().startswith(NAMED_IN):
            text = path.read_text(encoding="utf-8")
            assert not [name for name in OPTIMIZERS if f'"{name}"' in text], path


def options(store: Path, folder: Path, *more: str, name: str = LION) -> list[str]:
    return [
        *(*tiny_options(store, folder), "--optimizer.name", name, "--schedule.name", "constant"),
        *("--schedule.warmup_steps", "2", "--checkpoint.save_steps", "2", "--evaluation.eval_steps", "2"),
        *("--evaluation.max_batches", "1", "--logging.logging_steps", "1", "--training.max_steps", "4"),
        *more,
    ]


@pytest.fixture(scope="module")
def straight(plain_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("straight") / "run"
    assert train(*options(plain_store, folder)) == 0
    return Finished(0, "", folder)


def test_changed_options_take_effect_and_another_class_is_refused(
    straight: Finished, plain_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "run"
    assert train(*options(plain_store, folder, "--training.max_steps", "2")) == 0
    assert train(*options(plain_store, folder, name="torch.optim.NAdam")) == 78
    assert (
        "optimizer.name is support.lion.Lion in the checkpoint, torch.optim.NAdam here"
        in capsys.readouterr().err
    )
    assert train(*options(plain_store, folder, "--optimizer.options", "{betas: [0.5, 0.5]}")) == 0
    assert "optimizer betas was [0.9, 0.99] when the checkpoint was saved" in capsys.readouterr().err
    assert Finished(0, "", folder).rows[4]["train/loss"] != straight.rows[4]["train/loss"]


def test_torch_s_adamw_by_its_path_is_ours(plain_store: Path):
    """Groups, learning rates with muP and weight decay are the same, to the bit."""
    changes = {"optimizer": {"base_hidden_size": 16, "weight_decay": 0.5}}
    ours = run_engine("torchrun", small_config(plain_store, **changes))
    changes["optimizer"] |= {
        "name": "torch.optim.AdamW", "options": {"betas": [0.9, 0.95], "eps": 1e-8, "fused": True}
    }  # fmt: skip
    assert run_engine("torchrun", small_config(plain_store, **changes)).hashes == ours.hashes


@pytest.mark.parametrize(("name", "options", "on_device"), [
    ("adamw", {}, True), ("muon", {}, True), (LION, {}, False), ("torch.optim.AdamW", {"fused": True}, True),
    ("torch.optim.AdamW", {"fused": False}, False),
])  # fmt: skip
def test_a_gpu_decides_only_where_the_optimizer_reads_the_decision(name: str, options: dict, on_device: bool):
    config = replace(Config(), optimizer=OptimizerConfig(name=name, options=options))
    model = Decoder(ModelConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    optimizer = build_optimizer(model, config.optimizer)
    engine: Any = SimpleNamespace(
        device=torch.device("cuda"),
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        model_and_optimizer=lambda: (model, optimizer),
    )
    assert decides_on_device(config, engine) == on_device


def test_the_estimate_counts_the_state_of_a_class():
    def state(name: str) -> int:
        arguments = ["--config", "minimind3-64m", "--model.vocab_size", "6400", "--optimizer.name", name]
        return estimate_memory(load_config(arguments, needs_data=False)).optimizer

    assert 2 * state(LION) == state("adamw")


class InGroups(Lion):
    """Counts its steps in its groups."""

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            group["taken"] = group.get("taken", 0) + 1
            group["lr"] = 1e-3 / group["taken"]
        super().step()


class OfAnotherShape(Lion):
    """Keeps a value for each row."""

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        super().step()
        for parameter, state in self.state.items():
            assert isinstance(parameter, Parameter)
            state["rows"] = parameter.sum(-1).detach()


REFUSED = {
    "nowhere.Lion": "name: expected a class that can be imported",
    "support.lion.torch": "name: expected a subclass of torch.optim.Optimizer",
    "torch.optim.Rprop": "options: expected what torch.optim.Rprop takes",
    "torch.optim.Adagrad": "name: expected a class whose step",
    InGroups: "name: expected a class whose steps follow from its `state`",
    OfAnotherShape: "name: expected a class with numbers and tensors of a parameter's shape as state",
}


@pytest.mark.parametrize("named", REFUSED)
def test_a_class_that_would_not_go_on_after_a_stop_is_refused_in_one_line(named: str | type):
    path = named if isinstance(named, str) else f"{named.__module__}.{named.__name__}"
    with pytest.raises(ConfigError) as caught:
        moments(OptimizerConfig(name=path), "hidden")
    (line,) = caught.value.lines()
    assert line.startswith(f"optimizer.{REFUSED[named]}")
    assert path in line
    assert "\n" not in line


@pytest.mark.parametrize("options", [{"beta": 1}, {"lr": 1.0}])
def test_options_that_a_class_does_not_take_are_refused_by_name(options: dict):
    for weight_decay in (0.0, 0.1):
        with pytest.raises(ConfigError, match=r"^optimizer\.options: expected what support\.lion\."):
            moments(OptimizerConfig(name=LION, options=options, weight_decay=weight_decay), "hidden")


@pytest.mark.slow
def test_sharded_it_resumes_exactly(plain_store: Path, tmp_path: Path):
    """Its state is saved by two ranks and loaded by two; one process has the same losses within rounding."""
    more = ("--distributed.strategy", "fsdp")
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    launch("torchrun", 2, whole, options(plain_store, whole, *more))
    launch("torchrun", 2, stopped, options(plain_store, stopped, *more, "--training.max_steps", "2"))
    launch("torchrun", 2, stopped, options(plain_store, stopped, *more))
    assert_same_tensors(checkpoint_tensors(stopped, 4), checkpoint_tensors(whole, 4))
