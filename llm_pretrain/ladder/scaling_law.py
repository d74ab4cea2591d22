"""The scaling law of a ladder, fitted to its points: how the loss falls with parameters and tokens.

    L(N, D) = E + A / N^alpha + B / D^beta

(arXiv:2203.15556, approach 3). N are active parameters, with or without embedding and head. A prediction is
the mean of these two laws, each in proportion to how well it fits: points rarely tell them apart. D counts
tokens; those of repeated text count less (arXiv:2305.16264).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llm_pretrain.errors import ConfigError
from llm_pretrain.ladder.points import Point, Training

Floats = NDArray[np.float64]
Counting = Literal["parameters", "parameters_with_embedding"]
"""The count of a point that is N."""

REPETITION = 15.4
"""R* of arXiv:2305.16264: after so many repetitions a token has lost 1 - 1/e of its value."""
HUBER_DELTA = 1e-3
"""Residual of log L from which it counts linearly (arXiv:2203.15556, appendix D.2)."""
EXPONENTS = (0.05, 1.0)
"""Bounds of alpha and beta: larger ones bring the loss to its floor just beyond the points."""
_STARTS = (0.2, 0.5, 1.0)
"""Exponents at which the search begins, each with each."""
SAMPLES = 100
"""Of the bootstrap."""
INTERVAL_LEVEL = 0.9
"""Share of runs that the interval should contain."""
LEAST_NOISE = 4e-3
"""Standard deviation of log L between seeds, of which a ladder's residuals may show less by chance."""
HELD_OUT = 0.25
"""Share of the points, two at least, that is left out to see how a fit predicts them: of most compute."""
LEAST_POINTS, LEAST_SIZES = 7, 3
FEW_POINTS = 8
"""With fewer a plan warns: a law of five numbers leaves too few to tell its noise."""
NO_LAW = 0.01
"""Noise above this is named: points before and after a jump of the loss, which no law follows."""
DOUBT = 0.25
"""Weight of the laws together of which one number is in doubt, from which it is named."""
NO_FLOOR = 0.01
"""E below this share of the least loss is named: what the ladder shows has no floor yet."""
NO_FALL = 0.01
"""A term that falls less than this share of the least loss between the points is named too."""
_NUMBERS = 5
"""Of a law: E, A, alpha, B and beta."""


@dataclass(frozen=True)
class ScalingLaw:
    """A fitted law.

    Args:
        counting: What N is.
        E: Loss that no size and no text removes, nats per token.
        A, alpha: Of the term of parameters.
        B, beta: Of the term of tokens.
    """

    counting: Counting
    E: float
    A: float
    alpha: float
    B: float
    beta: float

    def loss(self, parameters: float, tokens: float, unique_tokens: float) -> float:
        """Predicted loss, nats per token.

        Args:
            parameters: N, counted as `counting` says.
            tokens: Trained on.
            unique_tokens: Of the text; more `tokens` are repetitions.
        """
        seen = effective_tokens(tokens, unique_tokens)
        return self.E + self.A / parameters**self.alpha + self.B / seen**self.beta

    def of(self, training: Training) -> float:
        """Predicted loss of a training."""
        return self.loss(getattr(training, self.counting), training.tokens, training.unique_tokens)


def effective_tokens(tokens: float, unique_tokens: float) -> float:
    """Tokens of new text that teach as much: `U + U·R*·(1 - exp(-(D/U - 1) / R*))` for D > U."""
    repeated = max(0.0, tokens / unique_tokens - 1)
    fresh = min(tokens, unique_tokens)
    return fresh + unique_tokens * REPETITION * -math.expm1(-repeated / REPETITION)


class Prediction(NamedTuple):
    """A loss in nats per token, and the interval that contains it with probability `INTERVAL_LEVEL`."""

    loss: float
    low: float
    high: float


@dataclass(frozen=True)
class MeanLaw:
    """The laws that were fitted to the same points, the best first.

    Args:
        laws: One for each counting.
        weights: Of each law's log L, 1 together.
    """

    laws: tuple[ScalingLaw, ...]
    weights: tuple[float, ...]

    def of(self, training: Training) -> float:
        """Predicted loss of a training: the geometric mean."""
        pairs = zip(self.weights, self.laws, strict=True)
        return math.exp(math.fsum(weight * math.log(law.of(training)) for weight, law in pairs))


