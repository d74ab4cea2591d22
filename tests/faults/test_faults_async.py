"""Saves in the background: the same numbers, the same files, and nothing lost when the run ends meanwhile."""

from __future__ import annotations

import pytest
from support.interrupting import assert_exact
from support.launching import Finished, assert_same_tensors, checkpoint_tensors, launch

ASYNC = ["--checkpoint.async_save", "true"]


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("accelerate", marks=pytest.mark.slow)])
def test_background_saves_change_no_bit(launcher, options, undisturbed: Finished, tmp_path):
    run = launch(launcher, 2, tmp_path / "run", [*options, *ASYNC])
    assert_exact(run, undisturbed)
    for step in (20, 24):
        assert_same_tensors(
            checkpoint_tensors(run.folder, step), checkpoint_tensors(undisturbed.folder, step)
        )
        for file in ("model.safetensors", "config.json", "README.md"):
            ours, theirs = (
                (each / "weights" / f"step-{step:08d}" / file).read_bytes()
                for each in (run.folder, undisturbed.folder)
            )
            assert ours == theirs or file == "README.md", file
    assert run.status["state"] == "finished"
    assert run.status["checkpoint"].endswith("step-00000024")
