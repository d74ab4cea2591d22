"""Sharded training by hand and through Accelerate: the same bits on both, up to a sum's order those of DDP.

All in two processes that are started once.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from support.fsdp_plan import CASES, KINDS
from support.launching import assert_same_tensors
from support.rank_cases import Outcome, has_slow, run_ranks, slow_but
from support.stepping import relative_error

Outcomes = dict[str, list[Outcome]]


QUICK = ("bf16 unclipped",)
QUICK_CASES = {
    "stays ddp",
    *(f"{path} {kind}" for path in ("torchrun", "accelerate", "ddp") for kind in QUICK),
}
"""The other kinds, and what is compared with them, are slow."""


@pytest.fixture(scope="module")
def outcomes(
    masked_store: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Outcomes:
    folder, names = tmp_path_factory.mktemp("fsdp"), None if has_slow(request) else QUICK_CASES
    return run_ranks(masked_store, folder, plan="fsdp_plan", world_size=2, names=names)


def test_what_is_right_runs_and_the_ranks_agree(outcomes: Outcomes):
    assert outcomes.keys() in (CASES.keys(), QUICK_CASES)
    for name, ranks in outcomes.items():
        assert all(rank.error is None for rank in ranks) == (name != "stays ddp"), name
        first, second = (rank.driven for rank in ranks)
        assert first.hashes == second.hashes, name
        assert first.grad_norms == second.grad_norms, name


@pytest.mark.parametrize("kind", slow_but(QUICK, [*KINDS, "long", "one rank NaN"]))
def test_both_paths_give_the_same_bits(outcomes: Outcomes, kind: str):
    by_hand, accelerated = (outcomes[f"{path} {kind}"][0] for path in ("torchrun", "accelerate"))
    assert by_hand.model_class == accelerated.model_class == "FSDPDecoder"
    left, right = by_hand.driven, accelerated.driven
    assert left.hashes
    assert left.hashes == right.hashes
    assert left.losses == right.losses
    assert left.grad_norms == right.grad_norms
    assert_same_tensors(left.buffers, right.buffers)


@pytest.mark.parametrize("kind", slow_but(QUICK, ["unclipped", "bf16 unclipped"]))
def test_two_ranks_give_the_bits_of_ddp_where_no_norm_is_summed(outcomes: Outcomes, kind: str):
    """Two ranks' gradients have one sum; the norm that clipping divides by is summed in another order."""
    for path in ("torchrun", "accelerate"):
        assert outcomes[f"{path} {kind}"][0].driven.hashes == outcomes[f"ddp {kind}"][0].driven.hashes


@pytest.mark.parametrize("kind", slow_but(QUICK, [*KINDS, "long", "long, experts"]))
def test_it_is_ddp_within_rounding(outcomes: Outcomes, kind: str):
    ddp = outcomes[f"ddp {kind}"][0]
    assert ddp.model_class == "DistributedDataParallel"
    sharded = outcomes[f"accelerate {kind}"][0].driven
    bound = 1e-5 if "bf16" not in str(KINDS.get(kind)) else 2e-3
    assert relative_error(sharded.parameters, ddp.driven.parameters) <= bound
    for left, right in zip(sharded.losses, ddp.driven.losses, strict=True):
        assert left is not None
        assert right is not None
        assert math.isclose(left, right, rel_tol=bound)


@pytest.mark.slow
def test_fp16_scales_its_loss_under_sharding_too(outcomes: Outcomes):
    """By hand alone: Accelerate has none on a CPU."""
    sharded, ddp = (outcomes[f"{name} fp16"][0].driven for name in ("torchrun", "ddp"))
    assert sharded.skipped == ddp.skipped
    assert sharded.skipped[-1] is None
    assert relative_error(sharded.parameters, ddp.parameters) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("path", ["torchrun", "accelerate"])
def test_one_rank_s_infinite_gradient_skips_the_step_on_all(outcomes: Outcomes, path: str):
    for rank in outcomes[f"{path} one rank NaN"]:
        assert rank.driven.skipped == ["nonfinite_gradient"] * 2
        assert rank.driven.updates == [0] * 2
        assert len(set(rank.driven.hashes)) == 1


def test_a_request_that_would_become_ddp_stops(outcomes: Outcomes):
    for rank in outcomes["stays ddp"]:
        assert rank.error is not None
        assert "distributed.strategy: fsdp, but Accelerate has set up ddp (MULTI_CPU)" in rank.error
