"""Silent errors of other frameworks (docs/traps.md): on a mesh, no promise holds with one of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.corpora import make_store
from support.rank_cases import Outcome, case_config, run_ranks
from support.stepping import Driven, micro_batches_of, reference_gradients, relative_error
from support.trap_plan import CASES, KINDS, RIGHT, TRAPS

pytestmark = pytest.mark.slow

Outcomes = dict[str, list[Outcome]]


@pytest.fixture(scope="module")
def packed_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token store of documents of which several fit in a sequence, with ragged loss masks."""
    folder = tmp_path_factory.mktemp("packed") / "store"
    return make_store(folder, documents=300, masked=True, longest=6).path


@pytest.fixture(scope="module")
def outcomes(packed_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_ranks(packed_store, tmp_path_factory.mktemp("traps"), plan="trap_plan", world_size=4)


def figures(ranks: list[Outcome], expected: Driven) -> dict[str, float]:
    """The largest relative errors of the ranks, each of which has the parameters of its stage.

    `gradients`: of any parameter. `losses`, `norms`: of the step. `sums`: of any sum that is logged.
    """
    assert [rank.error for rank in ranks] == [None] * 4
    (right,), (sums,) = expected.gradients, expected.sums
    errors: dict[str, list[float]] = {name: [] for name in ("gradients", "losses", "norms", "sums")}
    for rank in ranks:
        (gradients,) = rank.driven.gradients
        own = {name: right[name] for name in gradients}
        errors["gradients"] += [relative_error(gradients, own, name) for name in own]
        errors["losses"] += map(_error, rank.driven.losses, expected.losses)
        errors["norms"] += map(_error, rank.driven.grad_norms, expected.grad_norms)
        errors["sums"] += map(_error, rank.driven.sums[0], sums)
    assert {name for rank in ranks for name in rank.driven.gradients[0]} == right.keys()
    return {name: max(found) for name, found in errors.items()}


def _error(found: float | None, expected: float | None) -> float:
    assert found is not None
    assert expected is not None
    return abs(found - expected) / abs(expected) if expected else abs(found)


@pytest.mark.parametrize("kind", KINDS)
def test_data_parallelism_is_one_process(outcomes: Outcomes, packed_store: Path, kind: str):
    config = case_config(packed_store, CASES[kind])
    expected = reference_gradients(config, list(micro_batches_of(config, 0)))
    assert relative_error(outcomes[kind][0].driven.gradients[0], expected) <= 1e-12


@pytest.mark.parametrize("name", RIGHT)
def test_a_mesh_is_data_parallelism(outcomes: Outcomes, name: str):
    _, kind = RIGHT[name]
    found = figures(outcomes[name], outcomes[kind][0].driven)
    assert max(found.values()) <= 1e-12


@pytest.mark.parametrize("name", TRAPS)
def test_an_error_is_seen(outcomes: Outcomes, name: str):
    trap = TRAPS[name]
    found = figures(outcomes[name], outcomes[trap.kind][0].driven)
    assert found[trap.figure] >= trap.least
