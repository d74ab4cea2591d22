"""Traps of a step in one process: each check passes on our code and fails with the mistake put in."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from support import faults
from support.engines import run_engine
from support.faults import Fault, after, replace_everywhere
from support.rank_plan import FEW_TOKENS_PER_EXPERT
from support.stepping import Driven, masked, micro_batches_of, reference_gradients, relative_error

import llm_pretrain.model.kernels.loss as loss_kernels
import llm_pretrain.model.moe as router
from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.config.tree import Config
from llm_pretrain.errors import ConfigError
from llm_pretrain.launch import process
from llm_pretrain.model.decoder import Decoder, DecoderOutput

# Normalising and balancing


def check_gradients(launcher: str, config: Config, *mistakes: Fault, mask_one: bool = False) -> float:
    """The first step's gradients are those of the mean over all of its loss tokens; returns the error."""
    window = list(micro_batches_of(config, 0))
    if mask_one:
        window[1] = masked(window[1])
    expected = reference_gradients(config, window)
    driven = run_engine(launcher, config, *mistakes, windows=[window])
    assert driven.updates == [1], driven.skipped
    for part in ("", "mlp.gate"):
        error = relative_error(driven.gradients[0], expected, part)
        assert error < 1e-5, f"gradients of parameters {part!r} are off by {error:.1%}"
    return error


def check_one_update_per_window(driven: Driven, steps: int) -> None:
    """Every window of micro batches moves the parameters exactly once."""
    assert driven.updates == [1] * steps
    assert len(set(driven.hashes)) == steps


@pytest.fixture
def unclipped(config) -> Config:
    return config(training={"max_grad_norm": 0.0})


@pytest.mark.parametrize("mask_one", [False, True], ids=["ragged", "one micro batch without loss tokens"])
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_the_objective_is_the_mean_over_tokens(launcher, unclipped, mask_one):
    tokens = [batch.num_loss_tokens for batch in micro_batches_of(unclipped, 0)]
    assert max(tokens) > 1.2 * min(tokens), "the corpus is too even to tell one mean from another"
    check_gradients(launcher, unclipped, mask_one=mask_one)
    with pytest.raises(AssertionError, match="are off by" if not mask_one else "nonfinite_gradient"):
        check_gradients(launcher, unclipped, faults.MEAN_OF_MEANS, mask_one=mask_one)


@pytest.mark.parametrize(
    ("launcher", "fault"),
    [
        ("torchrun", faults.UNDIVIDED),
        ("accelerate", faults.DIVIDED_TWICE),
        ("torchrun", faults.LATE_AUX_LOSS),
        ("accelerate", faults.LATE_AUX_LOSS),
    ],
    ids=["undivided", "divided twice", "late auxiliary loss", "late auxiliary loss, accelerate"],
)
def test_other_objectives_are_seen(launcher, fault, unclipped):
    with pytest.raises(AssertionError, match="are off by"):
        check_gradients(launcher, unclipped, fault)


@pytest.mark.parametrize(
    "fault", [faults.COUNTS_APART, faults.COUNTS_SO_FAR], ids=["of each micro batch", "so far"]
)
def test_other_counts_are_seen(fault, config):
    """Of a balance loss over the whole global batch, which one process accumulates."""
    model = {"router_aux_loss_scope": "global_batch", "router_aux_loss_coef": 1.0}
    balanced = config(model=model, training={"max_grad_norm": 0.0})
    check_gradients("torchrun", balanced)
    with pytest.raises(AssertionError, match="are off by"):
        check_gradients("torchrun", balanced, fault)


def test_one_window_is_one_update(config):
    steps = config().training.max_steps
    for launcher in ("torchrun", "accelerate"):
        check_one_update_per_window(run_engine(launcher, config()), steps)


