"""Saves and restores the checkpoints and weights of a run, and handles failed saves."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch.nn import Module
from torch.optim import Optimizer

from llm_pretrain.checkpoints.folders import MINIMUM_KEPT, folder_name, newest_step
from llm_pretrain.checkpoints.manifest import ResumePoint, RunFacts, StartPoint, model_fingerprint
from llm_pretrain.checkpoints.state import HostBuffers
from llm_pretrain.checkpoints.store import CheckpointStore
from llm_pretrain.checkpoints.weights import HeldWeights, best_step, model_weights, save_weights, weights_in
from llm_pretrain.config.tree import Config
from llm_pretrain.data.loader import data_fingerprint, samples_by_source, weight_changes_fingerprint
from llm_pretrain.data.store import TokenStore
from llm_pretrain.distributed.collectives import (
    OneRank,
    Ranks,
    open_background_group,
    run_on_all_ranks,
    run_on_rank0,
)
from llm_pretrain.errors import CheckpointError, ConfigError, MismatchError, OutputError
from llm_pretrain.export.model_card import ModelCardData, ModelCardSource
from llm_pretrain.hardware import environment
from llm_pretrain.launch.watchdog import heartbeat
from llm_pretrain.runs.folder import RunFolder
from llm_pretrain.runs.status import Status
from llm_pretrain.training.agreement import check_parameters
from llm_pretrain.training.engine import Engine
from llm_pretrain.training.progress import Best, Progress
from llm_pretrain.training.recorder import Recorder
from llm_pretrain.training.step import Step

logger = logging.getLogger(__name__)

WeightsWriter = Callable[[HeldWeights, Ranks], Path]


class CheckpointManager:
    """Finds, restores and writes checkpoints and weights; methods that read or write files are collective.

    Args:
        config, engine, folder, stores: Those of the run.
        status: Records the newest committed checkpoint.
    """

    def __init__(
        self, config: Config, engine: Engine, folder: RunFolder, stores: list[TokenStore], status: Status
    ):
        self.config, self.engine, self.folder, self.stores = config, engine, folder, stores
        self.notes: list[str] = []
        self._status = status
        self._recorder: Recorder | None = None
        self._warn: Callable[[str], None] = logger.warning
        self._failures = self._recorded_step = 0
        self._background_group = open_background_group(config, engine.world_size)
        self._pending: Future[Saved] | None = None
        # `checkpoint_state` copies the state under DeepSpeed only
        needs_copy = config.checkpoint.async_save and config.distributed.strategy != "deepspeed"
        self._buffers = HostBuffers() if needs_copy else None
        self._fingerprints = fingerprints(config, stores)
        self.store = CheckpointStore(
            folder.checkpoints,
            engine,
            keep_last=config.checkpoint.keep_last,
            period=config.checkpoint.save_steps if config.training.spike_action == "rollback" else 0,
            check=folder.check,
        )

    @property
    def _scaler(self) -> torch.amp.GradScaler | None:
        """The engine's scaler if it is enabled; a disabled scaler has nothing to save."""
        return self.engine.scaler if self.engine.scaler.is_enabled() else None

    def attach(self, recorder: Recorder) -> None:
        """Warn on the recorder's console, and sync the recorder's rows to the disk before each commit."""
        self._warn, self._recorder = recorder.console.warning, recorder

    def find(self) -> ResumePoint | None:
        """The checkpoint to continue from by `checkpoint.resume`; None to start from scratch.

        If that or `checkpoint.start_from` is a path, a new run begins with it. Once the run has checkpoints,
        it continues from these, so that the same command can be repeated after a preemption. A path to one of
        the run's own checkpoints must name the newest: otherwise the next start would continue from a later
        one, and lose what this start trained.

        Raises:
            ConfigError: the run has checkpoints although `never` is set, or checkpoints later than the path.
            CheckpointError: none is sound, or the one found is another run's.
        """
        resume, own_steps = self.config.checkpoint.resume, self.store.committed()
        if resume == "never" and own_steps:
            raise ConfigError(
                f"checkpoint.resume: never, but {self.folder.checkpoints} holds checkpoints up to step "
                f"{max(own_steps)}; choose another run.name or checkpoint.resume auto"
            )
        self.wait()
        source = None if resume in ("auto", "never") else Path(resume)
        if source and own_steps:
            newest_own = folder_name(max(own_steps))
            if source.resolve().parent != self.folder.checkpoints.resolve():
                self.notes.append(
                    f"checkpoint.resume: {source} is not used, the run has checkpoints of its own"
                )
                source = None
            elif source.resolve().name != newest_own:
                raise ConfigError(
                    f"checkpoint.resume: expected the run's newest checkpoint, {newest_own}, or another "
                    f"run's, found {source.name}; to go back, move the later ones out of "
                    f"{self.folder.checkpoints} first"
                )
        if (start_from := self.config.checkpoint.start_from) and not own_steps:
            found = self._find_start(Path(start_from))
        else:
            found = self.store.find(expected=self.fingerprints_at, source=source)
        if found and source is None and not found.start and found.run.run_id != self.folder.run_id:
            raise CheckpointError(
                f"{found.path}: expected a checkpoint of this folder's run, found another run's; move it out "
                "of the folder, or name it in checkpoint.resume to continue from it"
            )
        if found:
            Progress.resumed(found.run, found.path)  # raises an error before anything is loaded
        newest = newest_step(self.folder.weights)
        step = found.step if found else 0
        if newest > step:
            self.notes.append(
                f"{self.folder.weights}: weights up to step {newest} are from an attempt that went further "
                f"than step {step}, where this one begins; until this one reaches step {newest}, commands "
                "that are given the run's folder use them"
            )
        return found

    def _find_start(self, source: Path) -> ResumePoint:
        """The newest sound checkpoint of the run `source`, or the checkpoint `source`, to start from."""
        compared = ("model.", "tokenizer", "optimizer.name")
        own = {key: text for key, text in self._fingerprints.items() if key.startswith(compared)}
        others = CheckpointStore(source / "checkpoints", self.engine, keep_last=MINIMUM_KEPT)
        found = others.find(
            expected=lambda run: run.fingerprints | own, source=None if others.committed() else source
        )
        assert found is not None
        return replace(found, start=run_on_rank0(self.engine, lambda: StartPoint.of(found.path)))

    def fingerprints_at(self, run: RunFacts | Progress) -> dict[str, str]:
        """Fingerprints that must match for a resume at the step of `run`."""
        return self._fingerprints | weight_changes_fingerprint(self.config, run.step)

    def progress(self, resume: ResumePoint | None) -> Progress:
        """The run's progress at a checkpoint, or at the start of the run; collective."""
        if resume is None:
            return Progress()
        progress = Progress.resumed(resume.run, resume.path)
        if resume.start is not None:
            return Progress(spikes=progress.spikes, started_from=resume.start)
        best, wanted = progress.best, (self.config.checkpoint.best_metric, self.config.evaluation.max_batches)
        is_there = run_on_rank0(self.engine, lambda: best_step(self.folder.weights) is not None)
        if not is_there or (best and (best.metric, best.max_batches) != wanted):
            progress.best = None  # deleted, another run's, or of other losses: the next evaluation writes it
        return progress

    def restore(self, resume: ResumePoint) -> None:
        """Load the checkpoint that `find` returned into the engine's model, optimizer and scaler."""
        with self.engine.checkpoint_state(loading=True) as (model, optimizer):
            self.store.load(resume, model, optimizer, self._scaler, self.engine.pipeline)

    def weights_of(self, step: int) -> Path:
        """Folder of the half-precision weights of this step."""
        return self.folder.weights / folder_name(step)

    def is_saved(self, step: int) -> bool:
        """Whether the run's folder has everything that `save` writes at this step; collective.

        False if the run continues another run's checkpoint, or was killed between a checkpoint and its
        weights. True before the first step, when there is nothing to save.
        """
        written = step in self.store.committed() and self.weights_of(step).is_dir()
        return step == 0 or self.engine.gather_objects(written)[0]

    def is_due(self, step: int) -> bool:
        """Whether a periodic save follows this step; the save after the last step is not periodic."""
        save_steps = self.config.checkpoint.save_steps
        return bool(save_steps) and step % save_steps == 0 and step < self.config.training.max_steps

    def save(self, progress: Progress, *, last: bool = False) -> None:
        """Write a checkpoint and half-precision weights of this step, in the background with `async_save`.

        A failed save is a warning, and an error after `MAX_FAILED_SAVES` in a row.

        Args:
            progress: The run's progress.
            last: Whether the run ends here: the save is then synchronous, and a failure an error.

        Raises:
            CheckpointError: on every rank; earlier checkpoints stay unchanged.
            DivergedError: on every rank, if a value is not finite or differs between ranks.
        """
        self.wait(last=last)
        heartbeat(f"saving step {progress.step}", files=True)
        model, _ = self.engine.model_and_optimizer()
        check_parameters(self.engine, model, f"at step {progress.step}", training=True)
        in_background = self.config.checkpoint.async_save and not last
        try:
            with self.engine.checkpoint_state() as (model, optimizer):
                write = self._stage(progress, model, optimizer, self._buffers if in_background else None)
                if in_background:
                    ranks = self._background_group or OneRank()
                    self._pending = run_in_thread(lambda: write(ranks))
                    return
                saved = write(self.engine)
        except CheckpointError as error:
            saved = failed(progress.step, error, f"step {progress.step}")
        self._record(saved, last=last)

    def write_missing_weights(self, resume: ResumePoint, progress: Progress) -> None:
        """Write the weights of the run's own restored checkpoint, if a killed attempt did not write them.

        Collective. The end of the run saves the weights of the last step. A failure is a warning.
        """
        if progress.step == self.config.training.max_steps:
            return
        is_own = resume.path.resolve().parent == self.folder.checkpoints.resolve()
        write = self._weights_writer(progress)

        if not is_own or run_on_rank0(self.engine, lambda: self.weights_of(resume.step).is_dir()):
            return
        try:
            with self.engine.checkpoint_state() as (model, optimizer):
                staged = self.store.stage(
                    model, optimizer, self._scaler, resume.run, pipeline=self.engine.pipeline
                )
                write(weights_in(staged.content, staged.pieces), self.engine)
        except CheckpointError as error:
            self._record(failed(resume.step, error, f"the weights of step {resume.step}"))

    def wait(self, *, last: bool = False) -> None:
        """Wait for the save in the background, if there is one, and record its outcome.

        Raises:
            CheckpointError: `MAX_FAILED_SAVES` in a row have failed, unless the run's last save follows
                (`last`).
            DivergedError: a value to be saved is not finite.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            heartbeat("waiting for the save in the background", files=True)
            self._record(pending.result(), retried=last)

    def record_finished_save(self) -> None:
        """Record a finished background save in status.json; not collective."""
        if self._pending is not None and self._pending.done() and self._pending.exception() is None:
            self._record_checkpoint(self._pending.result())

    @property
    def has_failed(self) -> bool:
        """Whether writing a row or a background save failed on this rank, so that the run must end."""
        if self._recorder is not None and self._recorder.failure is not None:
            return True
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def raise_failure(self) -> None:
        """Raise one rank's failure on every rank."""
        if self._recorder is not None:
            run_on_all_ranks(self.engine, self._recorder.check)
        self.wait()

    def close(self) -> None:
        """Let a background save commit when the run ends with an error; raises nothing."""
        if self._pending is not None:
            heartbeat("waiting for the save in the background", files=True)
            wait([self._pending], self.config.distributed.timeout_seconds)
            self.record_finished_save()

    def leave_group(self) -> None:
        """Destroy the process group of background saves; collective, after the last save."""
        if self._background_group is not None:
            self.engine.gather_objects(None)
            self._background_group.close()

    def keep_best(self, progress: Progress, loss: float) -> None:
        """Write the model's weights to `weights/best` if this evaluation loss is the lowest so far;
        collective.

        Nothing is written before the first step, nor for a loss that is not finite.
        """
        best, config = progress.best, self.config
        if not (config.checkpoint.keep_best and progress.step > 0):
            return
        if not math.isfinite(loss) or (best is not None and not loss < best.loss):
            progress.best = best and replace(best, later=best.later + 1)
            return
        self.wait()  # a background save writes into the same folder
        with self.engine.checkpoint_state() as (model, _):
            metric = config.checkpoint.best_metric
            write = self._weights_writer(progress, best={metric: loss})
            try:
                write(model_weights(model, self.engine, self.engine.pipeline), self.engine)
            except CheckpointError as error:
                self._record(failed(progress.step, error, f"the best weights (step {progress.step})"))
                return
        progress.best = Best(progress.step, loss, config.evaluation.max_batches, metric)

    def _record(self, saved: Saved, *, last: bool = False, retried: bool = False) -> None:
        """Record the outcome of a save: count failures in a row, and warn of them; all ranks together.

        Args:
            saved: The outcome.
            last: Whether it is the run's last save.
            retried: Whether the run's last save follows at once and writes this state again. Then only a
                failure of that save is an error.

        Raises:
            CheckpointError: on every rank, if the last save failed, or `MAX_FAILED_SAVES` in a row.
        """
        self._record_checkpoint(saved)
        if saved.failure is None:
            self._failures = 0
            return
        self._failures += 1
        count = f"failed saves in a row: {self._failures} of {MAX_FAILED_SAVES}"
        if not retried and (last or self._failures >= MAX_FAILED_SAVES):
            reason = "training has ended, and its last save must not fail" if last else count
            error = CheckpointError(
                f"{saved.failure}; {reason}; start the same command again once it can be written"
            )
            error.shared = True
            raise error
        if self.engine.rank == 0:
            self._warn(f"not saved, {saved.missing}: {saved.failure}; training goes on ({count})")

    def _record_checkpoint(self, saved: Saved) -> None:
        """Record a committed checkpoint in status.json, once."""
        if saved.checkpoint is None or self._recorded_step == saved.step:
            return
        self._recorded_step = saved.step
        try:
            self._status.running(saved.step, saved.checkpoint)
        except (OSError, OutputError) as error:
            self._warn(f"{self.folder.status} could not be written: {error}")

    def _stage(
        self, progress: Progress, model: Module, optimizer: Optimizer, buffers: HostBuffers | None
    ) -> Callable[[Ranks], Saved]:
        """Collect this step's state, copied into `buffers` if given; returns the function that writes it."""
        facts = RunFacts(
            step=progress.step,
            tokens_seen=progress.tokens_seen,
            launcher=self.engine.launcher,
            strategy=self.config.distributed.strategy,
            world_size=self.engine.world_size,
            global_batch_size=self.config.training.global_batch_size,
            seed=self.config.run.seed,
            wandb_id=progress.wandb_id,
            fingerprints=self.fingerprints_at(progress),
            extra=progress.extra(),
            run_id=self.folder.run_id,
        )
        staged = self.store.stage(
            model, optimizer, self._scaler, facts, buffers=buffers, pipeline=self.engine.pipeline
        )
        write_weights = self._weights_writer(progress)

        def write(ranks: Ranks) -> Saved:
            path = None
            if self._recorder is not None:  # no later attempt would write a row that a power cut lost
                run_on_rank0(ranks, self._recorder.sync)
            try:
                path = self.store.write(staged, ranks)
                write_weights(weights_in(staged.content, staged.pieces), ranks)
            except CheckpointError as error:
                missing = f"step {facts.step}" if path is None else f"the weights of step {facts.step}"
                return failed(facts.step, error, missing, path)
            return Saved(facts.step, path)

        return write

    def _weights_writer(self, progress: Progress, best: Mapping[str, float] | None = None) -> WeightsWriter:
        """Returns a function that writes the weights of this step, or `weights/best` if `best` is given.

        The function is collective and takes this rank's part of the weights, and the group of ranks. It uses
        a copy of `progress`, since it may run later. It raises CheckpointError if the weights cannot be
        written, and DivergedError if a value is not finite.
        """
        config, folder, store, progress = self.config, self.folder, self.stores[0], replace(progress)

        def facts() -> ModelCardData:
            try:
                card = card_facts(config, self.engine, self.stores, progress, is_best=best is not None)
                folder.check()
                return card
            except OSError as error:  # of the stores, or of the folder's marker
                raise CheckpointError(
                    f"{folder.weights}: the model card cannot be written: {error}"
                ) from error

        def write(held: HeldWeights, ranks: Ranks) -> Path:
            return save_weights(
                folder.weights,
                progress.step,
                held,
                config.model,
                dtype=config.checkpoint.weights_dtype,
                tokenizer_folder=store.tokenizer_folder,
                tokenizer_digests=store.tokenizer_digests,
                token_ids={
                    "bos_token_id": store.bos_token_id,
                    "eos_token_id": store.eos_token_id,
                    "pad_token_id": store.pad_token_id,
                },
                keep_last=config.checkpoint.keep_last,
                sequence_length=config.training.sequence_length,
                best=best,
                card=run_on_rank0(ranks, facts),
                ranks=ranks,
            )

        return write


