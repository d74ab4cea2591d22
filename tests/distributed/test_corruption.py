"""Silent data corruption on one rank is found and located; checks do not change a sound run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.corruption_plan import EXPERTS, FOUR, MATRIX, SOUND, SOUND_FOUR, SOUND_TORCHRUN, TWO
from support.launching import assert_same_tensors
from support.rank_cases import Outcome, has_slow, run_ranks, slow_but

PATHS = ("torchrun", "accelerate")
QUICK = {"torchrun ddp, activation", "torchrun ddp, parameter", "accelerate ddp, gradient once"}
FLIPPED = [name for name in TWO if name[-1] not in "01"]
NAMES = {
    "activation": "output of model.layers.1",
    "gradient": f"gradient of {MATRIX}",
    "parameter": MATRIX,
    "moment": f"exp_avg of {MATRIX}",
    "output gradient": "gradient of the output of model.layers.1",  # the other stage's differs after it
}


@pytest.fixture(scope="module")
def two(
    masked_store: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, list[Outcome]]:
    """Both ranks' outcomes; without slow tests only those that the quick ones need."""
    names = TWO.keys() if has_slow(request) else QUICK
    folder = tmp_path_factory.mktemp("two")
    return run_ranks(masked_store, folder, plan="corruption_plan", world_size=2, names=names)


@pytest.fixture(scope="module")
def four(masked_store: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    folder = tmp_path_factory.mktemp("four")
    return run_ranks(masked_store, folder, plan="corruption_plan", world_size=4, names=FOUR.keys())


def check_found(outcomes: list[Outcome], kind: str, *ranks: int, name: str | None = None) -> None:
    """All ranks stop at step 4 with one message, or go on with a warning that the fault was not repeated."""
    name = name or NAMES[kind.removesuffix(" once")]
    texts = set()
    for rank, outcome in enumerate(outcomes):
        if kind.endswith("once"):
            assert outcome.error is None, rank
            assert outcome.driven.checks == [None, "passed", None, "transient"]
            (text,) = outcome.driven.warnings
            assert text.endswith("training goes on, but replace the device")
        else:
            text = outcome.error or ""
            assert text.startswith("CorruptionError: training.check_every: silent data corruption"), text
            assert "it did not go away when repeated" in text
        texts.add(text)
    (text,) = texts
    assert "silent data corruption at step 4, rank " in text
    assert re.findall(r"rank (\d+) \(cpu\S* of ", text) == [str(rank) for rank in ranks], text
    assert f": {name} differs " in text, text


def check_same_training(checked: list[Outcome], plain: list[Outcome]) -> None:
    """The same bits of all numbers, with every step checked and with none."""
    for left, right in zip(checked, plain, strict=True):
        assert (left.error, right.error) == (None, None)
        assert left.driven.checks == ["passed"] * 4
        assert right.driven.checks == [None] * 4
        assert left.driven.warnings == []
        for name in ("losses", "sums", "grad_norms", "skipped", "hashes", "digests", "rates", "scaler"):
            assert getattr(left.driven, name) == getattr(right.driven, name), name
        assert len(set(left.driven.hashes)) == 4
        for name in ("parameters", "first_moments", "buffers", "averages"):
            assert_same_tensors(getattr(left.driven, name), getattr(right.driven, name))


@pytest.mark.parametrize("name", slow_but(QUICK, FLIPPED))
def test_a_flipped_bit_on_one_of_two_ranks(two: dict[str, list[Outcome]], name: str):
    kind = name.rpartition(", ")[2]
    check_found(two[name], kind, *((0, 1) if kind in ("parameter", "moment") else (1,)))


SOUND_NAMES = [f"{path} {kind}" for path in PATHS for kind in SOUND]
SOUND_NAMES += [f"torchrun {kind}" for kind in SOUND_TORCHRUN]


@pytest.mark.slow
@pytest.mark.parametrize("name", SOUND_NAMES)
def test_checks_change_no_bit(two: dict[str, list[Outcome]], name: str):
    check_same_training(two[f"{name}, 1"], two[f"{name}, 0"])
    if "fp16" in name:
        assert two[f"{name}, 1"][0].driven.scaler["_growth_tracker"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_the_minority_of_four_ranks_is_named(four: dict[str, list[Outcome]], path: str):
    check_found(four[f"{path} ddp, parameter"], "parameter", 1)
    check_found(four[f"{path} ddp, moment"], "moment", 1)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_meshes(four: dict[str, list[Outcome]], path: str):
    for kind in ("activation", "gradient", "activation once", "gradient once"):
        check_found(four[f"{path} hsdp, {kind}"], kind, 1)
    for kind in ("parameter", "moment"):
        check_found(four[f"{path} hsdp, {kind}"], kind, 1, 3)
    check_found(four[f"{path} ep hsdp, parameter"], "parameter", 1, 3, name=EXPERTS)
    check_found(four[f"{path} ep hsdp, moment"], "moment", 1, 3, name=f"exp_avg of {EXPERTS}")
    for kind in SOUND_FOUR:
        check_found(four[f"{path} {kind}, activation"], "activation", 1)
        check_found(four[f"{path} {kind}, gradient"], "gradient", 1)
        check_same_training(four[f"{path} {kind}, 1"], four[f"{path} {kind}, 0"])
