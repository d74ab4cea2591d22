"""The average of the parameters: what it is, that training does not notice it, and who looks at it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import small_config
from support.finished_runs import FinishedRun
from support.launching import checkpoint_tensors
from support.resuming import Attempt, drift
from torch import Tensor
from torch.nn import Parameter

from llm_pretrain.checkpoints.opening import open_model
from llm_pretrain.config.loading import from_dict, validate
from llm_pretrain.config.tree import Config
from llm_pretrain.data.loader import evaluation_batches
from llm_pretrain.data.store import TokenStore
from llm_pretrain.distributed.collectives import OneRank
from llm_pretrain.distributed.mesh import Place
from llm_pretrain.export.huggingface import load_pretrained
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.optim.ema import AVERAGE, average_name, ema_parameters, keep_ema
from llm_pretrain.training.evaluation import Evaluator

DECAY = 0.5
NAMES = pytest.mark.parametrize("name", ["adamw", "muon"])


def averaging(store: Path, name: str = "muon", decay: float = DECAY, **changes: Any) -> Config:
    changes = {"training": {"precision": "fp32"}} | changes
    return small_config(store, optimizer={"name": name, "ema_decay": decay}, **changes)


def stepping(
    optimizer: torch.optim.Optimizer, parameter: Parameter, gradients: list[Tensor]
) -> Iterator[Tensor]:
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
        yield parameter.detach().clone()


def test_it_is_the_average_that_the_formula_says():
    """In float64 by hand: at decay 0.3 the first steps' own decay is smaller, later ones' is 0.3."""
    parameter = Parameter(torch.randn(5, 3))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=True)
    keep_ema(optimizer, 0.3)
    expected, decays = None, []
    for step, value in enumerate(stepping(optimizer, parameter, list(torch.randn(9, 5, 3))), start=1):
        decay = min(0.3, (1 + step) / (10 + step))
        decays.append(decay)
        last = value.double()
        expected = last if expected is None else decay * expected + (1 - decay) * last
        assert torch.allclose(optimizer.state[parameter][AVERAGE].double(), expected, atol=1e-7)
    assert decays[1] < 0.3 == decays[-1]


@NAMES
def test_training_does_not_notice(plain_store: Path, tmp_path: Path, name: str):
    without = Attempt(averaging(plain_store, name, 0.0), tmp_path / "without").train(3)
    kept = Attempt(averaging(plain_store, name), tmp_path / "with")
    for _ in range(3):
        kept.train(1)
        with ema_parameters(kept.optimizer):
            pass
    assert drift(kept.parameters(), without.parameters()) == 0.0


@NAMES
def test_a_step_that_only_the_device_skips_moves_nothing(plain_store: Path, tmp_path: Path, name: str):
    attempt = Attempt(averaging(plain_store, name), tmp_path).train(3)
    for found in (1.0, 0.0):
        before = state_of(attempt)
        attempt.optimizer.found_inf = torch.tensor(found)  # type: ignore[attr-defined]  # as GradScaler's
        attempt.optimizer.grad_scale = None  # type: ignore[attr-defined]
        attempt.train(1)
        after = state_of(attempt)
        assert before.keys() == after.keys()
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        assert moved == (set() if found else set(before))


def state_of(attempt: Attempt) -> dict[str, Tensor]:
    """Every parameter and its state, the step too."""
    found = attempt.parameters()
    for name, parameter in attempt.model.named_parameters():
        for key, value in attempt.optimizer.state[parameter].items():
            found[f"{name}.{key}"] = value.detach().clone()
    return found


def test_scaled_gradients_are_unscaled_on_the_way(plain_store: Path, tmp_path: Path):
    """As torch's fused AdamW does."""
    scaled, plain = (Attempt(averaging(plain_store), tmp_path / name).train(1) for name in ("a", "b"))
    scaled.optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
    scaled.optimizer.grad_scale = torch.tensor(4.0)  # type: ignore[attr-defined]
    for side, factor in ((scaled, 4.0), (plain, 1.0)):
        for number, parameter in enumerate(side.model.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter.grad = factor * torch.randn(parameter.shape, generator=generator)
        side.optimizer.step()
    assert drift(scaled.parameters(), plain.parameters()) == 0.0


def evaluated(model: Decoder, config: Config, store: Path) -> dict[str, float | None]:
    batches = list(evaluation_batches(config))[:2]
    evaluator = Evaluator(
        OneRank(),
        Place(),
        lambda batch: model(**batch.model_inputs()),
        batches,
        TokenStore(store),
        lambda: False,
    )
    metrics = evaluator(model)
    assert metrics
    return metrics


@NAMES
def test_what_is_evaluated_is_a_model_with_the_averages(plain_store: Path, tmp_path: Path, name: str):
    config = averaging(plain_store, name)
    attempt = Attempt(config, tmp_path).train(2)
    other = Decoder(config.model)
    named = attempt.model.named_parameters(remove_duplicate=False)
    averages = {name: attempt.optimizer.state[parameter][AVERAGE] for name, parameter in named}
    other.load_state_dict(attempt.model.state_dict() | averages)
    before, expected = attempt.parameters(), evaluated(other, config, plain_store)
    with ema_parameters(attempt.optimizer):
        assert evaluated(attempt.model, config, plain_store) == expected
    assert evaluated(attempt.model, config, plain_store) != expected
    assert drift(attempt.parameters(), before) == 0.0


def test_an_error_inside_leaves_parameters_and_averages_as_they_were(plain_store: Path, tmp_path: Path):
    attempt = Attempt(averaging(plain_store), tmp_path).train(2)
    before = state_of(attempt)

    def fail() -> None:
        with ema_parameters(attempt.optimizer):
            assert drift(attempt.parameters(), {name: before[name] for name in attempt.parameters()}) > 0
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert all(torch.equal(value, before[name]) for name, value in state_of(attempt).items())


@NAMES
def test_resume_is_exact(plain_store: Path, tmp_path: Path, name: str):
    """To the bit: parameters, moments, averages and counters."""
    config = averaging(plain_store, name)
    straight = Attempt(config, tmp_path / "straight").train(3)
    stopped = Attempt(config, tmp_path / "run").train(2)
    stopped.save()
    resumed = Attempt(config, tmp_path / "run", seed=1)
    resumed.restore()
    resumed.train(1)
    left, right = state_of(resumed), state_of(straight)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)
    keys = {key.rpartition(".")[2] for key in left}
    assert {"step", "exp_avg", "exp_avg_sq", AVERAGE} <= keys
    assert ("momentum_buffer" in keys) == (name == "muon")


