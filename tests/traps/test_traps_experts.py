"""Traps of experts and buffers: each check passes on our code and fails with the mistake put in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.engines import run_engine
from support.faults import Fault, experts_in_a_list
from support.rank_cases import Outcome
from support.rank_plan import FEW_TOKENS_PER_EXPERT

from llm_pretrain.config.tree import Config
from llm_pretrain.model.decoder import Decoder


def with_table(name: str, table: torch.Tensor, *, persistent: bool) -> Callable[[pytest.MonkeyPatch], None]:
    """The fault of a rotary table that is a buffer of the decoder."""

    def fault(patch: pytest.MonkeyPatch) -> None:
        build = Decoder.__init__

        def changed(self: Decoder, *arguments: Any, **options: Any) -> None:
            build(self, *arguments, **options)
            self.register_buffer(name, table, persistent=persistent)

        patch.setattr(Decoder, "__init__", changed)

    return fault


ANGLES = torch.arange(64.0)
COMPLEX_TABLE = with_table("rotations", torch.polar(torch.ones(64), ANGLES), persistent=False)
PERSISTENT_TABLE = with_table("rotary_cos", ANGLES.cos(), persistent=True)


def check_every_gradient(config: Config, *faults: Fault) -> None:
    """Every parameter that is trained has a gradient at every update, chosen by a token or not."""
    driven = run_engine("torchrun", config, *faults)
    for gradients in driven.gradients:
        missing = driven.parameters.keys() - gradients.keys()
        assert not missing, f"no gradient: {sorted(missing)[:3]}"


def test_every_expert_has_a_gradient(config):
    few = config(training={"max_steps": 1, "global_batch_size": 2}, **FEW_TOKENS_PER_EXPERT)
    assert unchosen_experts(few) > 0, "every expert has a token: nothing is tested"
    check_every_gradient(few)
    with pytest.raises(AssertionError, match="no gradient"):
        check_every_gradient(few, experts_in_a_list)


def unchosen_experts(config: Config) -> int:
    """Experts without any token in the first gradients: those whose gradient is zero everywhere."""
    gradients = run_engine("torchrun", config).gradients[0]
    experts = [value for name, value in gradients.items() if name.endswith("experts.down_proj")]
    return sum(int((each.abs().sum((1, 2)) == 0).sum()) for each in experts)


def check_ranks_agree(outcomes: list[Outcome]) -> None:
    """All ranks finish every step with the same parameters."""
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
        assert outcome.driven.hashes == outcomes[0].driven.hashes


def test_ranks_whose_tokens_choose_other_experts_agree(ranks):
    check_ranks_agree(ranks["few tokens per expert"])
    with pytest.raises(AssertionError, match="finished reduction"):
        check_ranks_agree(ranks["experts in a list"])


def test_a_static_graph_does_not_go_together_with_no_sync(ranks):
    """Unless a reduced pass comes first (as `warm_up_backward` is); then it gives other bits."""
    with pytest.raises(AssertionError, match="INTERNAL ASSERT FAILED"):
        check_ranks_agree(ranks["static graph, first pass unreduced"])


def check_buffers(outcomes: list[Outcome]) -> None:
    """Buffers that stood at the rank's number when training began have moved alike on every rank."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None
        assert outcome.driven.buffers
        for name, buffer in outcome.driven.buffers.items():
            assert torch.equal(buffer - rank, outcomes[0].driven.buffers[name])


def test_no_forward_pass_broadcasts_buffers(ranks):
    for launcher in ("torchrun", "accelerate"):
        check_buffers(ranks[f"{launcher} buffers"])
    with pytest.raises(AssertionError):
        check_buffers(ranks["broadcast buffers"])


def check_buffer_types(config: Config) -> None:
    """Buffers are real, and the saved ones are the router's biases alone."""
    model = Decoder(config.model)
    assert not any(buffer.is_complex() for buffer in model.buffers())
    saved = model.state_dict().keys() - {name for name, _ in model.named_parameters()} - {"lm_head.weight"}
    assert all(name.endswith("e_score_correction_bias") for name in saved), saved


@pytest.mark.parametrize("rate", [0.0, 0.125])
def test_there_is_no_rotary_buffer(rate, config):
    balanced = config(model={"router_bias_update_rate": rate})
    check_buffer_types(balanced)
    for fault in (COMPLEX_TABLE, PERSISTENT_TABLE):
        with pytest.MonkeyPatch.context() as patch:
            fault(patch)
            with pytest.raises(AssertionError):
                check_buffer_types(balanced)
