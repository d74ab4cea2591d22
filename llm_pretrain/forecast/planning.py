"""Plans a run from a ladder and a budget: the size with the least predicted loss, and its configuration."""

from __future__ import annotations

import dataclasses
import math
import statistics
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from llm_pretrain.config.distributed_config import DistributedConfig
from llm_pretrain.config.schema import LARGEST_INTEGER
from llm_pretrain.config.tree import Config, PredictedLoss
from llm_pretrain.errors import ConfigError
from llm_pretrain.forecast.budget import MAX_EPOCHS, MIN_TOKENS_PER_PARAMETER, least_tokens
from llm_pretrain.forecast.family import Size, Sizes
from llm_pretrain.forecast.ladder_runs import warmup_of
from llm_pretrain.forecast.points import Ladder, Training
from llm_pretrain.forecast.scaling_law import SAMPLES, Fit, Prediction, fit_law

EVALUATIONS, SAVES = 10, 20
"""Of a planned run: at most so many evaluations after the one before the first step; about so many saves."""
MAX_COMPUTE_RATIO = 30.0
"""Predictions are meant for up to so many times the compute of the ladder's largest run."""
MAX_LOSS_RATIO = 1.25
"""The search stops at a size whose predicted loss is so many times the least one found."""
WIDE_INTERVAL = 0.1
"""Width of an interval, relative to the loss, from which a warning says that it tells little."""
_STABLE_PARTS = tuple(2 ** (-k / 2) for k in range(6, -1, -1))
"""Shares of the stable phase at which the predicted curve has points, close enough for straight lines."""


class Choice(NamedTuple):
    """A training that a budget pays for.

    Args:
        size: The member of the family that is trained.
        steps: Optimizer steps.
        training: Tokens and compute.
        prediction: Predicted loss of the last evaluation.
    """

    size: Size
    steps: int
    training: Training
    prediction: Prediction


def best_of(choices: list[Choice]) -> Choice:
    """The choice with the least predicted loss."""
    return min(choices, key=lambda choice: choice.prediction.loss)


