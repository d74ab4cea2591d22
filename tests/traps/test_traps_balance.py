"""Traps of a balance loss over the whole global batch: three ranks, three micro batches each.

| trap | check |
|---|---|
| counts of one rank instead of all | gradients, three ranks |
| counting under data parallelism reduces something, or regroups its buckets | same bits on both paths |
"""

from __future__ import annotations

import pytest
from support.rank_cases import Outcome
from support.stepping import micro_batches_of, reference_gradients, relative_error

from llm_pretrain.config import Config


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
