"""Both launchers on two real processes give the same numbers, to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.launching import ROOT, Finished, assert_same_tensors, checkpoint_tensors, launch

STEPS = 8

CASES = {
    "dense-ragged-fp32": ("tiny-dense.yaml", "masked", "fp32", 24),
    "dense-ragged-bf16": ("tiny-dense.yaml", "masked", "bf16", 24),
    "quickstart-fp32": ("quickstart.yaml", "plain", "fp32", 32),
    "quickstart-bf16": ("quickstart.yaml", "plain", "bf16", 32),
}
"""name: (preset, store, precision, global batch size); the dense cases accumulate over 3 micro batches."""


def options(preset: str, store: Path, precision: str, global_batch_size: int) -> list[str]:
    return [
        *("--config", str(ROOT / "configs" / preset)),
        *("--data.sources", f"[{{store: {store}}}]"),
        *("--training.precision", precision),
        *("--training.global_batch_size", str(global_batch_size)),
        *("--training.max_steps", str(STEPS), "--schedule.warmup_steps", "2"),
        *("--evaluation.eval_steps", str(STEPS), "--evaluation.max_batches", "1"),
        *("--checkpoint.save_steps", "0", "--distributed.cpu_threads", "1"),
        *("--logging.logging_steps", "1", "--logging.wandb_mode", "disabled"),
    ]


@pytest.fixture(scope="module", params=CASES, ids=CASES.keys())
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Finished, Finished]:
    """The same run by both launchers."""
    preset, store, precision, global_batch_size = CASES[request.param]
    path = request.getfixturevalue(f"{store}_store")
    chosen = options(preset, path, precision, global_batch_size)
    folder = tmp_path_factory.mktemp(request.param)
    by_hand = launch("torchrun", 2, folder / "torchrun", chosen)
    return by_hand, launch("accelerate", 2, folder / "accelerate", chosen)


def test_rows_and_parameters_are_identical(pair: tuple[Finished, Finished]):
    by_hand, accelerated = pair
    rows = by_hand.exact_rows()
    assert set(rows) == set(range(STEPS + 1))
    assert rows == accelerated.exact_rows()
    left = checkpoint_tensors(by_hand.folder, STEPS)
    assert_same_tensors(left, checkpoint_tensors(accelerated.folder, STEPS))


def test_rows_say_what_happened(pair: tuple[Finished, Finished]):
    """The comparison compares something: losses fall, gradients are finite, digests differ by step."""
    for run in pair:
        rows = run.rows
        assert rows[STEPS]["train/loss"] < rows[1]["train/loss"]
        assert rows[STEPS]["eval/loss"] < rows[0]["eval/loss"]
        assert all(rows[step]["train/grad_norm"] > 0 for step in range(1, STEPS + 1))
        assert len({rows[step]["data/batch_sha256"] for step in range(1, STEPS + 1)}) == STEPS
        assert run.status["state"] == "finished"
        assert run.status["world_size"] == 2
    assert [run.status["launcher"] for run in pair] == ["torchrun", "accelerate"]
