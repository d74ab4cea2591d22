"""State of a run besides model and optimizer: counters, the last and best evaluation, and recent losses,
with which the detector of spikes compares a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from llm_pretrain.checkpoints.manifest import RunFacts, StartPoint
from llm_pretrain.config.schema import Count, NonNegativeInt, read
from llm_pretrain.errors import CheckpointError
from llm_pretrain.training.engine import DIGEST_WORDS
from llm_pretrain.training.step import Spike, Step

WINDOW = 128
"""Accepted steps that a bound is computed from, as in llm.c (`OUTLIER_DETECTOR_WINDOW_SIZE`) and
OLMo-core."""
MIN_STEPS = 16
"""Accepted steps before the first detection."""
DEVIATIONS = 8.0
"""Robust standard deviations above the median; OLMo-core's `SkipStepOptimizer` uses 6 ordinary ones."""
LOSS_MARGIN = 0.25
"""Minimum excess of a spike's loss over the median, relative to the median."""
GRAD_NORM_MARGIN = 4.0
"""Minimum excess of a spike's gradient norm, relative to the median; healthy norms have a long tail too."""
NEW_LEVEL = 32
"""Logged spikes in a row after which the history restarts at the new level."""

_MAD_TO_STD = 1.4826
"""Standard deviation ÷ median absolute deviation of a normal distribution (1 / 0.6745)."""

_SKIPPED = {"log": None, "skip": "spike", "rollback": "rollback"}
"""`training.spike_action` -> `train/skipped`."""


@dataclass(frozen=True)
class Best:
    """The lowest evaluation loss so far.

    Args:
        step: Optimizer steps done when it was found.
        loss: The loss.
        max_batches: `evaluation.max_batches` then; losses over other batches cannot be compared.
        metric: `checkpoint.best_metric` then.
        later: Evaluations since, none of them lower.
    """

    step: int
    loss: float
    max_batches: int | None
    metric: str = "eval/loss"
    later: NonNegativeInt = 0


@dataclass
class SpikeDetector:
    """Compares a step with the last accepted steps; a spike does not count as accepted.

    The result depends only on checkpointed global numbers, so all ranks and resumed runs decide alike.

    Args:
        steps: Loss, gradient norm and loss tokens of the last `WINDOW` accepted steps, oldest first.
        in_a_row: Spikes since the last accepted step.
    """

    steps: list[tuple[float, float, int]] = field(default_factory=list)
    in_a_row: int = 0

    def detect(self, loss: float, grad_norm: float, num_loss_tokens: int, action: str) -> Spike | None:
        """The spike in a step with these global numbers, or None; `action` is `training.spike_action`."""
        if len(self.steps) < MIN_STEPS:
            return None
        losses, grad_norms, tokens = zip(*self.steps, strict=True)
        # the mean over fewer tokens has a larger standard error
        widening = max(1.0, math.sqrt(median(tokens) / num_loss_tokens))
        bounds = {
            "loss": (loss, upper_bound(losses, LOSS_MARGIN, widening)),
            "grad_norm": (grad_norm, upper_bound(grad_norms, GRAD_NORM_MARGIN, widening)),
        }
        exceeded = {name: pair for name, pair in bounds.items() if pair[0] > pair[1]}
        if not exceeded:
            return None
        texts = [f"{name} {value:.4g} (bound {bound:.4g})" for name, (value, bound) in exceeded.items()]
        return Spike("+".join(exceeded), " and ".join(texts), _SKIPPED[action])

    def record(self, loss: float, grad_norm: float, num_loss_tokens: int, spike: Spike | None) -> None:
        """Add a step with finite numbers, for which `detect` returned `spike`."""
        if spike is not None:
            self.in_a_row += 1
            if spike.skipped is None and self.in_a_row >= NEW_LEVEL:
                self.steps, self.in_a_row = [], 0
            return
        self.in_a_row = 0
        self.steps = [*self.steps, (loss, grad_norm, num_loss_tokens)][-WINDOW:]


def upper_bound(values: Sequence[float], margin: float, widening: float = 1.0) -> float:
    """median + max(8 σ, margin · median) · widening, with σ = 1.4826 · median absolute deviation.

    A few outliers hardly move the median and the median absolute deviation (Hampel's identifier; Iglewicz and
    Hoaglin, How to Detect and Handle Outliers, 1993), so one undetected spike does not hide the next. The
    margin avoids detections in stretches with little variation. There is no lower bound.
    """
    center = median(values)
    deviation = _MAD_TO_STD * median([abs(value - center) for value in values])
    return center + max(DEVIATIONS * deviation, margin * center) * widening


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
        loss: The last step's `train/loss`, which may have no row.
        started_from: The other run's checkpoint that the run began with; None without one.
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
    loss: float | None = None
    started_from: StartPoint | None = None

    def advance(self, num_loss_tokens: int) -> None:
        """Count one finished step."""
        self.step += 1
        self.tokens_seen += num_loss_tokens

    def update(self, step: Step) -> None:
        """Add a finished step whose metrics are on the host; call it in the order of the steps."""
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if step.skipped else 0
        self.digest = [a + b for a, b in zip(self.digest, step.digest, strict=True)]
        self.loss = step.loss
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
        values = {"started_from": None} | run.extra | {name: getattr(run, name) for name in _RUN_FACTS}
        file, advice = f"{path}: manifest.json", "; move it out of the folder"
        progress = read(cls, values, file, CheckpointError, "run.extra", advice)
        if (words := len(progress.digest)) != DIGEST_WORDS:
            raise CheckpointError(
                f"{file}: run.extra.digest: expected {DIGEST_WORDS} integers, found {words}{advice}"
            )
        return progress


_RUN_FACTS = ("step", "tokens_seen", "wandb_id")