@dataclass(frozen=True)
class Forecast:
    """Predictions from a ladder; the laws are fitted at their first use.

    Args:
        ladder: The ladder with its measured points.
        samples: Number of laws that the bootstrap of a fit fits.
    """

    ladder: Ladder
    samples: int = SAMPLES

    @cached_property
    def sizes(self) -> Sizes:
        """The family's members; each is counted once for all choices."""
        return Sizes(self.ladder.base)

    @cached_property
    def decayed(self) -> Fit:
        """Fit to the points after the decay.

        Raises:
            ConfigError: too few points.
        """
        points = [point for point in self.ladder.points if point.decayed]
        try:
            return fit_law(points, samples=self.samples)
        except ConfigError as error:
            found = error.problems[0]
            if len(points) < sum(len(rung.steps) for rung in self.ladder.rungs):
                found += "; the same `llm-pretrain ladder` command continues an unfinished one"
            raise ConfigError(f"{self.ladder.folder}: {found}") from error

    @cached_property
    def stable(self) -> Fit | None:
        """Fit to the points before the decay; None if there are too few."""
        try:
            return fit_law([each for each in self.ladder.points if not each.decayed], samples=self.samples)
        except ConfigError:
            return None

    def choices(self, flops: float, max_parameters: float = math.inf, evaluated: float = 0.0) -> list[Choice]:
        """The choices for a budget, by ascending size, up to somewhat above the best size.

        Args:
            flops: The budget.
            max_parameters: Largest number of parameters, all counted.
            evaluated: Cost of the run's evaluations, in trained tokens, which the budget pays too.

        Raises:
            ConfigError: the budget trains no size for long enough, or every size is too large.
        """
        ladder, found, best = self.ladder, list[Choice](), math.inf
        least, step_tokens = least_tokens(ladder.base), ladder.base.training.tokens_per_step
        for size in self.sizes.ascending():
            if size.total_parameters > max_parameters or flops / size.flops_per_token - evaluated < least:
                break
            paid = int((flops / size.flops_per_token - evaluated) / step_tokens)
            steps = min(paid, LARGEST_INTEGER)
            training = Training.of(size, steps, ladder.unique_tokens)
            found.append(Choice(size, steps, training, self.decayed.predict(training)))
            loss = found[-1].prediction.loss
            best = min(best, loss)
            if (
                loss > best * MAX_LOSS_RATIO
                or training.tokens < MIN_TOKENS_PER_PARAMETER * size.active_parameters
            ):
                break
        if found:
            return found
        smallest = next(self.sizes.ascending())
        if smallest.total_parameters > max_parameters:
            raise ConfigError(
                f"--max-parameters: expected {smallest.total_parameters:,} or more, as the smallest size of "
                f"the family has, found {max_parameters:,.0f}"
            )
        paid = max(0.0, flops / smallest.flops_per_token - evaluated)
        raise ConfigError(
            f"plan: expected a budget for {least:,} tokens with the smallest size of the family and its "
            f"evaluations, found one for {paid:,.0f}"
            + (
                f"; raise it {(least + evaluated) * smallest.flops_per_token / flops:.3g} times"
                if flops > 0
                else ""
            )
        )

    def warnings(self, best: Choice) -> list[str]:
        """Why the prediction of the best choice may not hold; one line each."""
        fit, found, (training, prediction) = self.decayed, list(self.decayed.warnings), best[2:]
        times, passes = training.flops / fit.largest_flops, training.tokens / training.unique_tokens
        compute = f"at {times:.2g} times the compute of the ladder's largest point"
        if (prediction.high - prediction.low) / prediction.loss > WIDE_INTERVAL:
            found.append(
                f"{compute} the interval is wider than a tenth of the loss: the ladder is too short to tell"
            )
        if training.hidden_size <= (least := min(each.hidden_size for each in fit.points)):
            found.append(
                f"{compute} the chosen size is {training.hidden_size}, which is not above the ladder's "
                f"smallest, {least}"
            )
        if times > MAX_COMPUTE_RATIO:
            found.append(f"{compute}: predictions are meant for up to {MAX_COMPUTE_RATIO:g} times")
        if passes > MAX_EPOCHS:
            found.append(
                f"{compute} the text is passed over {passes:.1f} times: more text would teach more "
                "(arXiv:2305.16264)"
            )
        return found

    def bits_per_byte(self, loss: float) -> float | None:
        """A loss in bits per byte of the validation text; None if the number of bytes is unknown."""
        ratios = [point.bits_per_byte / point.loss for point in self.decayed.points if point.bits_per_byte]
        return loss * statistics.median_high(ratios) if ratios else None

    def curve(self, config: Config) -> list[PredictedLoss]:
        """Predicted losses along a planned run: entries of `evaluation.prediction`."""
        last, found = config.training.max_steps, list[PredictedLoss]()
        size, text = self.sizes.of(config.model.hidden_size), self.ladder.unique_tokens
        steps = {int((last - decay_of(last)) * part) for part in _STABLE_PARTS}
        if self.stable is not None:
            first = min(rung.branches[0] for rung in self.ladder.rungs)  # no points of the fit are earlier
            for step in sorted(step for step in steps if step >= first):
                found.append(PredictedLoss(step, *self.stable.predict(Training.of(size, step, text))))
        return [*found, PredictedLoss(last, *self.decayed.predict(Training.of(size, last, text)))]

    def config(self, choice: Choice, distributed: DistributedConfig, micro_batch: int, name: str) -> Config:
        """The whole configuration of a choice's run."""
        base, steps = choice.size.config, choice.steps
        return dataclasses.replace(
            base,
            run=dataclasses.replace(base.run, name=name, output_dir=None),
            schedule=dataclasses.replace(
                base.schedule,
                name="wsd",
                decay_steps=decay_of(steps),
                warmup_steps=warmup_of(base, steps),
            ),
            training=dataclasses.replace(base.training, max_steps=steps, micro_batch_size=micro_batch),
            evaluation=dataclasses.replace(base.evaluation, eval_steps=math.ceil(steps / EVALUATIONS)),
            checkpoint=dataclasses.replace(base.checkpoint, save_steps=max(1, steps // SAVES)),
            distributed=dataclasses.replace(distributed, timeout_seconds=base.distributed.timeout_seconds),
        )


def decay_of(steps: int) -> int:
    """Steps of the decay of a run of `steps` steps: half of it, as in the ladder's runs.

    Longer decays change the loss little (arXiv:2405.18392, figure 5), and a ladder trains one decay for every
    number of tokens.
    """
    return max(1, round(steps / 2))
