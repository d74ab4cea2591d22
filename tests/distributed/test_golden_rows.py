"""The golden rows of `tests/assets/golden_rows.jsonl` are what both launchers write today."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from golden_rows import (
    LAUNCHERS,
    MODELS,
    STEPS,
    WORLD_SIZES,
    GoldenSet,
    environment_of,
    first_difference,
    golden_rows,
    make_golden_store,
    out_of_bounds,
    read_sets,
    train_golden,
)
from support.launching import Finished
from support.rank_cases import slow_but

NAMES = [f"{model}-{world_size}" for model, world_size in product(MODELS, WORLD_SIZES)]
SETS = read_sets()
Runs = Callable[[str, str], Finished]
"""Name of a run, and a launcher -> the run."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_golden_store(tmp_path_factory.mktemp("golden"))


@pytest.fixture(scope="module")
def runs(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    @cache
    def run(name: str, launcher: str) -> Finished:
        model, _, world_size = name.partition("-")
        folder = tmp_path_factory.mktemp(f"{name}-{launcher}") / "run"
        return train_golden(launcher, int(world_size), model, store, folder)

    return run


@pytest.fixture(scope="module")
def own_set(runs: Runs) -> GoldenSet:
    """The set of this environment; the test is skipped without one."""
    environment = environment_of(runs(NAMES[0], LAUNCHERS[0]))
    for each in SETS:
        if each.environment == environment:
            return each
    pytest.skip(f"no golden rows of this environment, so no bits are compared: {environment}")


@pytest.mark.parametrize("name", slow_but(NAMES[-1:], NAMES))
def test_both_launchers_write_the_same_rows(runs: Runs, name: str):
    by_hand, accelerated = (golden_rows(runs(name, launcher)) for launcher in LAUNCHERS)
    assert list(by_hand) == list(range(1, STEPS + 1))
    assert first_difference(by_hand, accelerated) is None


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_those_of_every_set_but_for_rounding(runs: Runs, name: str):
    assert SETS
    for each in SETS:
        assert out_of_bounds(each.runs[name], golden_rows(runs(name, LAUNCHERS[0]))) is None


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_those_of_this_environment_bit_for_bit(runs: Runs, own_set: GoldenSet, name: str):
    assert first_difference(own_set.runs[name], golden_rows(runs(name, LAUNCHERS[0]))) is None


@pytest.mark.slow
def test_another_learning_rate_is_seen(runs: Runs, store: Path, tmp_path: Path):
    """One that differs by 1e-6 changes the first step's bits, and stays within the bounds."""
    fault = ("support.process_faults:multiply_the_learning_rate", [1 + 1e-6])
    near = golden_rows(train_golden("torchrun", 1, "dense", store, tmp_path / "near", before=[fault]))
    sound = golden_rows(runs("dense-1", "torchrun"))
    assert out_of_bounds(sound, near) is None
    assert (first_difference(sound, near) or "").startswith("step 1 train/parameters_sha256: ")
