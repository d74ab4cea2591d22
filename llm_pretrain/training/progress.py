"""State of a run besides model and optimizer: counters, the last and best evaluation, and recent losses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llm_pretrain.checkpoints.manifest import RunFacts
from llm_pretrain.config.schema import Count, NonNegativeInt, read
from llm_pretrain.errors import CheckpointError
from llm_pretrain.training.engine import DIGEST_WORDS
from llm_pretrain.training.spikes import SpikeDetector
from llm_pretrain.training.step import Step


@dataclass(frozen=True)
class Best:
    """The lowest evaluation loss so far.

    Args:
        step: Optimizer steps done when it was found.
        loss: `eval/loss`.
        max_batches: `evaluation.max_batches` then; losses over other batches cannot be compared.
    """

    step: int
    loss: float
    max_batches: int | None


@dataclass
class Progress:
    """Counters of a run, the same on every rank.

    Args:
        step: Optimizer steps done, skipped ones included.
        tokens_seen: Loss tokens of all steps so far.
        skipped_in_a_row: Skipped steps since the last one that moved the parameters.
        digest: Sums of the sample digests' eight words since the last row.
        wandb_id: Id of the run at Weights & Biases, which a resumed run continues.
        evaluation_owed: Whether a stop signal ended this step's evaluation; the resumed run repeats it.
        best: The evaluation of the weights in `weights/best`; None without any.
        evaluation: Metrics `eval/…` of the last evaluation, for the model card.
        evaluation_step: Step of that evaluation; None before the first one.
        spikes: The detector, with the history that later steps are compared with.
    """

    step: int = 0
    tokens_seen: Count = 0
    skipped_in_a_row: NonNegativeInt = 0
    digest: list[int] = field(default_factory=lambda: [0] * DIGEST_WORDS)
    wandb_id: str | None = None
    evaluation_owed: bool = False
    best: Best | None = None
    evaluation: dict[str, float] = field(default_factory=dict)
    evaluation_step: int | None = None
    spikes: SpikeDetector = field(default_factory=SpikeDetector)

    def advance(self, num_loss_tokens: int) -> None:
        """Count one finished step."""
        self.step += 1
        self.tokens_seen += num_loss_tokens

    def update(self, step: Step) -> None:
        """Add a finished step whose metrics are on the host; call it in the order of the steps."""
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if step.skipped else 0
        self.digest = [a + b for a, b in zip(self.digest, step.digest, strict=True)]
        if step.loss is not None:
            assert isinstance(step.grad_norm, float)
            self.spikes.record(step.loss, step.grad_norm, step.num_loss_tokens, step.spike)

    def evaluated(self, metrics: Mapping[str, float | None]) -> None:
        """Keep this step's evaluation, for the model card."""
        self.evaluation = {
            name: value
            for name, value in metrics.items()
            if isinstance(value, float) and math.isfinite(value)
        }
        self.evaluation_step = self.step

    def take_digest(self) -> list[int]:
        """The digest since the last call, which is then reset."""
        digest, self.digest = self.digest, [0] * DIGEST_WORDS
        return digest

    def extra(self) -> dict[str, Any]:
        """The fields for `RunFacts.extra` in a checkpoint's manifest: those that `RunFacts` has not."""
        return {name: value for name, value in asdict(self).items() if name not in _RUN_FACTS}

    @classmethod
    def resumed(cls, run: RunFacts, path: Path) -> Progress:
        """The progress of the checkpoint in `path`, by the facts in its manifest.

        Raises:
            CheckpointError: names the first value in `extra` that no run saves.
        """
        values = run.extra | {name: getattr(run, name) for name in _RUN_FACTS}
        file, advice = f"{path}: manifest.json", "; move it out of the folder"
        progress = read(cls, values, file, CheckpointError, "run.extra", advice)
        if (words := len(progress.digest)) != DIGEST_WORDS:
            raise CheckpointError(
                f"{file}: run.extra.digest: expected {DIGEST_WORDS} integers, found {words}{advice}"
            )
        return progress


_RUN_FACTS = ("step", "tokens_seen", "wandb_id")
