"""`train/parameters_sha256`: every bit of every parameter counts, and nothing else."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from support.launching import Finished, checkpoint_tensors, train_tiny
from torch import nn

from llm_pretrain.training.recorder import parameters_sha256

STEPS = 3


@pytest.fixture(scope="module")
def run(plain_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return train_tiny(
        plain_store,
        tmp_path_factory.mktemp("digest") / "run",
        *("--training.max_steps", str(STEPS), "--schedule.warmup_steps", "1", "--evaluation.eval_steps", "0"),
        *("--checkpoint.save_steps", "1", "--logging.parameters_sha256", "true"),
    )


def test_a_row_has_the_digest_of_the_parameters_after_its_step(run: Finished):
    from llm_pretrain.checkpoints.opening import open_model

    digests = {step: row["train/parameters_sha256"] for step, row in run.rows.items()}
    assert len(set(digests.values())) == STEPS
    for step in (STEPS - 1, STEPS):
        model = open_model(run.folder / "checkpoints" / f"step-{step:08d}").model
        saved = checkpoint_tensors(run.folder, step)
        together = b"".join(saved[name].numpy().tobytes() for name, _ in model.named_parameters())
        assert digests[step] == hashlib.sha256(together).hexdigest()


def test_a_single_bit_changes_it_and_a_buffer_does_not():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to(torch.bfloat16)
    model.register_parameter("scalar", nn.Parameter(torch.tensor(1.0)))
    before = parameters_sha256(model, is_rank0=True)
    model[1].running_mean.add_(1)  # type: ignore[union-attr]  # a buffer
    assert parameters_sha256(model, is_rank0=True) == before
    with torch.no_grad():
        model[0].weight.view(torch.int16)[1, 2] ^= 1  # type: ignore[union-attr]
    assert parameters_sha256(model, is_rank0=True) != before


def test_it_is_none_where_a_back_end_leaves_empty_parameters():
    model = nn.Linear(2, 2)
    model.weight.ds_id = 0  # type: ignore[attr-defined]  # as DeepSpeed marks them
    assert parameters_sha256(model, is_rank0=True) is None
