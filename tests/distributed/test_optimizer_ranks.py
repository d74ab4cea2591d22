"""Muon over several ranks: the same bits on both paths, sharded what it is whole, each matrix by one rank.

Training in two processes that are started once; steps on given gradients in two and in three.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
import torch
from support.muon_steps import HOW, SHAPES, STEPS, Stepped, on_ranks, take_steps
from support.optimizer_plan import CASES, KINDS
from support.rank_cases import Outcome, has_slow, run_ranks, slow_but
from support.stepping import relative_error
from torch import Tensor

Outcomes = dict[str, list[Outcome]]
Steps = dict[str, list[Stepped]]


QUICK = ("bf16, averaged",)
QUICK_CASES = {name for name in CASES if name.endswith(QUICK)}
"""The other kinds, and mistakes, are slow."""


@pytest.fixture(scope="module")
def outcomes(
    masked_store: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Outcomes:
    folder, names = tmp_path_factory.mktemp("optimizers"), None if has_slow(request) else QUICK_CASES
    return run_ranks(masked_store, folder, plan="optimizer_plan", world_size=2, names=names)


def test_every_case_runs_and_the_ranks_agree(outcomes: Outcomes):
    assert outcomes.keys() in (CASES.keys(), QUICK_CASES)
    for name, ranks in outcomes.items():
        assert [rank.error for rank in ranks] == [None, None], name
        first, second = (rank.driven for rank in ranks)
        assert first.hashes == second.hashes, name


@pytest.mark.parametrize("kind", slow_but(QUICK, KINDS))
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_both_paths_give_the_same_bits(outcomes: Outcomes, strategy: str, kind: str):
    by_hand, accelerated = (
        outcomes[f"{path} {strategy} {kind}"][0].driven for path in ("torchrun", "accelerate")
    )
    assert len(set(by_hand.hashes)) == 2  # an average that was looked at leaves the last one as it was
    assert by_hand.hashes == accelerated.hashes


@pytest.mark.parametrize("kind", slow_but(QUICK, [kind for kind in KINDS if kind != "clipped"]))
def test_sharded_muon_has_the_bits_of_whole_muon(outcomes: Outcomes, kind: str):
    """Where no norm is summed in another order, gradients have the same bits."""
    ddp, sharded = (outcomes[f"torchrun {strategy} {kind}"][0].driven for strategy in ("ddp", "fsdp"))
    assert ddp.hashes == sharded.hashes
    assert relative_error(sharded.first_moments, ddp.first_moments) == 0.0


def test_a_sharded_average_is_evaluated_as_a_whole_one(outcomes: Outcomes):
    runs = [outcomes[name][0].driven for name in CASES if name.endswith("averaged")]
    assert len(runs) == 4
    first = runs[0]
    assert first.averaged_loss is not None
    for run in runs:
        assert run.averaged_loss == first.averaged_loss
        assert relative_error(run.averages, first.averages) == 0.0
        assert relative_error(run.averages, run.parameters) > 1e-3


@pytest.mark.slow
def test_with_clipping_it_is_whole_muon_within_rounding(outcomes: Outcomes):
    """The bound is that of products in bf16, whose rounding a norm's last bit may turn."""
    ddp, sharded = (outcomes[f"torchrun {strategy} clipped"][0].driven for strategy in ("ddp", "fsdp"))
    assert relative_error(sharded.parameters, ddp.parameters) <= 5e-3


@pytest.fixture(scope="module", params=slow_but([3], [3, 4]))
def stepped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Steps:
    """On four ranks what is sharded has two replicas."""
    return on_ranks(request.param, tmp_path_factory.mktemp("steps"))


@pytest.fixture(scope="module")
def alone() -> dict[str, Stepped]:
    return {how: take_steps(how) for how in HOW}


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def work(sides: tuple[int, int]) -> int:
    """Half of the operations of an iteration."""
    small, large = sorted(sides)
    return 2 * small**2 * large + small**3


@pytest.mark.parametrize("how", HOW)
def test_every_rank_ends_where_one_process_does(stepped: Steps, alone: dict[str, Stepped], how: str):
    first, *others = stepped[how]
    for rank in others:
        assert same(rank.parameters, first.parameters)
        assert same(rank.momenta, first.momenta)
    assert same(first.momenta, alone[how].momenta)
    # fp32: the bound of exactness.md. bf16: a rounding may turn where a library multiplies other batches.
    bound = 5e-3 if "bf16" in how else 1e-6
    for own, expected in zip(first.parameters, alone[how].parameters, strict=True):
        assert float((own - expected).norm() / expected.norm()) <= bound


@pytest.mark.parametrize("how", HOW)
def test_a_step_that_found_an_infinity_changes_nothing_on_any_rank(stepped: Steps, how: str):
    for rank in stepped[how]:
        assert same(rank.after_skip, rank.parameters + rank.momenta)
        assert set(rank.counted) == {STEPS}


@pytest.mark.parametrize("how", HOW)
def test_each_matrix_is_orthogonalised_once_and_the_work_is_balanced(
    stepped: Steps, alone: dict[str, Stepped], how: str
):
    ranks = [rank.products for rank in stepped[how]]
    assert sorted(chain(*ranks)) == sorted(alone[how].products)
    # a sharded stack of experts is not divided: each rank updates those that it holds
    divided = [[sides for sides in rank if "sharded" not in how or sides in SHAPES] for rank in ranks]
    loads = [sum(map(work, rank)) for rank in divided]
    assert max(loads) - min(loads) <= max(map(work, chain(*divided)))
