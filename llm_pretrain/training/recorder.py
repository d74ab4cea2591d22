"""Metrics of a run: one row per logged step, written to metrics.jsonl, the console and the trackers."""

from __future__ import annotations

import hashlib
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Module

from llm_pretrain.config.loading import dump_yaml, to_dict
from llm_pretrain.config.tree import Config
from llm_pretrain.errors import OutputError
from llm_pretrain.files import replace_text
from llm_pretrain.hardware import device_peak_flops, environment, memory_bytes
from llm_pretrain.model.sizes import count_parameters, flops_per_token
from llm_pretrain.runs.folder import RunFolder
from llm_pretrain.runs.rows import MetricsWriter
from llm_pretrain.tracking.trackers import Console, Trackers
from llm_pretrain.training.decision import Decision
from llm_pretrain.training.engine import DIGEST_WORDS, Engine
from llm_pretrain.training.kernel_choice import KernelChoice
from llm_pretrain.training.progress import Progress
from llm_pretrain.training.step import Step, StepSums

if TYPE_CHECKING:
    from llm_pretrain.distributed.pipeline import Pipeline

MAX_PENDING = 32
"""Most steps that are recorded together; a divergence is detected at most this many steps late."""


OnRow = Callable[[Mapping[str, object]], object]
"""Gets each row of metrics after it was written."""