@dataclass(frozen=True)
class Fit:
    """The law of a ladder with what is uncertain about it.

    Args:
        law: The mean of both countings.
        points: That it is fitted to.
        residuals: log L of each point less the law's.
        noise: Standard deviation of log L around the law at `largest_flops`; it grows with the square root of
            less compute.
        samples: Laws fitted to points drawn around the law with its noise, of each counting in proportion to
            its weight.
        extrapolation_error: Error of log L per factor e of compute beyond the points, found by holding points
            out: the interval is at least as wide, since samples cannot see that the law itself is wrong.
            None where too few would be left.
        largest_flops: Of the point that has most.
        warnings: Why the ladder may be too short to tell; one line each.
    """

    law: MeanLaw
    points: tuple[Point, ...]
    residuals: tuple[float, ...]
    noise: float
    samples: tuple[ScalingLaw, ...]
    extrapolation_error: float | None
    largest_flops: float
    warnings: tuple[str, ...]

    @property
    def best(self) -> ScalingLaw:
        """The law of the counting that fits best."""
        return self.law.laws[0]

    def predict(self, training: Training) -> Prediction:
        """The loss of a training that may be none of the ladder's."""
        from scipy.stats import t

        loss = self.law.of(training)
        logs = np.log([sample.of(training) for sample in self.samples]) - math.log(loss)
        times = training.flops / self.largest_flops
        wrong_form = (self.extrapolation_error or 0.0) * max(0.0, math.log(times))
        spread = math.sqrt(float(np.mean(logs**2)) + self.noise**2 * max(1.0, 1 / times))
        students = float(
            t.ppf((1 + INTERVAL_LEVEL) / 2, _degrees_of_freedom(self.points))
        )  # the noise is an estimate too
        half = max(students * spread, wrong_form)
        return Prediction(loss, loss * math.exp(-half), loss * math.exp(half))


def fit_law(points: Sequence[Point], *, samples: int = SAMPLES) -> Fit:
    """Fit the law to points of one phase, decayed or stable.

    Args:
        points: Of at least three sizes, all finite.
        samples: Of the bootstrap.

    Raises:
        ConfigError: too few points or sizes, or a loss that is no number above 0.
    """
    if wrong := [point for point in points if not (math.isfinite(point.loss) and point.loss > 0)]:
        raise ConfigError(
            f"expected losses above 0, found {wrong[0].loss} of hidden size {wrong[0].hidden_size} "
            f"after {wrong[0].tokens:,} tokens"
        )
    sizes = {point.hidden_size for point in points}
    if len(points) < LEAST_POINTS or len(sizes) < LEAST_SIZES:
        raise ConfigError(
            f"expected at least {LEAST_POINTS} points of {LEAST_SIZES} sizes for a fit, found "
            f"{len(points)} of {len(sizes)}"
        )
    law = _mean_law(points)
    residuals = _residuals(law, points)
    noise = _noise(residuals, points)
    generator = np.random.default_rng(0)
    drawn = []
    for number in generator.choice(len(law.laws), size=samples, p=law.weights):
        drawn_from = law.laws[number]
        errors = generator.normal(0, noise, len(points)) / _residual_weights(points)
        logs = np.log([drawn_from.of(point) for point in points]) + errors
        drawn.append(_search(points, logs, drawn_from.counting, [_vector(drawn_from)]))
    return Fit(
        law=law,
        points=tuple(points),
        residuals=tuple(map(float, residuals)),
        noise=noise,
        samples=tuple(drawn),
        extrapolation_error=_extrapolation_error(points),
        largest_flops=max(point.flops for point in points),
        warnings=tuple(_warnings(law, points, noise)),
    )


def _residual_weights(points: Sequence[Point]) -> Floats:
    """How much a residual of each point counts, at most 1: its square in proportion to the point's compute.

    Short trainings deviate more from any law, and seeds move them more.
    """
    flops = np.array([point.flops for point in points])
    return np.sqrt(flops / flops.max())