@pytest.mark.parametrize(
    "fault",
    [faults.OWN_GATE, faults.NO_ACCUMULATE, faults.SYNC_WITH_LOADER],
    ids=["own gate", "no accumulate", "sync at the loader's end"],
)
def test_other_numbers_of_updates_are_seen(fault, config):
    driven = run_engine("accelerate", config(), fault)
    with pytest.raises(AssertionError):
        check_one_update_per_window(driven, config().training.max_steps)


def check_own_gradients(launcher: str, config: Config, *mistakes: Fault) -> None:
    """An update has the gradients of its own window, and nothing of the one before."""
    windows = [list(micro_batches_of(config, step)) for step in (0, 1)]
    driven = run_engine(launcher, config, *mistakes, windows=windows)
    error = relative_error(driven.gradients[1], reference_gradients(config, windows[1]))
    assert error < 1e-5, f"gradients are off by {error:.1%}"


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_an_update_has_its_own_window_s_gradients(launcher, config):
    still = config(training={"max_grad_norm": 0.0}, optimizer={"learning_rate": 0.0})
    check_own_gradients(launcher, still)
    with pytest.raises(AssertionError, match="are off by"):
        check_own_gradients(launcher, still, faults.KEPT_GRADIENTS)


# The gradient scaler


def check_scaled_step(half: Config, full: Config, *mistakes: Fault) -> None:
    """A step in fp16 has the gradient norm and the clipped gradients of fp32, but for its rounding."""
    low, high = run_engine("torchrun", half, *mistakes), run_engine("torchrun", full)
    assert high.grad_norms[0] is not None
    assert high.grad_norms[0] > 1.5 * full.training.max_grad_norm, "nothing is clipped"
    assert low.grad_norms[0] == pytest.approx(high.grad_norms[0], rel=0.02)
    assert relative_error(low.first_moments, high.first_moments) < 0.02


def test_clipping_sees_unscaled_gradients(config):
    half = config(training={"precision": "fp16", "max_steps": 1})
    full = config(training={"max_steps": 1})
    check_scaled_step(half, full)
    for mistake in (faults.CLIP_FIRST, faults.UNSCALED):
        with pytest.raises(AssertionError):
            check_scaled_step(half, full, mistake)


def check_recovery(config: Config, *mistakes: Fault) -> None:
    """A scale that overflows is halved at every step until gradients are finite again."""
    driven = run_engine("torchrun", config, faults.HUGE_SCALE, *mistakes)
    assert driven.skipped[0] == "overflow"
    assert len(set(driven.hashes)) > 1, "no step ever moved the parameters"
    assert driven.skipped[-1] is None


def test_the_scale_recovers_from_an_overflow(config):
    many = config(training={"precision": "fp16", "max_steps": 14})
    check_recovery(many)
    with pytest.raises(RuntimeError, match="since the last update"):
        check_recovery(many, faults.NO_UPDATE)


def test_accelerate_lowers_the_scale_after_a_step_that_overflows(config):
    """Accelerate has a scaler on a GPU only: this one counts its updates."""
    updates: list[None] = []

    def counting(self, config) -> None:
        self.scaler = SimpleNamespace(
            update=lambda: updates.append(None), state_dict=dict, is_enabled=lambda: True
        )

    def overflowing(patch, engine) -> None:
        forward = engine.forward
        patch.setattr(engine, "forward", lambda self, batch: scaled(forward(self, batch), batch.step == 1))

    def scaled(output: DecoderOutput, is_lost: bool) -> DecoderOutput:
        return output._replace(loss_sum=output.loss_sum * math.inf) if is_lost else output

    driven = run_engine(
        "accelerate", config(training={"max_steps": 3}), after("__init__", counting), overflowing
    )
    assert [reason is not None for reason in driven.skipped] == [False, True, False]
    assert len(updates) == 1, "Accelerate's optimizer updates the scale itself after the others"


# Experts and buffers


