"""The same global batch, split over ranks, micro batches and accumulation in different ways."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from support.launching import Finished, launch, run_options

STEPS = 2
SPLITS = {"1x4": (1, 3), "2x2": (2, 3), "1x2, larger micro batches": (1, 6)}
"""name: (world size, micro batch size) of a global batch of 12 sequences."""


@pytest.fixture(scope="module")
def runs(
    plain_store: Path, masked_store: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Finished]:
    folder = tmp_path_factory.mktemp("splits")
    shared = run_options(
        "tiny-moe",
        masked_store,
        f"training.global_batch_size=12 training.max_steps={STEPS} training.z_loss_coef=1e-4 "
        f"evaluation.eval_steps={STEPS} checkpoint.save_steps=0",
        *(
            "--data.sources",
            f"[{{store: {plain_store}, name: plain}}, {{store: {masked_store}, name: ragged}}]",
        ),
    )
    return {
        name: launch(
            "torchrun",
            world_size,
            folder / f"split{index}",
            [*shared, "--training.micro_batch_size", str(micro_batch_size)],
        )
        for index, (name, (world_size, micro_batch_size)) in enumerate(SPLITS.items())
    }


@pytest.mark.parametrize("name", list(SPLITS)[1:])
def test_same_samples_and_losses_at_every_split(runs: dict[str, Finished], name: str):
    reference, other = runs["1x4"].rows, runs[name].rows
    assert set(reference) == set(other) == set(range(STEPS + 1))
    for step in range(1, STEPS + 1):
        for key in ("data/batch_sha256", "train/loss_tokens", "train/tokens"):
            assert reference[step][key] == other[step][key], (step, key)
        for key in ("train/loss", "train/aux_loss", "train/z_loss", "train/router_z_loss"):
            assert math.isclose(reference[step][key], other[step][key], rel_tol=1e-5), (step, key)


def test_evaluation_is_the_same_at_every_split(runs: dict[str, Finished]):
    """Untrained, so that only the evaluation can differ: identical over ranks, rounding over batch sizes."""
    first = {name: run.rows[0]["eval/loss"] for name, run in runs.items()}
    assert first["1x4"] == first["2x2"]
    assert math.isclose(first["1x4"], first["1x2, larger micro batches"], rel_tol=1e-6)
