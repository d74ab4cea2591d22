"""The golden rows of `tests/assets/golden_rows.jsonl` are what both launchers write today."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

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

NAMES = [f"{model}-{world_size}" for model, world_size in product(MODELS, WORLD_SIZES)]
SETS = read_sets()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_golden_store(tmp_path_factory.mktemp("golden"))


@pytest.fixture(scope="module")
def runs(store: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Finished]:
    """Every launch, by the run's name and the launcher."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        (f"{model}-{world_size}", launcher): train_golden(
            launcher, world_size, model, store, folder / f"{model}-{world_size}-{launcher}"
        )
        for model, world_size, launcher in product(MODELS, WORLD_SIZES, LAUNCHERS)
    }


@pytest.fixture(scope="module")
def own_set(runs: dict[tuple[str, str], Finished]) -> GoldenSet:
    """The set of this environment; the test is skipped without one."""
    environment = environment_of(runs[NAMES[0], LAUNCHERS[0]])
    for each in SETS:
        if each.environment == environment:
            return each
    pytest.skip(f"no golden rows of this environment, so no bits are compared: {environment}")


@pytest.mark.parametrize("name", NAMES)
def test_both_launchers_write_the_same_rows(runs: dict[tuple[str, str], Finished], name: str):
    by_hand, accelerated = (golden_rows(runs[name, launcher]) for launcher in LAUNCHERS)
    assert list(by_hand) == list(range(1, STEPS + 1))
    assert first_difference(by_hand, accelerated) is None


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_those_of_every_set_but_for_rounding(runs: dict[tuple[str, str], Finished], name: str):
    assert SETS
    for each in SETS:
        assert out_of_bounds(each.runs[name], golden_rows(runs[name, LAUNCHERS[0]])) is None


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_those_of_this_environment_bit_for_bit(
    runs: dict[tuple[str, str], Finished], own_set: GoldenSet, name: str
):
    assert first_difference(own_set.runs[name], golden_rows(runs[name, LAUNCHERS[0]])) is None


def test_another_learning_rate_is_seen(runs: dict[tuple[str, str], Finished], store: Path, tmp_path: Path):
    """A rate that differs by 1e-3 leaves the bounds; one that differs by 1e-6 changes the first step's bits.

    The rows are compared with today's, which the tests above compare with the file's.
    """

    def rows_at(factor: float) -> dict[int, dict[str, Any]]:
        fault = ("support.process_faults:multiply_the_learning_rate", [factor])
        folder = tmp_path / str(factor)
        return golden_rows(train_golden("torchrun", 1, "dense", store, folder, before=[fault]))

    sound = golden_rows(runs["dense-1", "torchrun"])
    far, near = rows_at(1 + 1e-3), rows_at(1 + 1e-6)
    assert (out_of_bounds(sound, far) or "").startswith("step 2 train/")
    assert out_of_bounds(sound, near) is None
    assert (first_difference(sound, near) or "").startswith("step 1 train/parameters_sha256: ")


def test_a_token_of_another_expert_widens_the_bounds_from_its_step_on():
    rows = SETS[0].runs["mixture-1"]
    changed = {step: dict(row) for step, row in rows.items()}
    changed[3]["train/loss"] *= 1 + 1e-4
    assert (out_of_bounds(rows, changed) or "").startswith("step 3 train/loss: ")
    first, second, *others = rows[3]["moe/load"][0]
    changed[3]["moe/load"] = [[first + 1e-3, second - 1e-3, *others], *rows[3]["moe/load"][1:]]
    assert out_of_bounds(rows, changed) is None
    changed[4]["data/batch_sha256"] = "another"
    assert (out_of_bounds(rows, changed) or "").startswith("step 4 data/batch_sha256: ")
    changed[2]["train/loss"] *= 1 + 1e-4
    assert (out_of_bounds(rows, changed) or "").startswith("step 2 train/loss: ")