MAX_FAILED_SAVES = 3
"""Failed saves in a row that end a run."""


@dataclass(frozen=True)
class Saved:
    """Outcome of a save, the same on every rank.

    Args:
        step: Optimizer steps done.
        checkpoint: The committed checkpoint; None if none was committed.
        failure: Why the checkpoint, or the weights after it, could not be written; None if both were.
        missing: What was not written because of the failure, for the warning.
    """

    step: int
    checkpoint: Path | None = None
    failure: CheckpointError | None = None
    missing: str = ""


def failed(step: int, error: CheckpointError, missing: str, checkpoint: Path | None = None) -> Saved:
    """The outcome of a save that failed on every rank.

    Raises:
        CheckpointError: `error`, if only this rank has it (it is not `shared`); it ends the run.
    """
    if not error.shared:
        raise error
    return Saved(step, checkpoint, error, missing)


T = TypeVar("T")


def run_in_thread(action: Callable[[], T]) -> Future[T]:
    """Call `action` in a daemon thread; unlike with an executor, a failing process does not wait for it."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(action())
        except BaseException as error:  # raised by `result`
            future.set_exception(error)

    threading.Thread(target=run, name="background-save", daemon=True).start()
    return future


_VERSIONS = ("torch", "llm_pretrain", "python")
"""Versions in a model card: those that are equal on machines with the same installation."""


def card_facts(
    config: Config, engine: Engine, stores: Sequence[TokenStore], progress: Progress, *, is_best: bool
) -> ModelCardData:
    """The facts of a model card for this step's weights."""
    splits, samples = [store.split("train") for store in stores], samples_by_source(config, progress.step)
    start = progress.started_from
    versions = environment(engine.device)
    return ModelCardData(
        config=config,
        step=progress.step,
        tokens_seen=progress.tokens_seen,
        sources=[
            ModelCardSource(source.label, drawn, split.documents, int(split.offsets[-1]))
            for source, drawn, split in zip(config.data.sources, samples, splits, strict=True)
        ],
        tokenizer_size=stores[0].vocab_size,
        tokenizer_hash=stores[0].tokenizer_digests["tokenizer.json"],
        has_chat_template=(stores[0].tokenizer_folder / "chat_template.jinja").is_file(),
        world_size=engine.world_size,
        versions={name: versions.get(name) for name in _VERSIONS},
        evaluation=progress.evaluation,
        evaluation_step=progress.evaluation_step,
        is_best=is_best,
        started_from=Path(start.path).parent.parent.name if start else None,
    )


