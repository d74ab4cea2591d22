"""From a ladder and a budget to a run: the size that the law predicts to end best, and its configuration."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from llm_pretrain.config import Config, DistributedConfig, PredictedLoss
from llm_pretrain.errors import ConfigError
from llm_pretrain.ladder.budget import MAX_EPOCHS, MIN_STEPS, Size, Sizes, decay_of
from llm_pretrain.ladder.family import member
from llm_pretrain.ladder.measurements import unmeasured_point
from llm_pretrain.ladder.points import Ladder
from llm_pretrain.ladder.runs import tokens_per_step
from llm_pretrain.ladder.scaling_law import SAMPLES, Fit, Prediction, fit_law
from llm_pretrain.model import count_parameters

EVALUATIONS = 20
"""Of a planned run, the first and the last not counted."""
_FINENESS = 8
"""Sizes that are tried differ by at least one part in so many: the loss is flat around the best."""
_BEYOND = 4
"""Sizes that are tried above the best: from there on the loss only rises."""
_STABLE_PARTS = (8, 4, 2, 1)
"""The predicted curve begins at an eighth of the stable phase: before it warm-up and start decide."""


class Spending(NamedTuple):
    """What a training costs, in the unit of the budget.

    Args:
        budget: Seconds, or FLOPs.
        of_token: Cost of a trained token of a size.
        of_flop: Of one FLOP of serving.
        served: Tokens to be generated with the model afterwards, 2 FLOPs per active parameter each, which the
            budget pays too.
        evaluated: Tokens that the budget pays besides the trained ones, for the run's evaluations.
    """

    budget: float
    of_token: Callable[[Size], float]
    of_flop: float = 0.0
    served: float = 0.0
    evaluated: float = 0.0

    def tokens(self, size: Size) -> float:
        """Tokens on which a size can be trained; 0 or less where serving leaves nothing."""
        left = self.budget - self.of_flop * 2 * size.parameters * self.served
        return left / self.of_token(size) - self.evaluated


@dataclass(frozen=True)
class Choice:
    """A training that a budget pays for.

    Args:
        config: The family's member, its run still the base's.
        parameters: Total ones.
        steps: Optimizer steps.
        tokens: Trained on.
        flops: Of the training.
        prediction: Of its last evaluation loss.
    """

    config: Config
    parameters: int
    steps: int
    tokens: int
    flops: float
    prediction: Prediction


@dataclass(frozen=True)
class Outlook:
    """What a ladder predicts.

    Args:
        ladder: Measured.
        decayed: Fit to its points after the decay.
        stable: Fit to those before; None where they are too few.
    """

    ladder: Ladder
    decayed: Fit
    stable: Fit | None

    @staticmethod
    def of(ladder: Ladder, samples: int = SAMPLES) -> Outlook:
        """Fit both laws, with so many samples.

        Raises:
            ConfigError: the ladder has too few points, or one without a loss.
        """
        phases = [[point for point in ladder.points if point.decayed is decayed] for decayed in (True, False)]
        try:
            decayed = fit_law(phases[0], samples=samples)
        except ConfigError as error:
            raise ConfigError(f"{ladder.folder}: {error.problems[0].removeprefix('ladder: ')}") from error
        try:
            return Outlook(ladder, decayed, fit_law(phases[1], samples=samples))
        except ConfigError:
            return Outlook(ladder, decayed, None)

    def choices(self, spending: Spending, max_parameters: float = math.inf) -> list[Choice]:
        """Sizes of the family that the budget trains for long enough, ascending, around and below the best.

        Raises:
            ConfigError: there is none.
        """
        found = list[Choice]()
        for choice in self._choices(spending, max_parameters):
            found.append(choice)
            best = min(range(len(found)), key=lambda number: found[number].prediction.loss)
            if len(found) - best > _BEYOND:
                break
        if not found:
            limit = "" if max_parameters == math.inf else f" and at most {max_parameters:,.0f} parameters"
            raise ConfigError(
                f"plan: expected a budget for {MIN_STEPS} steps of a size of the ladder's family{limit}, "
                "found less; raise it"
            )
        return found

    def _choices(self, spending: Spending, max_parameters: float) -> Iterator[Choice]:
        sizes, number = Sizes(self.ladder.base), 0
        while True:
            number += max(1, number // _FINENESS)
            size = sizes.size(number)
            config = member(self.ladder.base, size.hidden_size)
            steps = int(spending.tokens(size) / tokens_per_step(config))
            parameters = count_parameters(config.model).total
            if steps < MIN_STEPS or parameters > max_parameters:
                return
            point = unmeasured_point(config, steps, self.ladder.unique_tokens, decayed=True)
            prediction = self.decayed.predict(point)
            yield Choice(config, parameters, steps, point.tokens, point.flops, prediction)

    def warnings(self, choice: Choice) -> list[str]:
        """Why a prediction may not hold; one line each."""
        found, prediction = list(self.decayed.warnings), choice.prediction
        sizes = [point.hidden_size for point in self.decayed.points]
        hidden = choice.config.model.hidden_size
        planned, measured = sum(len(rung.steps) for rung in self.ladder.rungs), len(self.decayed.points)
        if measured < planned:
            found.append(
                f"the ladder has {measured} of its {planned} points: it is unfinished, or sizes have diverged"
            )
        if (prediction.high - prediction.low) / prediction.loss > WIDE:
            found.append("the interval is wider than a tenth of the loss: the ladder is too short to tell")
        if hidden <= min(sizes):
            found.append(
                f"the best size is not above the ladder's smallest, {min(sizes)}: smaller ones may be better"
            )
        if (times := choice.flops / self.decayed.most_flops) > FAR:
            found.append(
                f"the run has {times:,.0f} times the compute of the ladder's largest; no fit reaches so far"
            )
        elif times > 1 and not self.decayed.drift:
            found.append("no points could be held out: the interval does not tell how wrong the law may be")
        passes = choice.tokens / self.ladder.unique_tokens
        if passes > MAX_EPOCHS:
            found.append(
                f"the text is passed over {passes:.1f} times: more text would teach more (arXiv:2305.16264)"
            )
        return found

    def bits_per_byte(self, loss: float) -> float | None:
        """A loss in bits per byte of the validation text; None where its bytes are unknown."""
        points = [(point.bits_per_byte, point.loss) for point in self.decayed.points]
        ratios = sorted(bits / loss for bits, loss in points if bits)
        return loss * ratios[len(ratios) // 2] if ratios else None

    def curve(self, config: Config) -> list[PredictedLoss]:
        """Predicted losses along a planned run: entries of `evaluation.prediction`."""
        last, found = config.training.max_steps, list[PredictedLoss]()
        stable = last - decay_of(last)
        if self.stable is not None:
            for step in sorted({max(1, stable // part) for part in _STABLE_PARTS}):
                point = unmeasured_point(config, step, self.ladder.unique_tokens, decayed=False)
                found.append(PredictedLoss(step, *self.stable.predict(point)))
        point = unmeasured_point(config, last, self.ladder.unique_tokens, decayed=True)
        return [*found, PredictedLoss(last, *self.decayed.predict(point))]

    def planned(self, choice: Choice, distributed: DistributedConfig, micro_batch: int, name: str) -> Config:
        """The whole configuration of a choice's run."""
        base, factor, steps = choice.config, self.ladder.rate_factor, choice.steps
        if factor is None:
            raise ConfigError(f"{self.ladder.folder}: expected a ladder whose rates are checked, found none")
        return dataclasses.replace(
            base,
            run=dataclasses.replace(base.run, name=name, output_dir=None),
            optimizer=dataclasses.replace(
                base.optimizer,
                learning_rate=base.optimizer.learning_rate * factor,
                muon_learning_rate=base.optimizer.muon_learning_rate * factor,
            ),
            schedule=dataclasses.replace(
                base.schedule,
                name="wsd",
                min_learning_rate=base.schedule.min_learning_rate * factor,
                decay_steps=decay_of(steps),
                warmup_steps=min(base.schedule.warmup_steps, steps // 10),
            ),
            training=dataclasses.replace(base.training, max_steps=steps, micro_batch_size=micro_batch),
            evaluation=dataclasses.replace(base.evaluation, eval_steps=max(1, steps // EVALUATIONS)),
            checkpoint=dataclasses.replace(base.checkpoint, save_steps=max(1, steps // EVALUATIONS)),
            distributed=distributed,
        )


FAR = 30.0
"""Times the compute of the ladder's largest run up to which predictions are meant."""
WIDE = 0.1
"""Width of an interval, relative to the loss, that tells little."""
