"""Whole trainings of a preset whose evaluation losses are compared. No benchmark by itself.

The run is the one that users start, `pretrain` with the torchrun engine, in this process and on one thread.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import ROOT
from llm_pretrain.config import Config, load_config
from llm_pretrain.distributed.process import prepare_process
from llm_pretrain.tracking import read_metrics
from llm_pretrain.training import pretrain
from train_pretrain import TorchrunEngine

QUIET = ["--evaluation.sample_prompts", "[]", "--logging.wandb_mode", "disabled", "--logging.report", "false"]
QUIET += ["--checkpoint.save_steps", "0", "--checkpoint.keep_best", "false"]
QUIET += ["--distributed.cpu_threads", "1"]
"""Options that change no number of a training and leave out what is not wanted of it here."""


@dataclass(frozen=True)
class TrainingRun:
    """What came of a training.

    Args:
        losses: Evaluation loss after so many steps, in nats per token.
        cpu_seconds: Of the whole run, its evaluations included.
    """

    losses: dict[int, float]
    cpu_seconds: float

    @property
    def final_loss(self) -> float:
        """After the last step."""
        return self.losses[max(self.losses)]


def preset_config(preset: str, store: Path, folder: Path, options: Sequence[str] = ()) -> Config:
    """A preset of configs/ on `store` as it stands there, but for `options`; the run's folder is `folder`.

    Raises ConfigError for options that do not go together.
    """
    source = f'[{{"store": "{store}"}}]'
    config = str(ROOT / "configs" / f"{preset}.yaml")
    fixed = ["--config", config, "--data.sources", source, "--run.output_dir", str(folder)]
    return load_config([*fixed, *QUIET, *options])


def train(preset: str, store: Path, options: Sequence[str] = ()) -> TrainingRun:
    """Train a preset from the beginning; nothing of the run is kept."""
    with tempfile.TemporaryDirectory() as temporary, open(os.devnull, "w") as nowhere:
        config = preset_config(preset, store, Path(temporary) / "run", options)
        prepare_process(config)
        before = time.process_time()
        with redirect_stdout(nowhere):
            if code := pretrain(config, TorchrunEngine(config)):
                raise SystemExit(code)  # stopped by a signal: half a run is compared with nothing
        seconds = time.process_time() - before
        rows = read_metrics(config.run.folder / "metrics.jsonl")
    return TrainingRun({row["step"]: row["eval/loss"] for row in rows if "eval/loss" in row}, seconds)
