"""The `evaluation` section of the configuration."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from llm_pretrain.config.schema import NonNegativeInt, PositiveInt


@dataclass(frozen=True)
class PredictedLoss:
    """The evaluation loss that is expected after a step, and the interval in which it should be.

    Args:
        step: Optimizer steps done.
        loss: Nats per token.
        low: Lower end of the interval.
        high: Upper end of the interval.
    """

    step: int
    loss: float
    low: float
    high: float

    @property
    def losses(self) -> tuple[float, float, float]:
        """The loss and the ends of its interval."""
        return self.loss, self.low, self.high


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation on the validation split.

    Args:
        eval_steps: Steps between two evaluations; the initial and the final model are evaluated too. 0 turns
            evaluation off.
        max_batches: Number of global batches of the validation split to evaluate on. Default: the whole
            split.
        sample_prompts: Prompts from which text is generated at every evaluation, for samples.jsonl and the
            report.
        sample_tokens: Number of tokens to generate for each prompt.
        prediction: Evaluation loss that is expected after given steps, ascending, as `llm-pretrain plan`
            writes it: metrics and report show it beside the real one, and a run that leaves its interval says
            so. Between steps it is interpolated.
    """

    eval_steps: NonNegativeInt = 500
    max_batches: PositiveInt | None = None
    sample_prompts: list[str] = field(default_factory=list)
    sample_tokens: PositiveInt = 48
    prediction: list[PredictedLoss] = field(default_factory=list)

    def predicted(self, step: int) -> PredictedLoss | None:
        """The expected loss after `step` steps; None outside the steps of the prediction."""
        for before, after in pairwise([*self.prediction, *self.prediction[-1:]]):
            if step == before.step or before.step < step < after.step:
                share = (step - before.step) / ((after.step - before.step) or 1)
                pairs = zip(before.losses, after.losses, strict=True)
                return PredictedLoss(step, *(left + (right - left) * share for left, right in pairs))
        return None

    def check(self) -> Iterator[str]:
        """One line for each impossible prediction."""
        last = -1
        for k, each in enumerate(self.prediction):
            name = f"evaluation.prediction[{k}]"
            if each.step <= last:
                yield f"{name}.step: expected {last + 1} or more, found {each.step}"
            last = max(last, each.step)
            if not 0 < each.low <= each.loss <= each.high < math.inf:
                yield (
                    f"{name}: expected 0 < low <= loss <= high < infinity, found {each.low:g}, {each.loss:g} "
                    f"and {each.high:g}"
                )
