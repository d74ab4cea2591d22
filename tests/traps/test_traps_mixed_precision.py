"""Traps of the gradient scaler: each check passes on our code and fails with the mistake put in.

The scaler's state in checkpoints is in `test_traps_checkpoints.py`.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from support.engines import run_engine
from support.faults import CLIP_FIRST, HUGE_SCALE, NO_UPDATE, UNSCALED, Fault, after
from support.rank_cases import Outcome
from support.stepping import relative_error

from llm_pretrain.config.tree import Config
from llm_pretrain.model.decoder import DecoderOutput


def check_scaled_step(half: Config, full: Config, *faults: Fault) -> None:
    """A step in fp16 has the gradient norm and the clipped gradients of fp32, but for its rounding."""
    low, high = run_engine("torchrun", half, *faults), run_engine("torchrun", full)
    assert high.grad_norms[0] is not None
    assert high.grad_norms[0] > 1.5 * full.training.max_grad_norm, "nothing is clipped"
    assert low.grad_norms[0] == pytest.approx(high.grad_norms[0], rel=0.02)
    assert relative_error(low.first_moments, high.first_moments) < 0.02


def test_clipping_sees_unscaled_gradients(config):
    half = config(training={"precision": "fp16", "max_steps": 1})
    full = config(training={"max_steps": 1})
    check_scaled_step(half, full)
    for mistake in (CLIP_FIRST, UNSCALED):
        with pytest.raises(AssertionError):
            check_scaled_step(half, full, mistake)


def check_recovery(config: Config, *faults: Fault) -> None:
    """A scale that overflows is halved at every step until gradients are finite again."""
    driven = run_engine("torchrun", config, HUGE_SCALE, *faults)
    assert driven.skipped[0] == "overflow"
    assert len(set(driven.hashes)) > 1, "no step ever moved the parameters"
    assert driven.skipped[-1] is None


def test_the_scale_recovers_from_an_overflow(config):
    many = config(training={"precision": "fp16", "max_steps": 14})
    check_recovery(many)
    with pytest.raises(RuntimeError, match="since the last update"):
        check_recovery(many, NO_UPDATE)


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


def check_agreement(outcomes: list[Outcome]) -> None:
    """Where one rank's loss is NaN, all ranks skip the step and keep the same parameters."""
    for outcome in outcomes:
        assert outcome.error is None
        assert outcome.driven.skipped == ["nonfinite_gradient"] * 2
        assert outcome.driven.updates == [0, 0]
        assert outcome.driven.hashes == outcomes[0].driven.hashes


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_ranks_skip_together(launcher, ranks):
    check_agreement(ranks[f"{launcher} one rank NaN"])
    with pytest.raises(AssertionError):
        check_agreement(ranks[f"{launcher} skip by own loss"])
