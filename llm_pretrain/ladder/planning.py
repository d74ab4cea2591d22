"""From a ladder and a budget to a run: the size that the law predicts to end best, and its configuration."""

from __future__ import annotations

import dataclasses
import math
import statistics
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from llm_pretrain.config import LARGEST_INTEGER, Config, DistributedConfig, PredictedLoss
from llm_pretrain.errors import ConfigError
from llm_pretrain.ladder.budget import (
    MAX_EPOCHS,
    MIN_TOKENS_PER_PARAMETER,
    decay_of,
    least_tokens,
    most_run_flops,
)
from llm_pretrain.ladder.family import Size, Sizes, tokens_per_step
from llm_pretrain.ladder.points import Ladder, Training
from llm_pretrain.ladder.runs import at_rate, warmup_of
from llm_pretrain.ladder.scaling_law import SAMPLES, Fit, Prediction, fit_law

EVALUATIONS, SAVES = 10, 20
"""In a planned run, about; of evaluations at most, besides that before the first step."""
MAX_COMPUTE_RATIO = 30.0
"""Times the compute of the ladder's largest run up to which predictions are meant."""
MAX_LOSS_RATIO = 1.25
"""Larger sizes are not tried beyond one whose loss is this factor above the least."""
WIDE_INTERVAL = 0.1
"""Width of an interval, relative to the loss, that tells little."""
_STABLE_PARTS = tuple(2 ** (-k / 2) for k in range(6, -1, -1))
"""Shares of the stable phase at which the predicted curve has points: near enough for lines between them."""


def served_flops(active_parameters: float, tokens: float) -> float:
    """FLOPs of generating `tokens`."""
    return 2 * active_parameters * tokens


class RunBudget(NamedTuple):
    """What a run may cost, in one unit: seconds, or FLOPs.

    Args:
        total: The budget.
        per_token: Cost of a trained token without its FLOPs.
        per_flop: Of one FLOP.
        served: Tokens to be generated with the model afterwards, 2 FLOPs per active parameter each, which the
            budget pays too.
        evaluated: Tokens that the budget pays besides the trained ones, for the run's evaluations.
    """

    total: float
    per_token: float = 0.0
    per_flop: float = 1.0
    served: float = 0.0
    evaluated: float = 0.0

    def tokens(self, size: Size) -> float:
        """Tokens on which a size can be trained; 0 or less where serving leaves nothing."""
        left = self.total - self.per_flop * served_flops(size.active_parameters, self.served)
        return left / self._token_cost(size) - self.evaluated

    def share_for(self, size: Size, tokens: float) -> float:
        """What it costs to train a size on `tokens`, relative to this budget."""
        served = self.per_flop * served_flops(size.active_parameters, self.served)
        return ((tokens + self.evaluated) * self._token_cost(size) + served) / self.total

    def _token_cost(self, size: Size) -> float:
        return self.per_token + self.per_flop * size.flops_per_token

    def check(self, unique_tokens: int, max_parameters: float) -> None:
        """Raises ConfigError where the text is too short for any size that the budget is for."""
        parameters = MAX_EPOCHS * unique_tokens / MIN_TOKENS_PER_PARAMETER
        most = most_run_flops(unique_tokens) + served_flops(parameters, self.served)
        if max_parameters > parameters and (flops := self.total / self.per_flop) > most:
            # `most` grows with the square of the text, its served part as the text does
            tokens = unique_tokens * (flops / most) ** (1.0 if self.served else 0.5)
            raise ConfigError(
                f"plan: expected a budget of at most {most:.2g} FLOPs for {unique_tokens:,} tokens of text, "
                f"found {flops:.2g}: models for more would see less than {MIN_TOKENS_PER_PARAMETER:g} token "
                f"per parameter in {MAX_EPOCHS:g} passes; divide it by {flops / most:.3g}, bring text of "
                f"{tokens:,.0f} tokens, or limit --max-parameters"
            )


@dataclass(frozen=True)
class Choice:
    """A training that a budget pays for.

    Args:
        size: That is trained.
        steps: Optimizer steps.
        training: The same with its tokens and compute.
        prediction: Of its last evaluation loss.
    """

    size: Size
    steps: int
    training: Training
    prediction: Prediction


