"""DiLoCo: replicas that train on their own, and outer steps over their mean."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.launching import ROOT, Finished, assert_same_tensors, checkpoint_tensors, launch
from support.stepping import relative_error
from torch import Tensor

from llm_pretrain.__main__ import main
from llm_pretrain.config import DistributedConfig, load_config
from llm_pretrain.errors import ConfigError
from llm_pretrain.optim import OUTER_MOMENTUM, OuterOptimizer

GRADIENTS = torch.tensor([[1.0, -2.0, 0.5], [3.0, 0.25, -1.0]])
"""Of two replicas."""


def outer_optimizer(
    steps: int, rate: float, momentum: float, reduce_sum: Callable[[Tensor], Tensor], replicas: int = 1
) -> tuple[torch.nn.Parameter, OuterOptimizer]:
    parameter = torch.nn.Parameter(torch.tensor([0.5, 1.0, -1.0]))
    inner = torch.optim.SGD([parameter], lr=0.1, momentum=0.5)
    config = DistributedConfig(
        outer="diloco", outer_steps=steps, outer_learning_rate=rate, outer_momentum=momentum
    )
    return parameter, OuterOptimizer(inner, config, replicas, reduce_sum)


def take_step(parameter: torch.nn.Parameter, outer: OuterOptimizer, gradient: Tensor) -> None:
    with outer.replica():
        parameter.grad = gradient.clone()
        outer.optimizer.step()


def test_plain_averaging_of_single_steps_is_the_step_by_the_mean_gradient():
    parameter, outer = outer_optimizer(1, 1.0, 0.0, lambda apart: apart + 0.1 * GRADIENTS[1], replicas=2)
    expected = parameter.detach() - 0.1 * GRADIENTS.mean(0)
    take_step(parameter, outer, GRADIENTS[0])
    outer.step(1)
    torch.testing.assert_close(parameter.detach(), expected)


def test_outer_steps_are_those_of_nesterov_over_the_inner_steps_between():
    parameter, outer = outer_optimizer(2, 0.7, 0.9, lambda apart: apart)
    inner_only = torch.nn.Parameter(parameter.detach().clone())
    inner = torch.optim.SGD([inner_only], lr=0.1, momentum=0.5)
    expected = torch.nn.Parameter(parameter.detach().clone())
    nesterov = torch.optim.SGD([expected], lr=0.7, momentum=0.9, nesterov=True)
    for number in range(1, 7):
        before = parameter.detach().clone()
        gradient = GRADIENTS[number % 2] * number
        take_step(parameter, outer, gradient)
        assert torch.equal(parameter, before), "the run's parameters are those of the last outer step"
        inner_only.grad = gradient
        inner.step()
        outer.step(number)
        if number % 2 == 0:
            expected.grad = expected.detach() - inner_only.detach()
            nesterov.step()
            inner_only.data.copy_(expected.data)
        torch.testing.assert_close(parameter.detach(), expected.detach())
        with outer.replica():
            torch.testing.assert_close(parameter.detach(), inner_only.detach())


def test_a_replica_goes_on_where_it_was_after_an_error_and_a_skipped_step():
    parameter, outer = outer_optimizer(4, 0.7, 0.9, lambda apart: apart)
    start = parameter.detach().clone()
    with outer.replica():
        pass  # a first step that is skipped
    assert not outer.optimizer.state
    take_step(parameter, outer, GRADIENTS[0])
    with pytest.raises(RuntimeError), outer.replica():
        raise RuntimeError
    assert torch.equal(parameter, start)
    with outer.replica():
        torch.testing.assert_close(parameter.detach(), start - 0.1 * GRADIENTS[0])
    assert torch.equal(outer.optimizer.state[parameter][OUTER_MOMENTUM], torch.zeros(3))


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--distributed.strategy", "deepspeed", "ddp or fsdp"),
        ("--training.precision", "fp16", "fp32 or bf16"),
        ("--optimizer.name", "muon", "adamw"),
        ("--optimizer.ema_decay", "0.9", "0"),
        ("--distributed.dp_replicate_size", "1", "2 or more"),
        ("--distributed.ep_size", "2", "1"),
        ("--training.max_steps", "25", "a multiple of distributed.outer_steps, 10,"),
    ],
)
def test_what_does_not_go_with_it_is_named(option: str, value: str, expected: str):
    options = ["--config", str(ROOT / "configs" / "tiny-dense.yaml"), "--training.max_steps", "20"]
    options += ["--distributed.outer", "diloco", "--distributed.outer_steps", "10"]
    if value != "deepspeed" and option.startswith("--distributed"):
        options += SHARDED
    options += [option, value]
    with pytest.raises(ConfigError) as error:
        load_config(options)
    text = f"{option[2:]}: expected {expected} with distributed.outer diloco, found {value}"
    assert text in str(error.value)


def train(
    store: Path,
    folder: Path,
    steps: int,
    launcher: str,
    *options: str,
    world_size: int = 2,
    **more: Any,
) -> Finished:
    chosen = [
        *("--config", str(ROOT / "configs" / "tiny-moe.yaml"), "--data.sources", f"[{{store: {store}}}]"),
        *("--training.max_steps", str(steps), "--schedule.name", "constant", "--schedule.warmup_steps", "0"),
        *("--training.precision", "fp32", "--distributed.cpu_threads", "1", "--distributed.outer", "diloco"),
        *("--distributed.outer_steps", "3", "--evaluation.eval_steps", "0", "--checkpoint.save_steps", "2"),
        *("--checkpoint.keep_last", "9", "--model.router_bias_update_rate", "1e-3", *options),
    ]
    return launch(launcher, world_size, folder, chosen, **more)


@pytest.mark.slow
def test_it_is_the_same_on_both_launchers_and_over_an_interruption(masked_store: Path, tmp_path: Path):
    straight = train(masked_store, tmp_path / "straight", 6, "torchrun")
    accelerated = train(masked_store, tmp_path / "accelerated", 6, "accelerate")
    assert straight.exact_rows() == accelerated.exact_rows()
    assert_same_tensors(*(checkpoint_tensors(run.folder, 6) for run in (straight, accelerated)))
    state = checkpoint_tensors(straight.folder, 4)
    replicas = state["optimizer.state.model.embed_tokens.weight.replica"]
    assert replicas.shape[0] == 2
    assert not torch.equal(replicas[0], replicas[1])
    assert not torch.equal(replicas[0], state["model.embed_tokens.weight"])
    middle = straight.folder / "checkpoints" / "step-00000004"
    resumed = train(masked_store, tmp_path / "resumed", 6, "accelerate", "--checkpoint.resume", str(middle))
    assert resumed.exact_rows() == {step: row for step, row in straight.exact_rows().items() if step > 4}
    assert_same_tensors(*(checkpoint_tensors(run.folder, 6) for run in (straight, resumed)))
    refused = train(
        *(masked_store, tmp_path / "alone", 6, "torchrun", "--checkpoint.resume", str(middle)),
        world_size=1,
        exit_code=2,
    )
    assert "distributed.outer: expected 2 replicas, as in" in refused.output


SHARDED = ("--distributed.strategy", "fsdp", "--distributed.dp_replicate_size", "2")
"""Two replicas, on four processes of two ranks."""


def train_sharded(store: Path, folder: Path, launcher: str, *options: str, **more: Any) -> Finished:
    file = ROOT / "configs" / "accelerate" / "fsdp2.yaml"
    chosen = ("--training.micro_batch_size", "2", *SHARDED, *options)
    return train(store, folder, 6, launcher, *chosen, world_size=4, accelerate_file=file, **more)


@pytest.fixture(scope="module")
def sharded(masked_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return train_sharded(masked_store, tmp_path_factory.mktemp("sharded") / "run", "torchrun")


def middle(run: Finished) -> Path:
    return run.folder / "checkpoints" / "step-00000004"


@pytest.mark.slow
def test_replicas_of_several_ranks_are_those_of_one_rank_each(
    masked_store: Path, sharded: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Replicas of the same samples, so only the order of sums differs."""
    alone = ("--training.micro_batch_size", "4")
    whole = train(masked_store, tmp_path / "whole", 6, "torchrun", *alone)
    check_close(sharded, whole, range(1, 7))
    continued = ("--checkpoint.resume", str(middle(sharded)))
    other = train(masked_store, tmp_path / "other", 6, "torchrun", *alone, *continued)
    check_close(other, whole, range(5, 7))
    for run in (sharded, other):
        assert main(["verify", str(run.folder)]) == 0, capsys.readouterr().out
    more = ("--training.micro_batch_size", "2", *continued)
    refused = train(masked_store, tmp_path / "more", 6, "torchrun", *more, world_size=4, exit_code=1)
    assert "distributed.outer: expected 2 replicas, as in" in refused.output