class Recorder:
    """Collects the metrics of steps and writes a row when it is due.

    While decisions stay on the device, up to `MAX_PENDING` steps are read back and recorded together, so that
    the host does not wait for the GPU at every step. File, console and trackers exist on rank 0 only.

    Args:
        config, engine, folder, progress: Those of the run.
        decision: The run's decision on a step.
        must_settle: Returns whether all steps must be recorded by the end of the step with this number, for
            an evaluation, a checkpoint or a check.
        on_row: Called on rank 0 with each row.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        folder: RunFolder,
        progress: Progress,
        decision: Decision,
        must_settle: Callable[[int], bool],
        on_row: OnRow | None = None,
    ):
        self._on_row = on_row
        self.config, self.engine, self.progress, self.decision = config, engine, progress, decision
        self._must_settle, self._pending = must_settle, list[Step]()
        is_rank0 = engine.rank == 0
        self.console = Console(
            config, enabled=is_rank0, start_step=progress.step, max_steps=config.training.max_steps
        )
        self.metrics = MetricsWriter(folder.metrics, resume_step=progress.step) if is_rank0 else None
        self.trackers = Trackers(
            config,
            folder.path,
            progress.wandb_id,
            enabled=is_rank0,
            first_step=progress.step + 1 if progress.step else 0,
            warn=self.console.warning,
        )
        progress.wandb_id = self.trackers.wandb_id
        self.hurried = False
        """Whether a signal ends the run, so that trackers must close quickly."""
        self.failure: OutputError | None = None
        self._row: dict[str, object] = {}
        self._due, self._step = False, progress.step
        on_gpu = engine.device.type == "cuda"
        self._peak_flops = device_peak_flops(
            torch.cuda.get_device_name(engine.device) if on_gpu else engine.device.type
        )
        self._since = time.perf_counter()
        self._interval_steps = self._interval_tokens = 0
        self._interval_seconds = 0.0

    def is_logged(self, step: int) -> bool:
        """Whether `logging.logging_steps` makes a row due; `_record` says which other steps have one."""
        return step % self.config.logging.logging_steps == 0

    def elapsed(self) -> float:
        """Seconds since the last call."""
        before, self._since = self._since, time.perf_counter()
        return self._since - before

    def add(self, step: Step, learning_rate: float) -> None:
        """Count one finished step, and record it now or together with later ones.

        Raises:
            DivergedError: as `Decision.check_divergence`, for an earlier step.
        """
        self.progress.advance(step.num_loss_tokens)
        self.console.step(self.progress.step)
        step.number, step.tokens_seen = self.progress.step, self.progress.tokens_seen
        step.learning_rate, step.seconds = learning_rate, self.elapsed()
        if not self.decision.stays_on_device:
            self._record(step)
            return
        self._pending.append(step)
        is_full = len(self._pending) == MAX_PENDING
        if is_full or self.is_logged(step.number) or self._must_settle(step.number):
            self.settle()

    def settle(self) -> None:
        """Record all pending steps, and write all rows except the last: it may get evaluation metrics.

        Raises:
            DivergedError: as `Decision.check_divergence`, for any step but the last.
        """
        pending, self._pending = self._pending, []
        if not pending:
            return
        on_device = [step for step in pending if step.found_inf is not None]
        numbers = torch.stack([step.numbers() for step in on_device]).cpu() if on_device else ()
        pending[-1].seconds += self.elapsed()  # the wait for the device
        for step, row in zip(on_device, numbers, strict=True):
            step.grad_norm, step.sums.vector = row[0], row[1:]
        for index, step in enumerate(pending):
            if index:
                self.flush()
                self.decision.check_divergence(step.number - 1)
            if step.found_inf is not None:
                step.found_inf = None
                self.decision.settle(step)
            self._record(step)

    def _record(self, step: Step) -> None:
        """Add a step to the progress and to the row; its metrics are on the host.

        Skipped steps and spikes have a row even when none is due. A transient fault of the device causes no
        row, so the rows are those of a sound run; `status.json` names the fault.
        """
        self.progress.update(step)
        self._step = step.number
        self._interval_steps += 1
        self._interval_tokens += step.num_loss_tokens
        self._interval_seconds += step.seconds
        is_notable = bool(step.skipped) or step.spike is not None
        self._due = self.is_logged(step.number) or is_notable
        if not self._due:
            return
        self._row |= loss_metrics(step, self.config) | source_metrics(step.sums, self.config)
        self._row |= {
            "train/grad_norm": step.grad_norm,
            "train/learning_rate": step.learning_rate,
            "train/loss_tokens": step.num_loss_tokens,
            "train/tokens": step.tokens_seen,
            "train/loss_scale": scaler.get_scale() if (scaler := self.engine.scaler).is_enabled() else None,
            "train/skipped": step.skipped,
            "data/batch_sha256": _hex(self.progress.take_digest()),
            **self._performance(),
        }
        if step.check is not None:
            self._row["train/check"] = step.check
        if step.spike is not None:
            self._row["train/spike"] = step.spike.kind
            consequence = f"skipped ({step.skipped})" if step.skipped else "only logged"
            self.console.warning(f"step {self._step}, {consequence}: spike in {step.spike.text}")
        if self.config.logging.parameters_sha256:
            model, _ = self.engine.model_and_optimizer()
            self._row["train/parameters_sha256"] = parameters_sha256(
                model, is_rank0=self.engine.rank == 0, pipeline=self.engine.pipeline
            )

    def evaluation(self, metrics: Mapping[str, float | None]) -> None:
        """Add evaluation metrics to the current step's row."""
        self._row |= metrics
        self._due, self._step = True, self.progress.step

    def flush(self) -> None:
        """Write the current step's row, if one is due.

        An error in writing is kept as `failure`, so that all ranks can end together.
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
            if self._on_row is not None and self.metrics is not None:
                self._on_row(row)
        self._row, self._due = {}, False

    def check(self) -> None:
        """Raise the error of a row that could not be written, if there was one."""
        if self.failure is not None:
            raise self.failure

    def sync(self) -> None:
        """Sync the rows so far to the disk, before a checkpoint of their step is committed."""
        if self.metrics is not None:
            self.metrics.sync()

    def restart_clock(self) -> None:
        """Exclude the time since the last step (evaluation, saving) from the step times."""
        self.elapsed()

    def close(self) -> None:
        """Close metrics file, console and trackers."""
        if self.metrics is not None:
            with nullcontext() if self.failure is None else suppress(OSError, OutputError):
                self.metrics.close()
        self.trackers.close(0 if sys.exc_info()[0] is None else 1, hurried=self.hurried)
        self.console.close()  # last, since trackers may warn

    def _performance(self) -> dict[str, float | None]:
        """`perf/*` of the steps since the last row."""
        steps, tokens, seconds = self._interval_steps, self._interval_tokens, self._interval_seconds
        self._interval_steps, self._interval_tokens, self._interval_seconds = 0, 0, 0.0
        training, step_seconds = self.config.training, seconds / steps
        mfu = None
        if self._peak_flops:
            per_token = flops_per_token(self.config.model, training.sequence_length)
            flops = per_token * training.tokens_per_step
            mfu = flops / step_seconds / (self._peak_flops * self.engine.world_size)
        return {
            "perf/tokens_per_second": tokens / seconds,
            "perf/step_seconds": step_seconds,
            "perf/mfu": mfu,
            "perf/memory_bytes": memory_bytes(self.engine.device),
        }


def source_metrics(sums: StepSums, config: Config) -> dict[str, object]:
    """A row's `train/source/LABEL/loss` and `…/loss_tokens` with more than one source, else nothing.

    Args:
        sums: Reduced; empty for a step without loss tokens.
        config: The run's, which names the sources.
    """
    if len(config.data.sources) == 1:
        return {}
    labels = [source.label for source in config.data.sources]
    losses, counts = [[0.0] * len(labels)] * 2 if sums.vector is None else sums.by_source.tolist()
    metrics: dict[str, object] = {}
    for label, loss, tokens in zip(labels, losses, counts, strict=True):
        metrics[f"train/source/{label}/loss"] = loss / tokens if tokens else None
        metrics[f"train/source/{label}/loss_tokens"] = round(tokens)
    return metrics


def loss_metrics(step: Step, config: Config) -> dict[str, object]:
    """A row's `train/*loss` and `moe/*`; losses other than `train/loss` include their coefficient."""
    model, layers, num_loss_tokens = config.model, len(config.model.moe_layers), step.num_loss_tokens
    if step.sums.vector is None:
        return {"train/loss": None}
    loss, z_loss, aux_loss, router_z_loss = step.sums.losses.tolist()
    metrics: dict[str, object] = {
        "train/loss": loss / num_loss_tokens,
        "train/z_loss": config.training.z_loss_coef * z_loss / num_loss_tokens,
    }
    if not layers:
        return metrics
    metrics["train/aux_loss"] = model.router_aux_loss_coef * aux_loss / num_loss_tokens
    metrics["train/router_z_loss"] = model.router_z_loss_coef * router_z_loss / num_loss_tokens
    assignments = num_loss_tokens * model.num_experts_per_tok
    load = (step.sums.expert_counts.double() / assignments).tolist()
    entropies = step.sums.router_entropies.tolist()
    for index, layer in enumerate(model.moe_layers):
        metrics[f"moe/layer_{layer}/load_max"] = max(load[index]) * model.num_experts
        metrics[f"moe/layer_{layer}/dead_experts"] = sum(share == 0 for share in load[index])
        metrics[f"moe/layer_{layer}/router_entropy"] = entropies[index] / num_loss_tokens
    metrics["moe/load"] = load
    return metrics


