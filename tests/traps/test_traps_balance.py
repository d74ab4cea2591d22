"""Traps of a balance loss over the whole global batch: three ranks, three micro batches each.

| trap | check |
|---|---|
| counts of one rank instead of all | gradients, three ranks |
| counts of each micro batch, summed over ranks; of the micro batches so far | gradients |
| counting under data parallelism reduces something, or regroups its buckets | same bits on both paths |
"""

from __future__ import annotations

import pytest
from support.engines import run_engine
from support.faults import COUNTS_APART, COUNTS_SO_FAR, Fault
from support.rank_cases import Outcome
from support.stepping import micro_batches_of, reference_gradients, relative_error

from llm_pretrain.config.tree import Config

OTHER_COUNTS = {"of each micro batch": COUNTS_APART, "so far": COUNTS_SO_FAR}


def check_gradients(outcomes: list[Outcome], config: Config) -> None:
    """Every rank's first update has the gradients of one forward pass of the whole global batch."""
    expected = reference_gradients(config, list(micro_batches_of(config, 0)))
    for outcome in outcomes:
        assert outcome.error is None
        for part in ("", "mlp.gate"):
            error = relative_error(outcome.driven.gradients[0], expected, part)
            assert error < 1e-6, f"gradients of parameters {part!r} are off by {error:.1%}"


def test_ranks_balance_over_the_whole_batch(ranks, rank_config):
    for case in ("torchrun global balance", "accelerate global balance"):
        check_gradients(ranks[case], rank_config(case))
    assert ranks["counts of one rank"][0].error is None, "the trap is silent"
    with pytest.raises(AssertionError, match="are off by"):
        check_gradients(ranks["counts of one rank"], rank_config("counts of one rank"))


def test_both_paths_balance_with_the_same_bits(ranks):
    one = ranks["torchrun global balance"][0].driven
    assert len(set(one.hashes)) == 2
    for case in ("torchrun global balance", "accelerate global balance"):
        for outcome in ranks[case]:
            other = outcome.driven
            assert other.hashes == one.hashes
            assert (other.losses, other.grad_norms) == (one.losses, one.grad_norms)


def check_balance(config: Config, *faults: Fault) -> None:
    """One process that accumulates has the router's gradients of the whole global batch at once."""
    window = list(micro_batches_of(config, 0))
    gradients = run_engine("torchrun", config, *faults, windows=[window]).gradients[0]
    error = relative_error(gradients, reference_gradients(config, window), "mlp.gate")
    assert error < 1e-6, f"the router's gradients are off by {error:.1%}"


@pytest.mark.parametrize("counts", OTHER_COUNTS)
def test_other_counts_are_seen(counts, config):
    balanced = config(
        model={"router_aux_loss_scope": "global_batch", "router_aux_loss_coef": 1.0},
        training={"max_grad_norm": 0.0},
    )
    check_balance(balanced)
    with pytest.raises(AssertionError, match="are off by"):
        check_balance(balanced, OTHER_COUNTS[counts])