@dataclass(frozen=True)
class Forecast:
    """What a ladder predicts; its laws are fitted when they are first asked for.

    Args:
        ladder: Measured.
        samples: Of a fit's bootstrap.
    """

    ladder: Ladder
    samples: int = SAMPLES

    @cached_property
    def sizes(self) -> Sizes:
        """The family's members, each counted once for all choices."""
        return Sizes(self.ladder.base)

    @cached_property
    def decayed(self) -> Fit:
        """Fit to the points after the decay.

        Raises:
            ConfigError: too few points, or one without a loss.
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
        """Fit to the points before the decay, from the first branch on; None where they are too few."""
        points = [
            point
            for point in self.ladder.points
            if not point.decayed and point.tokens >= self._first_branch * tokens_per_step(self.ladder.base)
        ]
        try:
            return fit_law(points, samples=self.samples)
        except ConfigError:
            return None

    @property
    def _first_branch(self) -> int:
        """Step before which losses tell the start of a training more than its size."""
        return min(rung.branches[0] for rung in self.ladder.rungs)

    def choices(self, budget: RunBudget, max_parameters: float = math.inf) -> list[Choice]:
        """Sizes of the family that the budget trains for long enough, ascending, around and below the best.

        Raises:
            ConfigError: there is none.
        """
        found, best, least = list[Choice](), math.inf, least_tokens(self.ladder.base)
        step_tokens = tokens_per_step(self.ladder.base)
        for size in self.sizes.ascending():
            paid = budget.tokens(size)
            if math.isnan(paid) or paid < least or size.total_parameters > max_parameters:
                break
            if paid / step_tokens > LARGEST_INTEGER:  # larger sizes have fewer steps
                continue
            steps = int(paid / step_tokens)
            training = Training.of(size, steps, self.ladder.unique_tokens)
            found.append(Choice(size, steps, training, self.decayed.predict(training)))
            loss = found[-1].prediction.loss
            best = min(best, loss)
            if (
                loss > best * MAX_LOSS_RATIO
                or training.tokens < MIN_TOKENS_PER_PARAMETER * size.active_parameters
            ):
                break
        if not found:
            raise self._no_choice(budget, max_parameters)
        return found

    def _no_choice(self, budget: RunBudget, max_parameters: float) -> ConfigError:
        """Why a budget trains no size."""
        smallest = next(self.sizes.ascending())
        if smallest.total_parameters > max_parameters:
            return ConfigError(
                f"--max-parameters: expected {smallest.total_parameters:,} or more, as the smallest size of "
                f"the family has, found {max_parameters:,.0f}"
            )
        paid = budget.tokens(smallest)
        if paid / tokens_per_step(self.ladder.base) > LARGEST_INTEGER:
            return ConfigError(
                f"plan: expected a budget for {LARGEST_INTEGER:,} steps at most of a size with at most "
                f"{max_parameters:,.0f} parameters, found more; lower it, or raise --max-parameters"
            )
        least = least_tokens(self.ladder.base)
        found = max(0, int(paid)) if math.isfinite(paid) else 0
        times = f" {budget.share_for(smallest, least):.3g} times" if budget.total > 0 else ""
        served = ", or lower --serve-tokens" if budget.served else ""
        return ConfigError(
            f"plan: expected a budget for {least:,} tokens with the smallest size of the family and its "
            f"evaluations, found one for {found:,}; raise it{times}{served}"
        )

    def warnings(self, best: Training, prediction: Prediction) -> list[str]:
        """Why a prediction may not hold; one line each.

        Args:
            best: The training that is chosen.
            prediction: Of its loss.
        """
        fit, found = self.decayed, list(self.decayed.warnings)
        sizes = [each.hidden_size for each in fit.points]
        times, passes = best.flops / fit.largest_flops, best.tokens / best.unique_tokens
        compute = f"at {times:.2g} times the compute of the ladder's largest point"
        if (prediction.high - prediction.low) / prediction.loss > WIDE_INTERVAL:
            found.append(
                f"{compute} the interval is wider than a tenth of the loss: the ladder is too short to tell"
            )
        size = f"{compute} the chosen size is {best.hidden_size}, which is not"
        if best.hidden_size <= min(sizes):
            found.append(f"{size} above the ladder's smallest, {min(sizes)}")
        elif times <= 1 and best.hidden_size >= max(sizes):
            found.append(f"{size} below the ladder's largest, {max(sizes)}")
        if times > MAX_COMPUTE_RATIO:
            found.append(f"{compute}: predictions are meant for up to {MAX_COMPUTE_RATIO:g} times")
        if times > 1 and fit.extrapolation_error is None:
            found.append("no points could be held out: the interval does not tell how wrong the law may be")
        if passes > MAX_EPOCHS:
            found.append(
                f"{compute} the text is passed over {passes:.1f} times: more text would teach more "
                "(arXiv:2305.16264)"
            )
        return found

    def bits_per_byte(self, loss: float) -> float | None:
        """A loss in bits per byte of the validation text; None where its bytes are unknown."""
        ratios = [point.bits_per_byte / point.loss for point in self.decayed.points if point.bits_per_byte]
        return loss * statistics.median_high(ratios) if ratios else None

    def curve(self, config: Config) -> list[PredictedLoss]:
        """Predicted losses along a planned run: entries of `evaluation.prediction`."""
        last, found = config.training.max_steps, list[PredictedLoss]()
        size, text = self.sizes.of(config.model.hidden_size), self.ladder.unique_tokens
        steps = {int((last - decay_of(last)) * part) for part in _STABLE_PARTS}
        if self.stable is not None:
            for step in sorted(step for step in steps if step >= self._first_branch):
                found.append(PredictedLoss(step, *self.stable.predict(Training.of(size, step, text))))
        return [*found, PredictedLoss(last, *self.decayed.predict(Training.of(size, last, text)))]

    def config(self, choice: Choice, distributed: DistributedConfig, micro_batch: int, name: str) -> Config:
        """The whole configuration of a choice's run."""
        if (factor := self.ladder.rate_factor) is None:
            raise ConfigError(f"{self.ladder.folder}: expected a ladder whose rates are checked, found none")
        base, steps = at_rate(choice.size.config, factor), choice.steps
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