def _hex(digest: list[int]) -> str:
    assert len(digest) == DIGEST_WORDS
    return "".join(f"{word & 0xFFFF_FFFF:08x}" for word in digest)


def parameters_sha256(model: Module, *, is_rank0: bool, pipeline: Pipeline | None = None) -> str | None:
    """SHA-256 over all parameters' bytes, in `named_parameters()` order; collective where they are sharded.

    Args:
        model: The model in training, unwrapped. All ranks call this together, since sharded parameters are
            gathered.
        is_rank0: Whether this is rank 0, which computes the digest.
        pipeline: The pipeline of which the model is a stage; None without one.

    Returns:
        64 hexadecimal digits on rank 0; None on other ranks, and on all ranks under DeepSpeed's ZeRO-3,
        which leaves empty parameters in the module.
    """
    parameters = list(model.parameters())
    if any(hasattr(parameter, "ds_id") for parameter in parameters):
        return None
    digest = hashlib.sha256()
    wholes = (_whole(parameter.detach()) for parameter in parameters)
    for whole in wholes if pipeline is None else pipeline.whole_parameters(_whole):
        if is_rank0:
            digest.update(whole.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest() if is_rank0 else None


def _whole(tensor: Tensor) -> Tensor:
    """The tensor, gathered (a collective) if it is a DTensor."""
    full_tensor = getattr(tensor, "full_tensor", None)
    return full_tensor() if callable(full_tensor) else tensor  # type: ignore[return-value]  # DTensor's


def record_attempt(
    folder: RunFolder,
    config: Config,
    engine: Engine,
    step: int,
    zlib_bits_per_byte: float | None,
    kernels: KernelChoice | None,
) -> None:
    """Append this attempt's row to attempts.jsonl, then write config.yaml; call it on rank 0 only.

    Args:
        folder: The run's folder.
        config: Resolved.
        engine: The run's engine.
        step: Optimizer steps done before the attempt.
        zlib_bits_per_byte: Compression of the validation text by zlib; None if unknown.
        kernels: Outcome of the kernels' check; None if nothing was checked.

    Raises:
        OutputError: a file cannot be written.
    """
    versions = environment(engine.device)
    size = count_parameters(config.model)
    row = {
        "step": step,
        "time": time.time(),
        "metrics_bytes": folder.metrics.stat().st_size,  # where this attempt's rows begin; clocks may jump
        "samples_bytes": _samples_bytes(folder),
        "launcher": engine.launcher,
        "world_size": engine.world_size,
        "device": versions.pop("device"),
        "host_cores": os.cpu_count(),
        "parameters": size.total,
        "active_parameters": size.active,
        "zlib_bits_per_byte": zlib_bits_per_byte,
        "versions": versions,
        "kernels": asdict(kernels) if kernels else None,
        "config": to_dict(config),  # the next attempt replaces config.yaml
    }
    with MetricsWriter(folder.attempts) as attempts:
        attempts.append(row)
    folder.check()
    replace_text(folder.config, dump_yaml(config))


def _samples_bytes(folder: RunFolder) -> int:
    """Bytes of samples.jsonl, after an incomplete last line is cut off; 0 without the file."""
    if not folder.samples.is_file():
        return 0
    with suppress(OutputError), MetricsWriter(folder.samples):  # `Samples.write` will warn of it
        pass
    return folder.samples.stat().st_size
