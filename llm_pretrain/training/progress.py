"""How far a run is: everything besides model, optimizer and scaler that a resume must bring back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from llm_pretrain.training.engine import StepResult
from llm_pretrain.training.objective import DIGEST_WORDS, StepCounts
from llm_pretrain.training.spikes import SpikeHistory


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
        wandb_id: Of the run at Weights & Biases, so that a resumed run continues it.
        evaluation_owed: This step's evaluation was given up because a stop was asked for; the resumed run
            makes up for it, so that stopping leaves no gap in the evaluations.
        evaluation: Metrics `eval/…` of the last evaluation, for the model card.
        evaluation_step: Its step; None before the first.
        best: What `weights/best` holds, or will hold again once the run comes past; None without.
        spikes: What later steps are judged by.
    """

    step: int = 0
    tokens_seen: int = 0
    skipped_in_a_row: int = 0
    digest: list[int] = field(default_factory=lambda: [0] * DIGEST_WORDS)
    wandb_id: str | None = None
    evaluation_owed: bool = False
    evaluation: dict[str, float] = field(default_factory=dict)
    evaluation_step: int | None = None
    best: Best | None = None
    spikes: SpikeHistory = field(default_factory=SpikeHistory)

    def advance(self, counts: StepCounts) -> None:
        """Count one finished step."""
        self.step += 1
        self.tokens_seen += counts.num_loss_tokens

    def learn(self, result: StepResult) -> None:
        """Take in what became of a finished step, each in its turn."""
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if result.skipped else 0
        self.digest = [a + b for a, b in zip(self.digest, result.counts.digest, strict=True)]
        if result.loss is not None and result.grad_norm is not None:
            self.spikes.take(result.loss, result.grad_norm, result.counts.num_loss_tokens, result.spike)

    def evaluated(self, metrics: Mapping[str, float | None]) -> None:
        """Remember this step's evaluation."""
        self.evaluation = {
            name: value
            for name, value in metrics.items()
            if isinstance(value, float) and math.isfinite(value)
        }
        self.evaluation_step = self.step

    def take_digest(self) -> list[int]:
        """The digest since the last call, and start anew."""
        digest, self.digest = self.digest, [0] * DIGEST_WORDS
        return digest

    def extra(self) -> dict[str, object]:
        """What goes into a checkpoint beside step, tokens and wandb id; plain JSON."""
        return {
            "skipped_in_a_row": self.skipped_in_a_row,
            "digest": self.digest,
            "evaluation_owed": self.evaluation_owed,
            "best": asdict(self.best) if self.best else None,
            "evaluation": self.evaluation,
            "evaluation_step": self.evaluation_step,
            "spikes": self.spikes.extra(),
        }

    @classmethod
    def resumed(cls, step: int, tokens_seen: int, wandb_id: str | None, extra: dict) -> Progress:
        """The progress that `extra()` and the checkpoint's own fields describe."""
        return cls(
            step=step,
            tokens_seen=tokens_seen,
            skipped_in_a_row=extra["skipped_in_a_row"],
            digest=extra["digest"],
            wandb_id=wandb_id,
            evaluation_owed=extra.get("evaluation_owed", False),
            best=Best(**extra["best"]) if extra.get("best") else None,
            evaluation=extra.get("evaluation") or {},
            evaluation_step=extra.get("evaluation_step"),
            spikes=SpikeHistory.resumed(extra.get("spikes")),
        )
