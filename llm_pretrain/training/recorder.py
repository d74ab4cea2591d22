"""What a run tells the world: one row per logged step, to metrics.jsonl, the console and the trackers."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress

import torch

from llm_pretrain.config import Config
from llm_pretrain.errors import OutputError
from llm_pretrain.model import flops_per_token
from llm_pretrain.tracking import Console, MetricsWriter, Trackers, device_peak_flops, memory_bytes
from llm_pretrain.training.engine import Engine, FinishedStep
from llm_pretrain.training.objective import DIGEST_WORDS, loss_metrics, source_metrics
from llm_pretrain.training.parameter_digest import parameters_sha256
from llm_pretrain.training.progress import Progress
from llm_pretrain.training.run_folder import RunFolder


class Recorder:
    """Collects a step's figures and writes them when a row is due.

    Files, console and trackers exist on rank 0 alone; the other ranks only keep what a checkpoint needs.
    """

    def __init__(self, config: Config, engine: Engine, folder: RunFolder, progress: Progress):
        self.config, self.engine, self.progress = config, engine, progress
        first = engine.rank == 0
        self.console = Console(
            config, enabled=first, start_step=progress.step, max_steps=config.training.max_steps
        )
        self.metrics = MetricsWriter(folder.metrics, resume_step=progress.step) if first else None
        self.trackers = Trackers(
            config,
            folder.path,
            progress.wandb_id,
            enabled=first,
            first_step=progress.step + 1 if progress.step else 0,
            warn=self.console.warning,
        )
        progress.wandb_id = self.trackers.wandb_id
        self.hurried = False
        """Whether a signal ends the run, so that its end must not take long."""
        self.failure: OutputError | None = None
        self._row: dict[str, object] = {}
        self._due, self._step = False, progress.step
        self._peak_flops = device_peak_flops(_device_name(engine.device))
        self._clock, self._interval = _Clock(), _Interval()

    def is_logged(self, step: int) -> bool:
        """Whether a row is due after this step, whatever becomes of it."""
        return step % self.config.logging.logging_steps == 0

    def lap(self) -> float:
        """Seconds since the last lap, or since the clock was restarted."""
        return self._clock.lap()

    def step(self, finished: FinishedStep) -> None:
        """Take in one finished step, each in its turn; `progress` has learnt its result."""
        result, self._step = finished.result, finished.step
        self._interval.add(finished)
        self._due = self.is_logged(finished.step)
        self._due = self._due or bool(result.skipped) or result.spike is not None
        if not self._due:
            return
        losses = (
            {"train/loss": None}
            if result.sums is None
            else loss_metrics(result.sums, result.counts.num_loss_tokens, self.config)
        )
        self._row |= losses | source_metrics(result.sums, self.config)
        self._row |= {
            "train/grad_norm": result.grad_norm,
            "train/learning_rate": finished.learning_rate,
            "train/loss_tokens": result.counts.num_loss_tokens,
            "train/tokens": finished.tokens_seen,
            "train/loss_scale": self.engine.scaler.get_scale() if self.engine.scaler else None,
            "train/skipped": result.skipped,
            "data/batch_sha256": _hex(self.progress.take_digest()),
            **self._performance(),
        }
        if result.spike is not None:
            self._row["train/spike"] = result.spike.of
            done = f"skipped ({result.skipped})" if result.skipped else "only logged"
            self.console.warning(f"step {self._step}, {done}: spike in {result.spike.text}")
        if self.config.logging.parameters_sha256:
            model, _ = self.engine.model_and_optimizer()
            self._row["train/parameters_sha256"] = parameters_sha256(model, first=self.engine.rank == 0)

    def evaluation(self, metrics: Mapping[str, float | None]) -> None:
        """Add evaluation metrics to the current step's row."""
        self._row |= metrics
        self._due, self._step = True, self.progress.step

    def flush(self) -> None:
        """Write the current step's row, if one is due.

        One that cannot be written is kept as `failure`, for all ranks to end together.
        """
        if self._due:
            row: dict[str, object] = {"step": self._step, "time": time.time()} | {
                key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in self._row.items()
            }
            if self.metrics is not None:
                try:
                    self.metrics.append(row)
                except OutputError as error:
                    self.failure = error
            self.console.row(row)
            self.trackers.log(row)
        self._row, self._due = {}, False

    def check(self) -> None:
        """Raise the failure to write a row, where there was one."""
        if self.failure is not None:
            raise self.failure

    def sync(self) -> None:
        """Let the rows so far outlive a power cut; a checkpoint of their step may then be committed."""
        if self.metrics is not None:
            self.metrics.sync()

    def restart_clock(self) -> None:
        """Leave out what happened since the last step (evaluation, saving) from the step times."""
        self._clock.lap()

    def close(self) -> None:
        """Close metrics file, console and trackers."""
        if self.metrics is not None:
            with nullcontext() if self.failure is None else suppress(OSError, OutputError):
                self.metrics.close()
        self.trackers.close(0 if sys.exc_info()[0] is None else 1, hurried=self.hurried)
        self.console.close()  # last, since trackers may have to warn

    def _performance(self) -> dict[str, float | None]:
        interval, self._interval = self._interval, _Interval()
        training = self.config.training
        step_seconds = interval.seconds / interval.steps
        positions = training.global_batch_size * training.sequence_length
        mfu = None
        if self._peak_flops:
            flops = flops_per_token(self.config.model, training.sequence_length) * positions
            mfu = flops / step_seconds / (self._peak_flops * self.engine.world_size)
        return {
            "perf/tokens_per_second": interval.tokens / interval.seconds,
            "perf/step_seconds": step_seconds,
            "perf/mfu": mfu,
            "perf/memory_bytes": memory_bytes(self.engine.device),
        }


class _Clock:
    """Tells the time between its laps."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def lap(self) -> float:
        before, self._since = self._since, time.perf_counter()
        return self._since - before


class _Interval:
    """Steps, loss tokens and seconds since the last row."""

    def __init__(self) -> None:
        self.steps = self.tokens = 0
        self.seconds = 0.0

    def add(self, finished: FinishedStep) -> None:
        self.steps += 1
        self.tokens += finished.result.counts.num_loss_tokens
        self.seconds += finished.seconds


def _hex(digest: list[int]) -> str:
    assert len(digest) == DIGEST_WORDS
    return "".join(f"{word & 0xFFFF_FFFF:08x}" for word in digest)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