def _mean_law(points: Sequence[Point]) -> MeanLaw:
    """The best law of each counting, weighted by its likelihood.

    Huber's cost is nearly linear, as that of Laplace errors: with their scale unknown, the likelihood is
    their sum to the power of -(points - numbers of the law).
    """
    countings: tuple[Counting, Counting] = ("parameters_with_embedding", "parameters")
    fitted = [_best(points, counting) for counting in countings]
    cost_of = {law: _cost(_residuals(law, points), points) for law in fitted}
    fitted.sort(key=cost_of.__getitem__)
    residual = LEAST_NOISE * math.sqrt(_degrees_of_freedom(points) / len(points))  # what a right law leaves
    least = _cost(np.full(len(points), residual), points)  # less tells nothing
    costs = np.array([max(least, cost_of[law]) for law in fitted])
    weights = (costs.min() / costs) ** _degrees_of_freedom(points)
    return MeanLaw(tuple(fitted), tuple(map(float, weights / weights.sum())))


def _residuals(law: ScalingLaw | MeanLaw, points: Sequence[Point]) -> Floats:
    """log L of each point less the law's."""
    return np.log([point.loss / law.of(point) for point in points])


def _noise(residuals: Floats, points: Sequence[Point]) -> float:
    """Standard deviation of log L around a fitted law, of the point of most compute."""
    squares = float(np.sum((residuals * _residual_weights(points)) ** 2))
    return max(LEAST_NOISE, math.sqrt(squares / _degrees_of_freedom(points)))


def _degrees_of_freedom(points: Sequence[Point]) -> int:
    """Degrees of freedom that a fitted law leaves."""
    return max(1, len(points) - _NUMBERS)


def _warnings(mean: MeanLaw, points: Sequence[Point], noise: float) -> list[str]:
    found = list[str]()
    if len(points) < FEW_POINTS:
        found.append(f"the ladder is too short to tell: {len(points)} points for a law of five numbers")
    if noise > NO_LAW:
        found.append(
            f"the points are {noise:.1%} off the law, as where some models have not learnt to copy from "
            "their context: a ladder with a larger --budget has longer runs"
        )
    doubts: dict[str, tuple[float, str]] = {}  # number -> (weight of its laws, why)
    for law, weight in zip(mean.laws, mean.weights, strict=True):
        for number, reason in _doubts(law, points).items():
            before, first = doubts.get(number, (0.0, reason))
            doubts[number] = before + weight, first
    return found + [
        f"the ladder is too short to tell {reason}" for weight, reason in doubts.values() if weight >= DOUBT
    ]


def _doubts(law: ScalingLaw, points: Sequence[Point]) -> dict[str, str]:
    """Numbers of a law that the points do not tell, and why."""
    found, least = dict[str, str](), min(point.loss for point in points)
    if NO_FLOOR * least > law.E:
        found["E"] = f"which loss remains with any size and text: E is below {NO_FLOOR:.0%} of the least loss"
    parameters, tokens = (np.exp(counts) for counts in _counts(points, law.counting))
    for name, term, values in (
        ("alpha", "parameters", law.A / parameters**law.alpha),
        ("beta", "tokens", law.B / tokens**law.beta),
    ):
        exponent, fall = getattr(law, name), float(np.ptp(values))
        if not EXPONENTS[0] * 1.01 < exponent < EXPONENTS[1] * 0.99:
            found[name] = f"how the loss falls with {term}: {name} is at its bound {exponent:.2g}"
        elif fall < NO_FALL * least:
            found[name] = (
                f"how the loss falls with {term}: between its points only by {fall:.2g} of {least:.2f}"
            )
    return found


def _extrapolation_error(points: Sequence[Point]) -> float | None:
    """How wrong a fit to the cheaper points is about the others, per factor e of compute between them.

    What seeds differ by is not counted. None where too few points would be left.
    """
    by_compute = sorted(points, key=lambda point: point.flops)
    limit = by_compute[-max(2, round(len(points) * HELD_OUT))].flops * 0.99  # equal compute is one rung
    cheap = [point for point in by_compute if point.flops < limit]
    held = by_compute[len(cheap) :]
    if len(cheap) < LEAST_POINTS - 1 or len({point.hidden_size for point in cheap}) < LEAST_SIZES:
        return None
    squares = np.maximum(_residuals(_mean_law(cheap), held) ** 2 - LEAST_NOISE**2, 0)
    distances = np.log([point.flops / cheap[-1].flops for point in held])
    return math.sqrt(float(squares.sum() / (distances**2).sum()))