def fingerprints(config: Config, stores: Sequence[TokenStore] | None = None) -> dict[str, str]:
    """Settings that must match for a resume at any step, by name; `stores` as in `data_fingerprint`."""
    # whether an average (EMA) is kept must match; its decay may change
    averaging = {"optimizer.ema_decay": "more than 0"} if config.optimizer.ema_decay else {}
    return (
        model_fingerprint(config.model)
        | data_fingerprint(config, stores)
        | {
            "run.seed": str(config.run.seed),
            "training.global_batch_size": str(config.training.global_batch_size),
            "optimizer.name": config.optimizer.name,
        }
        | averaging
    )


def rollback(
    checkpoints: CheckpointManager, progress: Progress, step: Step, warn: Callable[[str], None]
) -> None:
    """Restore model, optimizer, scaler and spike history from the newest periodic checkpoint; collective.

    Step count, schedule and data continue, as after every skipped step. Only periodic checkpoints are used:
    one written after a stop signal does not exist in an uninterrupted run. Without a valid checkpoint, `step`
    is skipped instead.
    """
    number = progress.step + 1
    heartbeat(f"rolling back at step {number}", files=True)
    checkpoints.wait()  # a save in the background may be writing the checkpoint
    path = checkpoints.store.newest_periodic(progress.step)
    try:
        if path is None:
            raise CheckpointError("no periodic checkpoint has been written yet")
        target = checkpoints.store.find(expected=checkpoints.fingerprints_at, source=path)
    except (CheckpointError, MismatchError) as error:
        warn(f"step {number}: training.spike_action: rollback acts as skip: {error}")
        step.skipped = "spike"
        return
    assert target is not None
    checkpoints.restore(target)
    # the restored parameters may have a higher loss than the steps after the checkpoint
    progress.spikes = Progress.resumed(target.run, target.path).spikes
    warn(f"step {number}: parameters and optimizer restored from {target.path}")
