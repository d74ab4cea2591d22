"""Saves in the background: the same numbers and the same files, with every way to keep the parameters.

What interrupts a save in the background is in the other files, beside what interrupts one that is waited for.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.interrupting import assert_exact
from support.launching import ROOT, Finished, assert_same_tensors, checkpoint_tensors, launch

pytestmark = pytest.mark.slow

ZERO = "--distributed.strategy deepspeed --distributed.zero_stage 2 --model.router_bias_update_rate 0"
CASES = {
    "torchrun": ("torchrun", "cpu2", ""),
    "accelerate": ("accelerate", "cpu2", ""),
    "torchrun fsdp": ("torchrun", "cpu2", "--distributed.strategy fsdp"),
    "accelerate fsdp": ("accelerate", "fsdp2", "--distributed.strategy fsdp"),
    "zero": ("accelerate", "zero2", ZERO),
}
"""name: launcher, Accelerate's file and options."""


def weights(folder: Path, step: int) -> bytes:
    return (folder / "weights" / f"step-{step:08d}" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("case", CASES)
def test_background_saves_change_no_bit(case: str, options: list[str], tmp_path: Path):
    """Rows, tensors of checkpoints, and the bytes of the weights."""
    launcher, file, changes = CASES[case]
    if case == "zero":
        pytest.importorskip("deepspeed")
    options = [*options, *changes.split(), "--training.max_steps", "12"]

    def run(name: str, *more: str) -> Finished:
        accelerate_file = ROOT / "configs" / "accelerate" / f"{file}.yaml"
        return launch(launcher, 2, tmp_path / name, [*options, *more], accelerate_file=accelerate_file)

    plain, background = run("sync"), run("async", "--checkpoint.async_save", "true")
    assert_exact(background, plain)
    for step in (8, 12):
        saved = [checkpoint_tensors(each.folder, step) for each in (background, plain)]
        assert_same_tensors(*saved)
        assert weights(background.folder, step) == weights(plain.folder, step)
    assert background.status["checkpoint"].endswith("step-00000012")
