"""The scaling law of a ladder, fitted to its points: how the loss falls with parameters and tokens.

    L(N, D) = E + A / N^alpha + B / D^beta

(arXiv:2203.15556, approach 3). N is the number of active parameters, with the embedding. D is the number of
tokens; repeated tokens count less (arXiv:2305.16264).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llm_pretrain.errors import ConfigError
from llm_pretrain.forecast.points import Point, Training

Floats = NDArray[np.float64]

REPETITION = 15.4
"""R* of arXiv:2305.16264: after so many repetitions of the text its value has fallen by 1 - 1/e."""
HUBER_DELTA = 1e-3
"""Larger residuals of log L count linearly, not squared (arXiv:2203.15556, appendix D.2)."""
EXPONENTS = (0.05, 1.0)
"""Bounds of alpha and beta. Larger exponents would predict the loss at its floor just beyond the points."""
_STARTS = (0.2, 0.5, 1.0)
"""Exponents at which the search starts: every pair of alpha and beta."""
SAMPLES = 100
"""Number of laws that the bootstrap fits."""
INTERVAL_LEVEL = 0.9
"""Share of runs whose loss the predicted interval should contain."""
LEAST_NOISE = 4e-3
"""Least assumed noise: standard deviation of log L between seeds. Residuals may be smaller by chance."""
LEAST_POINTS, LEAST_SIZES = 7, 3
NO_LAW = 0.01
"""Noise above this gives a warning: no law fits points from before and after a jump of the loss."""
_NUMBERS = 5
"""Number of a law's coefficients: E, A, alpha, B and beta."""


@dataclass(frozen=True)
class ScalingLaw:
    """A fitted law.

    Args:
        E: Loss of an infinitely large model with infinitely many tokens, nats per token.
        A, alpha: Coefficients of the term A / parameters^alpha.
        B, beta: Coefficients of the term B / tokens^beta.
    """

    E: float
    A: float
    alpha: float
    B: float
    beta: float

    def loss(self, parameters: float, tokens: float, unique_tokens: float) -> float:
        """Predicted loss, nats per token.

        Args:
            parameters: Active parameters.
            tokens: Trained tokens.
            unique_tokens: Tokens of the text; if `tokens` is larger, the rest are repetitions.
        """
        seen = effective_tokens(tokens, unique_tokens)
        return self.E + self.A / parameters**self.alpha + self.B / seen**self.beta

    def of(self, training: Training) -> float:
        """Predicted loss of a training."""
        return self.loss(training.parameters, training.tokens, training.unique_tokens)


def effective_tokens(tokens: float, unique_tokens: float) -> float:
    """Number of new tokens that teach as much as `tokens`: `U + U·R*·(1 - exp(-(D/U - 1) / R*))` if D > U."""
    repeated = max(0.0, tokens / unique_tokens - 1)
    fresh = min(tokens, unique_tokens)
    return fresh + unique_tokens * REPETITION * -math.expm1(-repeated / REPETITION)


class Prediction(NamedTuple):
    """A loss in nats per token, and the interval that contains it with probability `INTERVAL_LEVEL`."""

    loss: float
    low: float
    high: float


@dataclass(frozen=True)
class Fit:
    """The law of a ladder with its uncertainty.

    Args:
        law: The fitted law.
        points: The points to which the law is fitted.
        residuals: log L of each point minus log L of the law.
        noise: Standard deviation of log L around the law at `largest_flops`; for less compute it is larger,
            in proportion to 1 / sqrt(FLOPs).
        samples: Laws fitted to points drawn around the law with this noise.
        largest_flops: Largest FLOPs of a point.
    """

    law: ScalingLaw
    points: tuple[Point, ...]
    residuals: tuple[float, ...]
    noise: float
    samples: tuple[ScalingLaw, ...]
    largest_flops: float

    @property
    def warnings(self) -> list[str]:
        """Why the law may mislead, whatever is predicted with it; one line each."""
        found, law = list[str](), self.law
        if self.noise > NO_LAW:
            found.append(
                f"the points are {self.noise:.1%} off the law, as where some models have not learnt to copy "
                "from their context: a ladder with a larger --budget has longer runs"
            )
        for name, exponent in (("alpha", law.alpha), ("beta", law.beta)):
            if not EXPONENTS[0] * 1.01 < exponent < EXPONENTS[1] * 0.99:
                found.append(f"the ladder is too short to tell {name}, which is at its bound {exponent:.2g}")
        return found

    def predict(self, training: Training) -> Prediction:
        """The predicted loss of a training, also of one outside of the ladder."""
        from scipy.stats import t

        loss = self.law.of(training)
        logs = np.log([sample.of(training) for sample in self.samples]) - math.log(loss)
        spread = math.sqrt(
            float(np.mean(logs**2)) + self.noise**2 * max(1.0, self.largest_flops / training.flops)
        )
        # Student's t, since the noise is an estimate too
        half = spread * float(t.ppf((1 + INTERVAL_LEVEL) / 2, _degrees_of_freedom(self.points)))
        return Prediction(loss, loss * math.exp(-half), loss * math.exp(half))


