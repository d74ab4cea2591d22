"""A small run that the tests of the commands share."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.launching import ROOT, Finished, train


@pytest.fixture(scope="session")
def trained_run(plain_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A finished run of the tiny mixture of experts in fp32, saved after steps 4 and 6."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    code = train(
        *(
            "--config",
            str(ROOT / "configs" / "tiny-moe.yaml"),
            "--data.sources",
            f"[{{store: {plain_store}}}]",
        ),
        *("--run.output_dir", str(folder), "--training.max_steps", "6", "--schedule.warmup_steps", "2"),
        *("--evaluation.eval_steps", "2", "--evaluation.max_batches", "2", "--checkpoint.save_steps", "2"),
        *("--distributed.cpu_threads", "1", "--logging.wandb_mode", "disabled"),
    )
    assert code == 0
    return Finished(code, "", folder)
