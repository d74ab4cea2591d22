"""Finds spikes: steps whose loss or gradient norm is far above those before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

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
class Spike:
    """A step whose loss or gradient norm is far above those of the steps before.

    Args:
        kind: `loss`, `grad_norm` or `loss+grad_norm`; the row's `train/spike`.
        text: The numbers, for a warning.
        skipped: The row's `train/skipped`; None if the spike is only logged.
    """

    kind: str
    text: str
    skipped: str | None


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
