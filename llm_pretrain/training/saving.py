"""When a run saves, what its checkpoints must match, and where it continues from.

The protocol (what makes a checkpoint whole) is in `llm_pretrain.checkpoints`; this is the policy, that of
failed saves too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from llm_pretrain.checkpoints import (
    CheckpointStore,
    HostBuffers,
    ResumePoint,
    RunFacts,
    averages,
    best_step,
    whole_state,
)
from llm_pretrain.config import Config
from llm_pretrain.data import TokenStore, weight_changes_fingerprint
from llm_pretrain.errors import CheckpointError, ConfigError
from llm_pretrain.training.agreement import on_every_rank, on_first_rank
from llm_pretrain.training.background import Background
from llm_pretrain.training.engine import Engine, forwards_together
from llm_pretrain.training.fingerprints import fingerprints
from llm_pretrain.training.progress import Best, Progress
from llm_pretrain.training.recorder import Recorder
from llm_pretrain.training.run_folder import RunFolder
from llm_pretrain.training.run_weights import weights_writer
from llm_pretrain.training.save_outcomes import Saved, SaveOutcomes, failed
from llm_pretrain.training.status import Status
from llm_pretrain.training.watchdog import beat

Gather = Callable[[Any], list[Any]]


class Saving:
    """Finds, restores and writes a run's checkpoints and weights; all ranks call all methods together.

    Args:
        config, engine, folder, stores: The run's.
        status: Where a committed checkpoint is announced.
    """

    def __init__(
        self, config: Config, engine: Engine, folder: RunFolder, stores: list[TokenStore], status: Status
    ):
        self.config, self.engine, self.folder, self.stores = config, engine, folder, stores
        self.notes: list[str] = []
        self._outcomes = SaveOutcomes(folder, status, rank=engine.rank)
        self._recorder: Recorder | None = None
        channel = engine.channel
        self._gather_in_background: Gather = channel.gather_objects if channel else lambda value: [value]
        self._pending: Background[Saved] | None = None
        # DeepSpeed's state is a copy already
        copies = config.checkpoint.async_save and config.distributed.strategy != "deepspeed"
        self._buffers = HostBuffers() if copies else None
        self._fingerprints = fingerprints(config)
        self.checkpoints = CheckpointStore(
            folder.checkpoints,
            rank=engine.rank,
            world_size=engine.world_size,
            gather_objects=engine.gather_objects,
            keep_last=config.checkpoint.keep_last,
            period=config.checkpoint.save_steps if config.training.spike_action == "rollback" else 0,
        )

    def attach(self, recorder: Recorder) -> None:
        """Warn on its console, and commit no checkpoint before the rows up to it are on the disk."""
        self._outcomes.warn, self._recorder = recorder.console.warning, recorder

    def find(self) -> ResumePoint | None:
        """The checkpoint to continue from, as `checkpoint.resume` says; None starts from scratch.

        A path names the start of a new run; once the run has checkpoints of its own, those continue it,
        so that the same command can be started again after a preemption.
        """
        resume, own_steps = self.config.checkpoint.resume, self.checkpoints.committed()
        if resume == "never" and own_steps:
            raise ConfigError(
                f"checkpoint.resume: never, but {self.folder.checkpoints} holds checkpoints up to step "
                f"{max(own_steps)}; choose another run.name or checkpoint.resume auto"
            )
        self.settle()
        source = None if resume in ("auto", "never") else Path(resume)
        if source and own_steps and source.resolve().parent != self.folder.checkpoints.resolve():
            self.notes.append(f"checkpoint.resume: {source} is not used, the run has checkpoints of its own")
            source = None
        return self.checkpoints.find(expected=self.fingerprints_at, source=source)

    def fingerprints_at(self, step: int) -> dict[str, str]:
        """Everything that must be equal for a resume at `step` to continue the same run."""
        return self._fingerprints | weight_changes_fingerprint(self.config, step)

    def progress(self, resume: ResumePoint | None) -> Progress:
        """Where the run goes on: at a checkpoint, or at its start; collective."""
        if resume is None:
            return Progress()
        progress = Progress.resumed(resume.step, resume.tokens_seen, resume.wandb_id, resume.extra)
        kept = on_first_rank(self.engine, lambda: best_step(self.folder.weights) is not None)
        if not self.engine.gather_objects(kept)[0]:
            progress.best = None  # another run's, or deleted: the next evaluation writes one
        return progress

    def restore(self, resume: ResumePoint) -> None:
        """Load the checkpoint that `find` returned into the engine's model, optimizer and scaler."""
        with self.engine.checkpoint_state(loading=True) as (model, optimizer):
            self.checkpoints.load(resume, model, optimizer, self.engine.scaler)

    def weights_of(self, step: int) -> Path:
        """Folder of the half-precision weights of this step."""
        return self.folder.weights / f"step-{step:08d}"

    def holds(self, step: int) -> bool:
        """Whether the run's own folder has all that `save` writes at this step; collective.

        It has not where the run continues another one's checkpoint, or was killed between a checkpoint
        and its weights. Before the first step there is nothing to save.
        """
        written = step in self.checkpoints.committed() and self.weights_of(step).is_dir()
        return step == 0 or self.engine.gather_objects(written)[0]

    def is_due(self, step: int) -> bool:
        """Whether a periodic save follows this step; that of the last step is none."""
        save_steps = self.config.checkpoint.save_steps
        return bool(save_steps) and step % save_steps == 0 and step < self.config.training.max_steps

    def save(self, progress: Progress, *, last: bool = False) -> None:
        """Write a checkpoint and half-precision weights of this step, in the background where so configured.

        A failure is a warning, until too many have followed each other.

        Args:
            progress: Where the run stands.
            last: The run ends here: it is written when this returns, and a failure is an error.

        Raises:
            CheckpointError: on every rank; earlier checkpoints are as they were.
            DivergedError: likewise, when a value is not finite.
        """
        self.settle(last=last)
        beat(f"saving step {progress.step}", files=True)
        in_background = self.config.checkpoint.async_save and not last
        try:
            with self.engine.checkpoint_state() as (model, optimizer):
                write = self._stage(progress, model, optimizer, self._buffers if in_background else None)
                if in_background:
                    gather_objects = self._gather_in_background
                    self._pending = Background(lambda: write(gather_objects))
                    return
                saved = write(self.engine.gather_objects)
        except CheckpointError as error:
            saved = failed(progress.step, error, f"step {progress.step}")
        self._outcomes.take(saved, last=last)

    def settle(self, *, last: bool = False) -> None:
        """Wait for the save in the background, if there is one, and take what became of it.

        Raises:
            CheckpointError: too many in a row have failed, unless another is tried that is the `last`.
            DivergedError: it met a value that is not finite.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            beat("waiting for the save in the background", files=True)
            self._outcomes.take(pending.result(), tried_again=last)

    def announce(self) -> None:
        """Tell of a save in the background as soon as it is done; no collective, for one rank or all."""
        if self._pending is not None and self._pending.is_done and self._pending.error is None:
            self._outcomes.tell(self._pending.result())

    @property
    def has_stopped(self) -> bool:
        """Whether this rank's files have ended the run: a row, or the save in the background by an error."""
        if self._recorder is not None and self._recorder.failure is not None:
            return True
        return self._pending is not None and self._pending.is_done and self._pending.error is not None

    def stop(self) -> None:
        """Raise, on every rank, what has ended the run on one."""
        if self._recorder is not None:
            on_every_rank(self.engine, self._recorder.check)
        self.settle()

    def close(self) -> None:
        """Let the save in the background commit, for a run that ends by an error; raises nothing."""
        if self._pending is not None:
            beat("waiting for the save in the background", files=True)
            if self._pending.wait(self.config.distributed.timeout_seconds):
                self.announce()

    def keep_best(self, progress: Progress, loss: float) -> None:
        """Write `weights/best` where this step's evaluation loss is the lowest so far; collective.

        The weights are what the model is now: the loop calls this while it is what was evaluated. Nothing is
        written before the first step, nor for a loss that is no finite number.
        """
        best, max_batches = progress.best, self.config.evaluation.max_batches
        if not (self.config.checkpoint.keep_best and progress.step > 0 and math.isfinite(loss)):
            return
        if best is not None and best.max_batches == max_batches and not loss < best.loss:
            return
        self.settle()  # both would write in one folder
        with self.engine.checkpoint_state() as (model, _):
            weights = whole_state(model, keep=self.engine.rank == 0)
            write = self._weights_writer(progress, weights, best_loss=loss)
            try:
                on_first_rank(self.engine, write)
            except CheckpointError as error:
                self._outcomes.take(failed(progress.step, error, f"the best weights (step {progress.step})"))
                return
        progress.best = Best(progress.step, loss, max_batches)

    def _stage(
        self, progress: Progress, model: Module, optimizer: Optimizer, buffers: HostBuffers | None
    ) -> Callable[[Gather], Saved]:
        """Take down this step's state, copied into `buffers`; returns what writes it."""
        facts = RunFacts(
            step=progress.step,
            tokens_seen=progress.tokens_seen,
            launcher=self.engine.launcher,
            strategy=self.config.distributed.strategy,
            world_size=self.engine.world_size,
            global_batch_size=self.config.training.global_batch_size,
            seed=self.config.run.seed,
            wandb_id=progress.wandb_id,
            fingerprints=self.fingerprints_at(progress.step),
            extra=progress.extra(),
        )
        staged = self.checkpoints.stage(model, optimizer, self.engine.scaler, facts, buffers=buffers)
        sharded = forwards_together(self.config, self.engine.world_size)
        weights = whole_state(
            model,
            keep=self.engine.rank == 0,
            copy=sharded and buffers is not None,
            instead=averages(model, optimizer),
        )
        if buffers is not None and not sharded:
            weights = staged.copied(weights, buffers)
        write_weights = self._weights_writer(progress, weights)

        def write(gather_objects: Gather) -> Saved:
            path = None
            if self._recorder is not None:  # a row that a power cut takes is never written again
                on_first_rank(self.engine, self._recorder.sync, gather_objects)
            try:
                path = self.checkpoints.write(staged, gather_objects)
                on_first_rank(self.engine, write_weights, gather_objects)
            except CheckpointError as error:
                missing = f"step {facts.step}" if path is None else f"the weights of step {facts.step}"
                return failed(facts.step, error, missing, path)
            return Saved(facts.step, path)

        return write

    def _weights_writer(
        self, progress: Progress, tensors: dict[str, Tensor], best_loss: float | None = None
    ) -> Callable[[], Path]:
        return weights_writer(
            self.config, self.engine, self.folder, self.stores, progress, tensors, best_loss=best_loss
        )
