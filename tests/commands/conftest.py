"""A small run that the tests of the commands share."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.launching import Finished, train_tiny


@pytest.fixture(scope="session")
def trained_run(plain_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Six steps, saved after steps 4 and 6."""
    return train_tiny(
        plain_store,
        tmp_path_factory.mktemp("trained") / "run",
        *("--training.max_steps", "6", "--schedule.warmup_steps", "2", "--checkpoint.save_steps", "2"),
        *("--evaluation.eval_steps", "2", "--evaluation.max_batches", "2"),
    )