def test_changed_settings_take_effect_at_resume_and_are_reported(plain_store: Path, tmp_path: Path):
    config = averaging(plain_store)
    Attempt(config, tmp_path).train(1).save()
    changed = {"ema_decay": 0.25, "muon_learning_rate": 1.0, "learning_rate": 0.25}
    resumed = Attempt(replace(config, optimizer=replace(config.optimizer, **changed)), tmp_path)
    warnings = " ".join(resumed.restore().warnings)
    for setting in ("ema_decay was 0.5", "lr_ratio was 2.0"):
        assert f"optimizer {setting} when the checkpoint was saved and is" in warnings
    muon = [group for group in resumed.optimizer.param_groups if group["algorithm"] == "muon"]
    assert {(group["ema_decay"], group["lr_ratio"]) for group in muon} == {(0.25, 4.0)}


def test_with_deepspeed_it_is_refused_by_name():
    for field, value in (("ema_decay", 0.5), ("name", "muon")):
        tree = {"optimizer": {field: value}, "distributed": {"strategy": "deepspeed"}}
        (line,) = validate(from_dict(tree), needs_data=False)
        assert re.match(rf"optimizer\.{field}: .*deepspeed", line)


@pytest.fixture(scope="module")
def run(finished_run: Callable[[str], FinishedRun]) -> Path:
    return finished_run("muon").folder


@pytest.mark.parametrize("step", [2, 4])
def test_exported_weights_are_the_average_s(run: Path, step: int):
    """In the background's copies too (step 2); a checkpoint opened by itself is the same model."""
    tensors, name = checkpoint_tensors(run, step), f"step-{step:08d}"
    exported = load_pretrained(run / "weights" / name)
    opened = open_model(run / "checkpoints" / name).model
    raw = open_model(run / "checkpoints" / name, average=False).model
    for name, parameter in exported.named_parameters():
        average = tensors[average_name(name)]
        assert torch.equal(parameter.detach(), average.bfloat16().float()), name
        assert torch.equal(opened.get_parameter(name).detach(), average), name
        assert torch.equal(raw.get_parameter(name).detach(), tensors[name]), name
    assert not torch.equal(tensors["model.norm.weight"], tensors[average_name("model.norm.weight")])


def test_the_best_weights_are_the_average_that_was_evaluated(run: Path):
    """The last evaluation is the best of so short a run."""
    best, last = (load_pretrained(run / "weights" / name) for name in ("best", "step-00000004"))
    for name, parameter in last.named_parameters():
        assert torch.equal(parameter, best.get_parameter(name))