def check_close(run: Finished, expected: Finished, steps: range) -> None:
    for step in steps:
        found, wanted = run.rows[step], expected.rows[step]
        assert found["data/batch_sha256"] == wanted["data/batch_sha256"]
        for key in ("train/loss", "train/aux_loss", "train/grad_norm"):
            assert math.isclose(found[key], wanted[key], rel_tol=1e-5), (step, key)
    tensors = [checkpoint_tensors(each.folder, steps[-1]) for each in (run, expected)]
    assert tensors[0].keys() == tensors[1].keys()
    assert (error := relative_error(*tensors)) < 1e-5, error


@pytest.mark.slow
def test_sharded_replicas_are_the_same_on_both_launchers_and_over_an_interruption(
    masked_store: Path, sharded: Finished, tmp_path: Path
):
    accelerated = train_sharded(masked_store, tmp_path / "accelerated", "accelerate")
    assert sharded.exact_rows() == accelerated.exact_rows()
    assert_same_tensors(*(checkpoint_tensors(run.folder, 6) for run in (sharded, accelerated)))
    options = ("--checkpoint.resume", str(middle(sharded)))
    resumed = train_sharded(masked_store, tmp_path / "resumed", "accelerate", *options)
    assert resumed.exact_rows() == {step: row for step, row in sharded.exact_rows().items() if step > 4}
    assert_same_tensors(*(checkpoint_tensors(run.folder, 6) for run in (sharded, resumed)))


@pytest.mark.slow
def test_sharded_replicas_are_apart_and_the_weights_are_those_of_the_run(sharded: Finished):
    state, name = checkpoint_tensors(sharded.folder, 4), "model.embed_tokens.weight"
    replicas = state[f"optimizer.state.{name}.replica"]
    assert replicas.shape[0] == 2
    assert not torch.equal(replicas[0], replicas[1])
    assert not torch.equal(replicas[0], state[name])
    weights = load_file(sharded.folder / "weights" / "step-00000004" / "model.safetensors")
    assert torch.equal(weights[name], state[name].to(weights[name].dtype))


@pytest.mark.slow
def test_sharded_replicas_that_begin_apart_are_found(masked_store: Path, tmp_path: Path):
    fault = [("support.process_faults:begin_otherwise_in_the_second_replica", [])]
    run = train_sharded(masked_store, tmp_path / "run", "torchrun", before=fault, exit_code=None)
    assert run.exit_code != 0
    assert "after initialisation" in run.output