def fit_law(points: Sequence[Point], *, samples: int = SAMPLES) -> Fit:
    """Fit the law to points of one phase, decayed or stable.

    Args:
        points: Points of at least three sizes.
        samples: Number of laws that the bootstrap fits.

    Raises:
        ConfigError: there are too few points or sizes.
    """
    sizes = {point.hidden_size for point in points}
    if len(points) < LEAST_POINTS or len(sizes) < LEAST_SIZES:
        raise ConfigError(
            f"expected at least {LEAST_POINTS} points of {LEAST_SIZES} sizes for a fit, found "
            f"{len(points)} of {len(sizes)}"
        )
    logs, weights = np.log([point.loss for point in points]), _residual_weights(points)
    law = _search(points, logs, _starts(points))
    fitted = np.log([law.of(point) for point in points])
    squares = float(np.sum(((logs - fitted) * weights) ** 2))
    noise = max(LEAST_NOISE, math.sqrt(squares / _degrees_of_freedom(points)))
    errors = np.random.default_rng(0).normal(0, noise, (samples, len(points))) / weights
    return Fit(
        law=law,
        points=tuple(points),
        residuals=tuple(map(float, logs - fitted)),
        noise=noise,
        samples=tuple(_search(points, fitted + each, [_vector(law)]) for each in errors),
        largest_flops=max(point.flops for point in points),
    )


def _residual_weights(points: Sequence[Point]) -> Floats:
    """Weight of each point's residual: sqrt(FLOPs / largest FLOPs), at most 1.

    Short trainings deviate more from any law, and vary more between seeds.
    """
    flops = np.array([point.flops for point in points])
    return np.sqrt(flops / flops.max())


def _degrees_of_freedom(points: Sequence[Point]) -> int:
    """Degrees of freedom of the residuals: points minus coefficients, at least 1."""
    return max(1, len(points) - _NUMBERS)


def _counts(points: Sequence[Point]) -> tuple[Floats, Floats]:
    """log N and log D of each point."""
    parameters = np.array([point.parameters for point in points], dtype=float)
    tokens = [effective_tokens(point.tokens, point.unique_tokens) for point in points]
    return np.log(parameters), np.log(np.array(tokens, dtype=float))


def _starts(points: Sequence[Point]) -> list[Floats]:
    """Starting points: pairs of exponents, each with the E, A and B that fit best (linear least squares)."""
    from scipy.optimize import nnls

    losses = np.array([point.loss for point in points])
    parameters, tokens = _counts(points)
    found = []
    for alpha in _STARTS:
        for beta in _STARTS:
            columns = [np.ones_like(losses), np.exp(-alpha * parameters), np.exp(-beta * tokens)]
            scales = np.array([column.max() for column in columns])
            matrix = np.stack(columns, 1) / scales / losses[:, None]
            factors = np.maximum(nnls(matrix, np.ones_like(losses))[0], 1e-3) / scales
            found.append(np.array([*np.log(factors), alpha, beta]))
    return found


def _vector(law: ScalingLaw) -> Floats:
    return np.array([math.log(law.E), math.log(law.A), math.log(law.B), law.alpha, law.beta])


def _search(points: Sequence[Point], logs: Floats, starts: Sequence[Floats]) -> ScalingLaw:
    """The law with the least Huber loss of log L, the best of the fits from all starts."""
    from scipy.optimize import least_squares

    parameters, tokens = _counts(points)
    weights = _residual_weights(points)
    center, middle = float(parameters.mean()), float(tokens.mean())
    parameters, tokens = parameters - center, tokens - middle  # else A and alpha are strongly correlated

    def parts(vector: Floats) -> Floats:  # E, A/N^alpha and B/D^beta, of shape [3, points]
        e, a, b, alpha, beta = vector
        return np.exp(np.stack([np.full_like(tokens, e), a - alpha * parameters, b - beta * tokens]))

    def residuals(vector: Floats) -> Floats:
        return weights * (np.log(parts(vector).sum(0)) - logs)

    def jacobian(vector: Floats) -> Floats:
        floor, size, text = parts(vector) / parts(vector).sum(0)
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
    return ScalingLaw(math.exp(e), math.exp(a + alpha * center), alpha, math.exp(b + beta * middle), beta)
