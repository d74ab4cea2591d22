"""Spikes: steps whose loss or gradient norm is far beyond those of the steps before, and what follows one.

Decides, and keeps what it decides by; takes no step and knows neither model nor launcher. Everything here is
a pure function of global numbers and is checkpointed, so all ranks decide alike, and again after a resume.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

WINDOW = 128
"""Accepted steps that a bound looks back on, as in llm.c (`OUTLIER_DETECTOR_WINDOW_SIZE`) and OLMo-core."""
MINIMUM = 16
"""Accepted steps before which nothing is a spike: there is no telling what is usual."""
DEVIATIONS = 8.0
"""Robust standard deviations above the median; OLMo-core's `SkipStepOptimizer` has 6 of plain ones."""
LOSS_MARGIN = 0.25
"""Share of the median by which a loss must exceed it at least, however steady the steps before were."""
GRAD_NORM_MARGIN = 4.0
"""The same for a gradient norm, whose tail is long in healthy runs too."""
NEW_LEVEL = 32
"""So many logged spikes in a row are no spikes but a new level, and the history starts anew."""

_NORMAL = 1.4826
"""Median absolute deviation × this = standard deviation of a normal distribution (1 / 0.6745)."""


@dataclass(frozen=True)
class Spike:
    """A step far beyond those before.

    Args:
        of: `loss`, `grad_norm` or `loss+grad_norm`; the row's `train/spike`.
        text: The numbers, for a warning.
        skipped: The reason for which its step is skipped; None where it is only logged.
    """

    of: str
    text: str
    skipped: str | None


Judge = Callable[[float, float, int], Spike | None]
"""Of a step's loss, gradient norm and loss tokens, all global."""

SPIKE_KINDS = ("loss", "grad_norm", "loss+grad_norm")
"""What a row's `train/spike` may be."""
SPIKE_REASONS = ("spike", "rollback")
"""What its `train/skipped` may be then, besides null."""
SKIPPED = {"log": None, "skip": "spike", "rollback": "rollback"}
"""`training.spike_action` → the row's `train/skipped`."""


@dataclass
class SpikeHistory:
    """The last accepted steps, from which the bounds follow; a spike is none of them.

    Args:
        steps: Loss, gradient norm and loss tokens of each, oldest first; at most `WINDOW`.
        in_a_row: Spikes since the last accepted step.
    """

    steps: list[tuple[float, float, int]] = field(default_factory=list)
    in_a_row: int = 0
    _ordered: list[list[float]] = field(default_factory=list, init=False, repr=False, compare=False)
    """Losses and gradient norms of `steps` by size, kept up step by step; empty until asked for."""

    def judge(self, action: str) -> Judge:
        """What tells whether a step's numbers are a spike, and what `training.spike_action` makes of one."""

        def judged(loss: float, grad_norm: float, num_loss_tokens: int) -> Spike | None:
            return self._judged(loss, grad_norm, num_loss_tokens, SKIPPED[action])

        return judged

    def take(self, loss: float, grad_norm: float, num_loss_tokens: int, spike: Spike | None) -> None:
        """Count a step whose numbers are finite, judged before."""
        if spike is None:
            self.steps.append((loss, grad_norm, num_loss_tokens))
            gone = self.steps.pop(0) if len(self.steps) > WINDOW else None
            for number, ordered in enumerate(self._ordered):
                insort(ordered, self.steps[-1][number])
                if gone is not None:
                    del ordered[bisect_left(ordered, gone[number])]
            self.in_a_row = 0
            return
        self.in_a_row += 1
        if spike.skipped is None and self.in_a_row >= NEW_LEVEL:
            self.steps, self.in_a_row, self._ordered = [], 0, []

    def extra(self) -> dict[str, Any]:
        """For a checkpoint, which may be written while steps go on; JSON brings every float back exactly."""
        return {"steps": list(self.steps), "in_a_row": self.in_a_row}

    @classmethod
    def resumed(cls, extra: Mapping[str, Any] | None) -> SpikeHistory:
        """The history that `extra()` describes; an empty one for a checkpoint without."""
        if not extra:
            return cls()
        return cls([(loss, norm, tokens) for loss, norm, tokens in extra["steps"]], extra["in_a_row"])

    def _judged(
        self, loss: float, grad_norm: float, num_loss_tokens: int, skipped: str | None
    ) -> Spike | None:
        if len(self.steps) < MINIMUM or self._is_usual(loss, grad_norm):
            return None
        losses, grad_norms, tokens = zip(*self.steps, strict=True)
        # the fewer tokens a mean is over, the further it falls from what it estimates
        widening = max(1.0, math.sqrt(median(tokens) / num_loss_tokens))
        bounds = {
            "loss": (loss, upper_bound(losses, LOSS_MARGIN, widening)),
            "grad_norm": (grad_norm, upper_bound(grad_norms, GRAD_NORM_MARGIN, widening)),
        }
        beyond = {name: pair for name, pair in bounds.items() if pair[0] > pair[1]}
        if not beyond:
            return None
        texts = [f"{name} {value:.4g} (bound {bound:.4g})" for name, (value, bound) in beyond.items()]
        return Spike("+".join(beyond), " and ".join(texts), skipped)

    def _is_usual(self, loss: float, grad_norm: float) -> bool:
        """Whether both numbers lie below what `upper_bound` adds to a median at least.

        Almost every step does, and needs no deviation then. Rounding is monotone, so no spike is missed.
        """
        if not self._ordered:
            self._ordered = [sorted(step[number] for step in self.steps) for number in (0, 1)]
        losses, grad_norms = self._ordered
        return loss <= _lowest_bound(losses, LOSS_MARGIN) and grad_norm <= _lowest_bound(
            grad_norms, GRAD_NORM_MARGIN
        )


def _lowest_bound(ordered: Sequence[float], margin: float) -> float:
    """`upper_bound` of values that do not deviate at all."""
    half = len(ordered) // 2
    center = ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
    return center + max(0.0, margin * center)


def upper_bound(values: Sequence[float], margin: float, widening: float = 1.0) -> float:
    """median + max(8 σ, margin · median) · widening, with σ = 1.4826 · median absolute deviation.

    Median and median absolute deviation barely move with a few outliers (Hampel's identifier; Iglewicz and
    Hoaglin, How to Detect and Handle Outliers, 1993), so a spike that was not recognised hides no other. The
    margin keeps steady stretches from making spikes of nothing. Values below the median have no bound.
    """
    center = median(values)
    deviation = _NORMAL * median([abs(value - center) for value in values])
    return center + max(DEVIATIONS * deviation, margin * center) * widening
