"""The fit of a scaling law: it finds the law that made the points, and its interval contains the truth."""

from __future__ import annotations

import dataclasses
import math
import statistics

import numpy as np
import pytest

from llm_pretrain.errors import ConfigError
from llm_pretrain.forecast.points import Point
from llm_pretrain.forecast.scaling_law import REPETITION, Fit, ScalingLaw, effective_tokens, fit_law

UNIQUE = 3_000_000
LAW = ScalingLaw(E=1.2, A=60.0, alpha=0.34, B=900.0, beta=0.42)


def point(parameters: float, tokens: float, loss: float = math.nan) -> Point:
    return Point(
        hidden_size=round(parameters**0.5),
        parameters=round(parameters),
        tokens=round(tokens),
        unique_tokens=UNIQUE,
        flops=6 * parameters * tokens,
        loss=loss,
        bits_per_byte=None,
        decayed=True,
    )


def measured(noise: float, seed: int = 0, law: ScalingLaw = LAW, sizes: int = 5) -> list[Point]:
    """Sizes at three numbers of tokens, each with the same compute."""
    generator, found = np.random.default_rng(seed), []
    for parameters in np.geomspace(1e5, 1e6, sizes):
        for share in (1, 2, 4):
            each = point(parameters, 1.5e12 / parameters * share / 4)
            loss = law.of(each) * math.exp(noise * generator.normal())
            found.append(dataclasses.replace(each, loss=loss))
    return found


def ladder_points(noise: float, seed: int, sizes: int) -> list[Point]:
    """As a ladder has them: each size after 4 and 8 M tokens, the smallest also after 6 and 10 M."""
    generator, found = np.random.default_rng(seed), []
    for number, parameters in enumerate(3e5 * 1.6 ** np.arange(sizes)):
        for tokens in (4e6, 8e6) if number else (4e6, 6e6, 8e6, 10e6):
            each = point(parameters, tokens)
            loss = LAW.of(each) * math.exp(noise * generator.normal())
            found.append(dataclasses.replace(each, loss=loss))
    return found


def test_the_law_of_exact_points_is_found():
    fit = fit_law(measured(0.0), samples=2)
    found = fit.law
    assert max(abs(math.log(each.loss / found.of(each))) for each in fit.points) < 1e-5
    beyond = point(4e6, 6e6)
    assert found.of(beyond) == pytest.approx(LAW.of(beyond), rel=1e-3)
    assert found.alpha == pytest.approx(LAW.alpha, rel=0.05)
    assert found.beta == pytest.approx(LAW.beta, rel=0.05)
    assert not fit.warnings


@pytest.mark.slow
@pytest.mark.parametrize(("compute", "sizes"), [(8, 3), (8, 5), (30, 3), (30, 5)])
def test_the_interval_contains_what_is_measured_later(compute, sizes):
    """At many times the compute, in at least eight of ten ladders."""
    assert contained(compute, range(40), 60, sizes) >= 32


def test_the_interval_contains_what_is_measured_nearer_by():
    assert contained(8, range(1), 6, 5) == 1


WIDEST = {(8, 3): 0.15, (8, 5): 0.08, (30, 3): 0.27, (30, 5): 0.14}
"""(compute, sizes) -> largest median half width of an interval, as a share of the loss."""


def contained(compute: int, seeds: range, samples: int, sizes: int) -> int:
    """In how many ladders the interval contains a run of `compute` times the compute."""
    noise, found, widths = 0.004, 0, list[float]()
    for seed in seeds:
        points = ladder_points(noise, seed, sizes)
        largest, growth = points[-1], math.sqrt(compute)
        later = point(largest.parameters * growth, largest.tokens * growth)
        loss = LAW.of(later) * math.exp(noise * np.random.default_rng(seed + 1000).normal())
        prediction = fit_law(points, samples=samples).predict(later)
        assert prediction.low < prediction.loss < prediction.high
        widths.append(math.log(prediction.high / prediction.low) / 2)
        found += prediction.low <= loss <= prediction.high
    assert statistics.median(widths) < WIDEST[compute, sizes], "any interval would do that is wide enough"
    return found


def test_noise_widens_the_interval_and_so_does_distance():
    quiet, noisy, again = (fit_law(measured(noise), samples=5) for noise in (0.001, 0.03, 0.03))
    assert noisy == again
    near, far = point(1e6, 2e6), point(1e7, 2e7)

    def width(fit: Fit, at: Point) -> float:
        return fit.predict(at).high - fit.predict(at).low

    assert width(quiet, near) < width(noisy, near)
    assert width(quiet, near) < width(quiet, far)


def test_repeated_tokens_count_less():
    assert effective_tokens(2e6, 3e6) == 2e6
    assert effective_tokens(3e6, 3e6) == pytest.approx(3e6)
    assert 5.8e6 < effective_tokens(6e6, 3e6) < 6e6
    assert effective_tokens(1e12, 3e6) == pytest.approx(3e6 * (1 + REPETITION))


def test_an_exponent_at_its_bound_is_named():
    steep = dataclasses.replace(LAW, B=900.0 * 3e5**0.88, beta=1.3)
    off, line = fit_law(measured(0.0, law=steep), samples=2).warnings
    assert "off the law" in off
    assert line.endswith("to tell beta, which is at its bound 1")


def test_what_the_law_cannot_follow_widens_its_interval():
    """Points that the law misses are noise to it, by which the interval grows, and they are named."""
    points = [
        dataclasses.replace(each, loss=LAW.of(each) * (0.9 if each.flops > 5e12 else 1.0))
        for each in measured(0.0)
    ]
    exact, bent = fit_law(measured(0.0), samples=5), fit_law(points, samples=5)
    assert not exact.warnings
    assert any("off the law" in line for line in bent.warnings)
    widths = [
        math.log(fit.predict(point(4e6, 6e6)).high / fit.predict(point(4e6, 6e6)).loss)
        for fit in (exact, bent)
    ]
    assert widths[1] > 2 * widths[0]


@pytest.mark.parametrize("left", [measured(0.0)[:6], measured(0.0)[:3] * 3])
def test_too_few_points_or_sizes_are_refused(left):
    with pytest.raises(ConfigError, match="expected at least 7 points of 3 sizes"):
        fit_law(left)