def check_every_gradient(config: Config, *mistakes: Fault) -> None:
    """Every parameter that is trained has a gradient at every update, chosen by a token or not."""
    driven = run_engine("torchrun", config, *mistakes)
    for gradients in driven.gradients:
        missing = driven.parameters.keys() - gradients.keys()
        assert not missing, f"no gradient: {sorted(missing)[:3]}"


def test_every_expert_has_a_gradient(config):
    few = config(training={"max_steps": 1, "global_batch_size": 2}, **FEW_TOKENS_PER_EXPERT)
    assert unchosen_experts(few) > 0, "every expert has a token: nothing is tested"
    check_every_gradient(few)
    with pytest.raises(AssertionError, match="no gradient"):
        check_every_gradient(few, faults.experts_in_a_list)


def unchosen_experts(config: Config) -> int:
    """Experts without any token in the first gradients: those whose gradient is zero everywhere."""
    gradients = run_engine("torchrun", config).gradients[0]
    experts = [value for name, value in gradients.items() if name.endswith("experts.down_proj")]
    return sum(int((each.abs().sum((1, 2)) == 0).sum()) for each in experts)


def check_buffer_types(model: Decoder) -> None:
    """Buffers are real, and the saved ones are the router's biases alone."""
    assert not any(buffer.is_complex() for buffer in model.buffers())
    saved = model.state_dict().keys() - {name for name, _ in model.named_parameters()} - {"lm_head.weight"}
    assert all(name.endswith("e_score_correction_bias") for name in saved), saved


@pytest.mark.parametrize("rate", [0.0, 0.125])
def test_there_is_no_rotary_buffer(rate, config):
    angles = torch.arange(64.0)
    for name, table in {"complex": torch.polar(torch.ones(64), angles), "persistent": angles.cos()}.items():
        model = Decoder(config(model={"router_bias_update_rate": rate}).model)
        check_buffer_types(model)
        model.register_buffer("rotary", table, persistent=name == "persistent")
        with pytest.raises(AssertionError):
            check_buffer_types(model)


# Bit identity


def everything_in_autocast(patch: pytest.MonkeyPatch) -> None:
    """Products, softmax and logsumexp in bf16."""
    autocast = torch.autocast
    patch.setattr(
        torch, "autocast", lambda *a, **k: nullcontext() if k.get("enabled") is False else autocast(*a, **k)
    )
    replace_everywhere(patch, router.at_least_fp32, lambda tensor: tensor)


def check_same_bits(left: Driven, right: Driven) -> None:
    """The same parameters after every step, and the same losses and norms."""
    assert left.hashes == right.hashes
    assert (left.losses, left.grad_norms) == (right.losses, right.grad_norms)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_process_computes_the_same_bits_on_both_paths(precision, config):
    """Of three micro batches: dividing by a power of two changes no bits wherever it stands."""
    alone = config(training={"precision": precision, "global_batch_size": 6})
    right = run_engine("accelerate", alone)
    check_same_bits(run_engine("torchrun", alone), right)
    for mistake in (faults.another_optimizer, faults.DIVIDED_ELSEWHERE):
        with pytest.raises(AssertionError):
            check_same_bits(run_engine("torchrun", alone, mistake), right)


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


def test_fp16_is_never_fp32_in_secret(config):
    """Accelerate's fp16 on a CPU is refused."""
    half = config(training={"precision": "fp16", "max_steps": 1})
    with pytest.raises(ConfigError, match="silently train in"):
        run_engine("accelerate", half)
    assert run_engine("torchrun", half).hashes != run_engine("torchrun", config()).hashes[:1]


def test_the_launchers_thread_count_does_not_matter(config, monkeypatch):
    """More threads would sum in another order."""
    set_threads = torch.set_num_threads

    def check() -> None:
        set_threads(2)
        process.prepare_process(config())
        assert torch.get_num_threads() == config().distributed.cpu_threads

    check()
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    with pytest.raises(AssertionError):
        check()
