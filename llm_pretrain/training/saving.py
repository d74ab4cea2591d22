"""When a run saves, what its checkpoints must match, and where it continues from.

The protocol (what makes a checkpoint whole) is in `llm_pretrain.checkpoints`; this is the policy.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

from torch import Tensor
from torch.nn import Module

from llm_pretrain.checkpoints import (
    CheckpointStore,
    ResumePoint,
    RunFacts,
    best_step,
    save_weights,
    whole_state,
)
from llm_pretrain.config import Config, ModelConfig
from llm_pretrain.data import TokenStore, data_fingerprint, weight_changes_fingerprint
from llm_pretrain.errors import ConfigError
from llm_pretrain.training.agreement import on_first_rank
from llm_pretrain.training.card import card_facts
from llm_pretrain.training.engine import Engine
from llm_pretrain.training.progress import Best, Progress
from llm_pretrain.training.run_folder import RunFolder

NOT_IN_FINGERPRINT = {"max_position_embeddings", "init_from"}
"""Model fields that change neither shapes nor arithmetic of a run that has a checkpoint."""


def fingerprints(config: Config) -> dict[str, str]:
    """What must be equal for a resume at any step to continue the same run."""
    return (
        model_fingerprint(config.model)
        | data_fingerprint(config)
        | {
            "run.seed": str(config.run.seed),
            "training.global_batch_size": str(config.training.global_batch_size),
            "optimizer.name": config.optimizer.name,
        }
    )


def model_fingerprint(model: ModelConfig) -> dict[str, str]:
    """The fields that decide shapes and arithmetic, by their full names."""
    fields = {f"model.{n}": str(value) for n, value in asdict(model).items() if n not in NOT_IN_FINGERPRINT}
    if model.rope_type == "yarn":  # where it is not set, it follows from max_position_embeddings
        fields["model.original_max_position_embeddings"] = str(model.rope_original_context)
    return fields


class Saving:
    """Finds, restores and writes a run's checkpoints and weights."""

    def __init__(self, config: Config, engine: Engine, folder: RunFolder, stores: list[TokenStore]):
        self.config, self.engine, self.folder, self.stores = config, engine, folder, stores
        self.notes: list[str] = []
        self._fingerprints = fingerprints(config)
        self.checkpoints = CheckpointStore(
            folder.checkpoints,
            rank=engine.rank,
            world_size=engine.world_size,
            gather_objects=engine.gather_objects,
            keep_last=config.checkpoint.keep_last,
            period=config.checkpoint.save_steps if config.training.spike_action == "rollback" else 0,
        )

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
        """Whether a periodic save follows this step."""
        save_steps = self.config.checkpoint.save_steps
        return bool(save_steps) and step % save_steps == 0

    def save(self, progress: Progress) -> Path:
        """Write a checkpoint and half-precision weights of this step; collective."""
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
        with self.engine.checkpoint_state() as (model, optimizer):
            path = self.checkpoints.save(model, optimizer, self.engine.scaler, facts)
            self._save_weights(progress, model)
        return path

    def keep_best(self, progress: Progress, loss: float) -> None:
        """Write `weights/best` where this step's evaluation loss is the lowest so far; collective.

        Nothing is written before the first step, nor for a loss that is no finite number.
        """
        best, max_batches = progress.best, self.config.evaluation.max_batches
        if not (self.config.checkpoint.keep_best and progress.step > 0 and math.isfinite(loss)):
            return
        if best is not None and best.max_batches == max_batches and not loss < best.loss:
            return
        with self.engine.checkpoint_state() as (model, _):
            self._save_weights(progress, model, best_loss=loss)
        progress.best = Best(progress.step, loss, max_batches)

    def _save_weights(self, progress: Progress, model: Module, *, best_loss: float | None = None) -> None:
        """Written by rank 0, from tensors that all ranks gather where they are sharded."""
        tensors = whole_state(model, keep=self.engine.rank == 0)
        on_first_rank(self.engine, lambda: self._write_weights(progress, tensors, best_loss))

    def _write_weights(self, progress: Progress, tensors: dict[str, Tensor], best_loss: float | None) -> Path:
        store, is_best = self.stores[0], best_loss is not None
        return save_weights(
            self.folder.weights,
            progress.step,
            tensors,
            self.config.model,
            dtype=self.config.checkpoint.weights_dtype,
            tokenizer_folder=store.tokenizer_folder,
            token_ids={
                "bos_token_id": store.bos_token_id,
                "eos_token_id": store.eos_token_id,
                "pad_token_id": store.pad_token_id,
            },
            keep_last=self.config.checkpoint.keep_last,
            sequence_length=self.config.training.sequence_length,
            best_loss=best_loss,
            card=card_facts(self.config, self.engine, self.stores, progress, is_best=is_best),
        )
