"""Traps of bit identity: each check passes on our code and fails with the mistake put in."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.engines import run_engine
from support.faults import DIVIDED_ELSEWHERE, Fault, another_optimizer, replace_everywhere
from support.launching import assert_same_tensors
from support.rank_cases import Outcome
from support.stepping import Driven

import llm_pretrain.model.kernels.loss as loss_kernels
import llm_pretrain.model.moe as router
from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.config.tree import Config
from llm_pretrain.errors import ConfigError
from llm_pretrain.launch import process


def everything_in_autocast(patch: pytest.MonkeyPatch) -> None:
    """Products, softmax and logsumexp in bf16."""
    autocast = torch.autocast
    patch.setattr(
        torch, "autocast", lambda *a, **k: nullcontext() if k.get("enabled") is False else autocast(*a, **k)
    )
    replace_everywhere(patch, router.at_least_fp32, lambda tensor: tensor)


def fp16_allowed(patch: pytest.MonkeyPatch, engine: type) -> None:
    """Accelerate gets fp16 on a CPU, and nobody looks."""
    script: Any = sys.modules[engine.__module__]
    accelerator, build = script.Accelerator, engine.__init__  # type: ignore[misc]  # of this very class

    def unchecked(self: Any, config: Config) -> None:
        build(self, replace(config, training=replace(config.training, precision="bf16")))
        self.config = config

    patch.setattr(script, "Accelerator", lambda **k: accelerator(**k | {"mixed_precision": "fp16"}))
    patch.setattr(engine, "__init__", unchecked)


def check_same_bits(left: list[Outcome], right: list[Outcome]) -> None:
    """Every rank on either side has the same parameters after every step, and the same losses and norms."""
    one: Driven = left[0].driven
    assert one.hashes
    for outcome in [*left, *right]:
        other = outcome.driven
        assert outcome.error is None
        assert other.hashes == one.hashes
        assert (other.losses, other.grad_norms) == (one.losses, one.grad_norms)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "dropout", "global balance"])
def test_both_paths_compute_the_same_bits(precision, ranks):
    check_same_bits(ranks[f"torchrun {precision}"], ranks[f"accelerate {precision}"])


@pytest.mark.parametrize(
    "case",
    [
        *("another optimizer", "another bucket size", "divided elsewhere"),
        *("every micro batch reduced", "static graph"),
    ],
)
def test_a_difference_on_one_side_is_seen(case, ranks):
    assert all(outcome.error is None for outcome in ranks[case]), "the trap is silent"
    with pytest.raises(AssertionError):
        check_same_bits(ranks[case], ranks["accelerate fp32"])


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_figures_that_are_read_later_change_no_bits(launcher: str, ranks):
    waiting, read = ranks[f"{launcher} read late"], ranks[f"{launcher} read at once"]
    check_same_bits(waiting, read)
    for one, other in zip(waiting, read, strict=True):
        assert_same_tensors(one.driven.buffers, other.driven.buffers)
    lost, known = ranks[f"{launcher} read late, NaN"], ranks[f"{launcher} one rank NaN"]
    for one, other in zip(lost, known, strict=True):
        assert one.error is None
        assert one.driven.hashes == other.driven.hashes
        assert one.driven.skipped == other.driven.skipped == ["nonfinite_gradient"] * 2
        assert one.driven.updates == [1, 1], "the optimizer is called, and does nothing"
        assert not any(buffer.any() for buffer in one.driven.buffers.values()), "the router's bias moves"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_process_computes_the_same_bits_on_both_paths(precision, config):
    """Of three micro batches: dividing by a power of two changes no bits wherever it stands."""
    alone = config(training={"precision": precision, "global_batch_size": 6})
    right = [Outcome(run_engine("accelerate", alone))]
    check_same_bits([Outcome(run_engine("torchrun", alone))], right)
    for mistake in (another_optimizer, DIVIDED_ELSEWHERE):
        with pytest.raises(AssertionError):
            check_same_bits([Outcome(run_engine("torchrun", alone, mistake))], right)


def check_dropout(outcomes: list[Outcome], config: Config) -> None:
    """Three ranks drop the same units as one rank does with three times the micro batches."""
    alone = run_engine("torchrun", config)
    torch.testing.assert_close(outcomes[0].driven.losses[0], alone.losses[0], rtol=1e-6, atol=0.0)


def test_dropout_does_not_depend_on_the_ranks(ranks, rank_config):
    for case in ("torchrun dropout", "accelerate dropout"):
        check_dropout(ranks[case], rank_config(case))
    assert ranks["dropout by rank"][0].error is None
    with pytest.raises(AssertionError):
        check_dropout(ranks["dropout by rank"], rank_config("dropout by rank"))


def check_router_precision() -> None:
    """Under bf16 autocast the router computes what float64 computes from the same input."""
    torch.manual_seed(0)
    layer = router.Router(ModelConfig(hidden_size=32, num_experts=8, num_experts_per_tok=8))
    torch.nn.init.normal_(layer.weight)
    hidden, mask = torch.randn(2, 16, 32).bfloat16(), torch.ones(2, 16, dtype=torch.bool)
    with torch.autocast("cpu", torch.bfloat16):
        weights, chosen, sums = layer(hidden, mask)
    logits = (hidden.double() @ layer.weight.double().t()).flatten(0, 1)
    expected = logits.softmax(-1).gather(-1, chosen)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-7)
    z_loss = logits.logsumexp(-1).square().sum()
    torch.testing.assert_close(sums.z_loss.double(), z_loss, rtol=1e-6, atol=0.0)


def check_loss_head_precision() -> None:
    """Under bf16 autocast cross-entropy and z-loss are those of float64 on the same bf16 logits."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 16, 32), torch.randn(100, 32)
    labels, mask = torch.randint(100, (2, 16)), torch.ones(2, 16, dtype=torch.bool)
    with torch.autocast("cpu", torch.bfloat16):
        sums = loss_kernels.cross_entropy_sums(torch.nn.functional.linear(hidden, weight), labels, mask)
    logits = (hidden.bfloat16() @ weight.bfloat16().t()).double().flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
    torch.testing.assert_close(sums.loss.double(), loss, rtol=1e-6, atol=0.0)
    z_loss = logits.logsumexp(-1).square().sum()
    torch.testing.assert_close(sums.z_loss.double(), z_loss, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("check", [check_router_precision, check_loss_head_precision])
def test_router_and_loss_head_are_exact_under_autocast(check):
    check()
    with pytest.MonkeyPatch.context() as patch:
        everything_in_autocast(patch)
        with pytest.raises(AssertionError):
            check()


def check_fp16_is_fp16(config: Config, *faults: Fault) -> None:
    """A run in fp16 is refused in words, or differs from the same run in fp32."""
    try:
        low = run_engine("accelerate", config, *faults)
    except ConfigError:
        return
    full = replace(config, training=replace(config.training, precision="fp32"))
    assert low.hashes != run_engine("accelerate", full).hashes, "fp16 was fp32"


def test_fp16_is_never_fp32_in_secret(config):
    half = config(training={"precision": "fp16", "max_steps": 1})
    check_fp16_is_fp16(half)
    assert run_engine("torchrun", half).hashes != run_engine("torchrun", config()).hashes[:1]
    with pytest.raises(AssertionError, match="fp16 was fp32"):
        check_fp16_is_fp16(half, fp16_allowed)


def check_threads(config: Config, *, left_alone: bool = False) -> None:
    """A process computes the same bits whatever number of threads its launcher left it with."""
    hashes = []
    for launchers_choice in (1, 2):
        torch.set_num_threads(launchers_choice)
        with pytest.MonkeyPatch.context() as patch:
            if left_alone:
                patch.setattr(torch, "set_num_threads", lambda threads: None)
            process.prepare_process(config)
        hashes.append([*run_engine("torchrun", config).hashes, long_sum()])
    assert hashes[0] == hashes[1]


def long_sum() -> str:
    """The bits of a sum that every processor splits among its threads; few split a small step's."""
    values = torch.rand(1 << 20, generator=torch.Generator().manual_seed(0)) - 0.5
    return values.sum().item().hex()


def test_the_launchers_thread_count_does_not_matter(config):
    large = config(
        training={"sequence_length": 512, "micro_batch_size": 8, "max_steps": 1},
        model={"hidden_size": 64, "num_experts": 0, "num_hidden_layers": 1},
    )
    check_threads(large)
    with pytest.raises(AssertionError):
        check_threads(large, left_alone=True)
