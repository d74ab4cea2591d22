"""TensorBoard event files: they hold the numbers of metrics.jsonl, as wandb gets them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.run_folders import training_row

from llm_pretrain.config.loading import from_dict
from llm_pretrain.config.tree import Config
from llm_pretrain.runs.rows import MetricsWriter, read_metrics
from llm_pretrain.tracking.trackers import Trackers

pytest.importorskip("tensorboard", reason="needs tensorboard (extra `tensorboard`)")


def config(**more: Any) -> Config:
    return from_dict({"logging": {"wandb_mode": "disabled", "tensorboard": True} | more})


def scalars(run: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]
    }


def track(run: Path, rows: list[dict[str, Any]], first_step: int, **options: Any) -> None:
    tracked = Trackers(config(), run, None, True, first_step=first_step, **options)
    with MetricsWriter(run / "metrics.jsonl") as metrics:
        for row in rows:
            metrics.append(row)
            tracked.log(row)
    tracked.close(0)


def test_event_files_hold_every_number_of_metrics(tmp_path):
    rows = [training_row(step, layers=2, experts=4) for step in range(1, 21)]
    rows[4] |= {"train/loss": None, "train/skipped": "overflow", "train/grad_norm": float("inf")}
    rows[9] |= {"eval/loss": 3.0, "data/batch_sha256": "00"}
    track(tmp_path, rows, 0)
    found, expected = scalars(tmp_path), {}
    for row in rows:
        for key, value in row.items():
            if key not in ("step", "time") and isinstance(value, int | float) and math.isfinite(value):
                expected.setdefault(key, {})[row["step"]] = float(np.float32(value))
    assert found == expected
    assert len(found["train/loss"]) == 19
    assert found["eval/loss"] == {10: 3.0}
    assert {"moe/load", "step", "time", "train/skipped", "data/batch_sha256"}.isdisjoint(found)


def test_a_resumed_run_replaces_the_steps_that_it_repeats(tmp_path):
    """An attempt died after step 9; the next resumes from the checkpoint of step 5 with other losses."""
    track(tmp_path, [{"step": step, "train/loss": float(step)} for step in range(10)], 0)
    again = [{"step": step, "train/loss": 100.0 + step} for step in range(6, 9)]
    track(tmp_path, again, 6)
    found = scalars(tmp_path)["train/loss"]
    assert found == {step: float(step) if step < 6 else 100.0 + step for step in range(9)}


def test_a_writer_that_fails_gives_one_warning(tmp_path, monkeypatch):
    """At once, where a file is in the folder's way, or later; rows go on."""
    from torch.utils.tensorboard import SummaryWriter

    def add_scalar(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(SummaryWriter, "add_scalar", add_scalar)
    for name, said in (("early", "TensorBoard is left out from here on: "), ("late", "no space left")):
        warnings: list[str] = []
        (tmp_path / name).mkdir()
        if name == "early":
            (tmp_path / name / "tensorboard").write_text("in the way")
        track(tmp_path / name, [training_row(1), training_row(2)], 0, warn=warnings.append)
        (warning,) = warnings
        assert said in warning
        assert len(read_metrics(tmp_path / name / "metrics.jsonl")) == 2