def _best(points: Sequence[Point], counting: Counting) -> ScalingLaw:
    """The best law over all starts."""
    logs = np.log([point.loss for point in points])
    parameters, tokens = _counts(points, counting)
    starts = [
        _linear_start(parameters, tokens, np.exp(logs), alpha, beta) for alpha in _STARTS for beta in _STARTS
    ]
    return _search(points, logs, counting, starts)


def _counts(points: Sequence[Point], counting: Counting) -> tuple[Floats, Floats]:
    """log N and log D of each point."""
    parameters = [getattr(point, counting) for point in points]
    tokens = [effective_tokens(point.tokens, point.unique_tokens) for point in points]
    return np.log(np.array(parameters, dtype=float)), np.log(np.array(tokens, dtype=float))


def _linear_start(parameters: Floats, tokens: Floats, losses: Floats, alpha: float, beta: float) -> Floats:
    """E, A and B that fit best with these exponents: a linear problem."""
    from scipy.optimize import nnls

    columns = [np.ones_like(losses), np.exp(-alpha * parameters), np.exp(-beta * tokens)]
    scales = np.array([column.max() for column in columns])
    matrix = np.stack([column / scale / losses for column, scale in zip(columns, scales, strict=True)], 1)
    found = np.maximum(nnls(matrix, np.ones_like(losses))[0], 1e-3) / scales
    return np.array([*np.log(found), alpha, beta])


def _vector(law: ScalingLaw) -> Floats:
    return np.array([math.log(law.E), math.log(law.A), math.log(law.B), law.alpha, law.beta])


def _parts(vector: Floats, parameters: Floats, tokens: Floats) -> Floats:
    """E, A/N^alpha and B/D^beta of a vector, of shape [3, points]."""
    e, a, b, alpha, beta = vector
    return np.exp(np.stack([np.full_like(tokens, e), a - alpha * parameters, b - beta * tokens]))


def _search(
    points: Sequence[Point], logs: Floats, counting: Counting, starts: Sequence[Floats]
) -> ScalingLaw:
    """The law of least Huber loss of log L, from the best of all starts."""
    from scipy.optimize import least_squares

    parameters, tokens = _counts(points, counting)
    weights = _residual_weights(points)
    center, middle = float(parameters.mean()), float(tokens.mean())
    parameters, tokens = parameters - center, tokens - middle  # else A and alpha nearly compensate each other

    def residuals(vector: Floats) -> Floats:
        return weights * (np.log(_parts(vector, parameters, tokens).sum(0)) - logs)

    def jacobian(vector: Floats) -> Floats:
        parts = _parts(vector, parameters, tokens)
        floor, size, text = parts / parts.sum(0)
        return np.stack([floor, size, text, -size * parameters, -text * tokens], 1) * weights[:, None]

    low = [-20.0, -20.0, -20.0, EXPONENTS[0], EXPONENTS[0]]
    high = [5.0, 10.0, 10.0, EXPONENTS[1], EXPONENTS[1]]
    solutions = []
    for start in starts:
        shifted = start.copy()
        shifted[1] -= start[3] * center
        shifted[2] -= start[4] * middle
        inside = np.clip(shifted, np.array(low) + 1e-6, np.array(high) - 1e-6)
        solutions.append(
            least_squares(
                residuals, inside, jac=jacobian,  # pyright: ignore[reportArgumentType] (stub: text only)
                bounds=(low, high), method="dogbox", loss="huber", f_scale=HUBER_DELTA,
                x_scale="jac", max_nfev=400,
            )
        )  # fmt: skip
    e, a, b, alpha, beta = map(float, min(solutions, key=lambda solution: solution.cost).x)
    return ScalingLaw(
        counting, math.exp(e), math.exp(a + alpha * center), alpha, math.exp(b + beta * middle), beta
    )


def _cost(residuals: Floats, points: Sequence[Point]) -> float:
    """Huber loss of log L, each weighted as in the fit."""
    errors = np.abs(residuals * _residual_weights(points))
    return float(
        np.where(errors < HUBER_DELTA, errors**2 / 2, HUBER_DELTA * (errors - HUBER_DELTA / 2)).sum()
    )
