"""From a budget to the rungs of a ladder: which sizes, for how many steps each, in which time."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from llm_pretrain.config.tree import Config
from llm_pretrain.errors import ConfigError
from llm_pretrain.forecast.family import Size, Sizes
from llm_pretrain.forecast.ladder_runs import LadderRun, ladder_runs, longest_first, makespan
from llm_pretrain.forecast.points import Rung

BRANCHES = (2, 4)
"""Where decays begin, in units: a number of steps, the same for every size, that the budget decides. A
decay that begins at k units ends at 2k, after D tokens for k = 4: every size sees D/2 and D, which tell how
the loss falls with size."""
SMALLEST_BRANCHES = (2, 3, 4, 5)
"""Branches of the smallest size, whose tokens cost least: up to 5D/4 tells how the loss falls with tokens."""
SIZE_COUNTS = (5, 4, 3)
"""Numbers of sizes, the preferred first; with fewer than three a curve over sizes is no fit."""
WIDTH_RATIO = 1.25
"""Hidden size over that of the next smaller size: some 1.6 times the FLOPs per token."""
TOKENS_PER_PARAMETER = 20.0
"""Ratio of the middle size at D, about; with the embedding: compute-optimal (arXiv:2203.15556)."""
MAX_EPOCHS = 4.0
"""Passes of the store in the longest run: more repetitions teach less (arXiv:2305.16264)."""
MIN_TOKENS_PER_PARAMETER = 1.0
"""Least ratio of the smallest size: with fewer in `MAX_EPOCHS` passes all sizes lack text, and no size is the
best. A larger budget is not spent."""
MIN_STEPS = 450
"""Steps of a run: the losses of fewer fall in another way (docs/log.md#ladders)."""
MIN_TOKENS = 3_750_000
"""Tokens of a run: whatever their size, models learn to copy from their context between 2 and 5 M tokens, and
no one law fits losses from before and after this jump. Most have learnt it here; later costs more
(docs/log.md#ladders)."""
EVALUATION_COST = 1 / 3
"""Cost of an evaluated token, in trained ones: it has no backward pass."""
FLOPS_LIMIT, SECONDS_LIMIT = 1e27, 10 * 365 * 86400.0
"""Larger budgets are mistakes; more money or tokens than `FLOPS_LIMIT` too."""
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def read_budget(
    text: str, option: str = "--budget", *, only_time: bool = False
) -> tuple[float | None, float | None]:
    """(FLOPs, seconds) of a budget, one of them None: `90s`, `1h05m`, `1.5h`, `1d`, or FLOPs as `1e16`.

    Args:
        text: As it was given.
        option: Which gave it, for the message.
        only_time: Whether FLOPs are refused.

    Raises:
        ConfigError: another text, or nothing above zero.
    """
    parts = re.findall(r"(\d+(?:\.\d*)?(?:e[+]?\d+)?)([smhd]?)", given := text.strip().lower())
    number = sum(float(each) * _UNITS.get(unit, 1.0) for each, unit in parts)
    is_time = all(unit for _, unit in parts)
    is_known = is_time or (len(parts) == 1 and not only_time)
    if "".join(map("".join, parts)) != given or not is_known or not 0 < number < math.inf:
        others = "" if only_time else ", or FLOPs such as 1e16"
        raise ConfigError(f"{option}: expected a time such as 20m or 2h{others}, found {text!r}")
    if number > (SECONDS_LIMIT if is_time else FLOPS_LIMIT):
        most = "10 years" if is_time else f"{FLOPS_LIMIT:g} FLOPs"
        raise ConfigError(f"{option}: expected at most {most}, found {text!r}")
    return (None, number) if is_time else (number, None)


class Speed(NamedTuple):
    """Measured speed of a ladder's runs on this machine.

    Args:
        flops_per_second: Speed of one run, with others beside it.
        start_up: Seconds from a launch to the first step.
        slots: Runs side by side.
        evaluated_tokens: Tokens of one evaluation.
    """

    flops_per_second: float
    start_up: float
    slots: int
    evaluated_tokens: int


def least_tokens(config: Config) -> int:
    """Tokens of the shortest run that a law holds for."""
    return max(MIN_TOKENS, MIN_STEPS * config.training.tokens_per_step)


def ladder_flops(sizes: Sizes, rungs: Sequence[Rung]) -> float:
    """FLOPs of all trainings of a ladder."""
    return sum(run.trained_steps * sizes.of(run.hidden_size).step_flops for run in ladder_runs(rungs))


def ladder_seconds(sizes: Sizes, rungs: Sequence[Rung], speed: Speed) -> float:
    """Expected wall time of a ladder."""
    save_steps = {rung.hidden_size: rung.save_steps for rung in rungs}
    costs = dict[LadderRun, float]()
    for run in ladder_runs(rungs):
        evaluations = 1 if run.begin else run.end // save_steps[run.hidden_size] + 1
        tokens = run.trained_steps * sizes.base.training.tokens_per_step
        tokens += EVALUATION_COST * evaluations * speed.evaluated_tokens
        flops = tokens * sizes.of(run.hidden_size).flops_per_token
        costs[run] = speed.start_up + flops / speed.flops_per_second
    return makespan(longest_first(costs), costs, speed.slots)


def choose_rungs(sizes: Sizes, budget_flops: float, unique_tokens: int) -> tuple[Rung, ...]:
    """The sizes of a ladder and their numbers of steps, the same for all but the smallest, which has more.

    The middle size sees `TOKENS_PER_PARAMETER`. Where that would be more than `MAX_EPOCHS` passes over the
    text, all are larger; where the shortest runs would have fewer than `least_tokens`, smaller. A larger
    budget makes runs longer and adds sizes: each one that is more than the fewest asks for twice the tokens.

    Args:
        sizes: Sizes of the family, `model.vocab_size` resolved.
        budget_flops: FLOPs of all trainings.
        unique_tokens: Tokens of the training split.

    Raises:
        ConfigError: the budget is too small, or the text too short for any; it names what is enough.
    """
    least = least_flops(sizes, unique_tokens)
    if budget_flops < least:
        raise ConfigError(
            f"--budget: expected at least {1.01 * least:.3g} FLOPs for {SIZE_COUNTS[-1]} sizes of this "
            f"family, found {budget_flops:.2g}; raise it{_or_smaller_steps(sizes)}"
        )
    rungs = (_rungs(sizes, budget_flops, unique_tokens, count) for count in SIZE_COUNTS)
    return next(filter(None, rungs))


def rungs_within(sizes: Sizes, seconds: float, unique_tokens: int, speed: Speed) -> tuple[Rung, ...]:
    """The rungs of most FLOPs that are expected to end within a time, or the least, which take longer.

    Raises:
        ConfigError: the text is too short.
    """
    least = least_flops(sizes, unique_tokens)
    flops = seconds * speed.slots * speed.flops_per_second
    while flops > least:
        rungs = choose_rungs(sizes, flops, unique_tokens)
        if ladder_seconds(sizes, rungs, speed) <= seconds:
            return rungs
        flops *= 0.99
    return choose_rungs(sizes, least, unique_tokens)


def least_flops(sizes: Sizes, unique_tokens: int) -> float:
    """The least budget of a ladder: the shortest runs of the smallest and fewest sizes, and 0.1 %.

    Raises:
        ConfigError: the text is too short for any.
    """
    unit_tokens = least_tokens(sizes.base) / BRANCHES[0]
    if unique_tokens < (needed := math.ceil(SMALLEST_BRANCHES[-1] * unit_tokens / MAX_EPOCHS)):
        raise ConfigError(
            f"--input: expected a store of about {needed:,} tokens for a ladder with steps of "
            f"{sizes.base.training.tokens_per_step:,} tokens, found {unique_tokens:,}; bring more "
            f"text{_or_smaller_steps(sizes)}"
        )
    smallest = _widening(sizes, sizes.least_number, SIZE_COUNTS[-1])
    return 1.001 * unit_tokens * _flops_of_unit([size.flops_per_token for size in smallest])


def _or_smaller_steps(sizes: Sizes) -> str:
    """Advice where it is steps, not tokens, of which the shortest runs need more."""
    steps_decide = least_tokens(sizes.base) > MIN_TOKENS
    return ", or use a base with a smaller training.global_batch_size" if steps_decide else ""


def _flops_of_unit(flops_per_token: Sequence[float]) -> float:
    """FLOPs of a ladder of these sizes for each token of a run whose decay begins at one unit.

    A run with a branch at k units has k times as many tokens, its decay included.
    """
    smallest, *others = flops_per_token

    def trained(branches: Sequence[int]) -> float:  # by the stable run, then by its decays
        return (max(branches) + sum(branches)) / 2

    return smallest * trained(SMALLEST_BRANCHES) + math.fsum(others) * trained(BRANCHES)


def _widening(sizes: Sizes, smallest: int, count: int) -> list[Size]:
    """`count` sizes from the `smallest`-th member on, each about `WIDTH_RATIO` wider than the one before."""
    numbers = [smallest]
    for k in range(1, count):
        numbers.append(max(numbers[-1] + 1, round(smallest * WIDTH_RATIO**k)))
    return [sizes.size(number) for number in numbers]


def _rungs(sizes: Sizes, budget_flops: float, unique_tokens: int, count: int) -> tuple[Rung, ...] | None:
    """The rungs of `count` sizes; None where the shortest runs would have too few tokens.

    The larger the smallest size, the fewer tokens the budget pays for.
    """
    least_unit = least_tokens(sizes.base) * 2 ** (count - SIZE_COUNTS[-1]) / BRANCHES[0]
    most_unit = MAX_EPOCHS * unique_tokens / SMALLEST_BRANCHES[-1]
    chosen: tuple[float, list[Size]] | None = None
    for smallest in itertools.count(sizes.least_number):
        found = _widening(sizes, smallest, count)
        unit_tokens = budget_flops / _flops_of_unit([size.flops_per_token for size in found])
        unit, first = min(unit_tokens, most_unit), found[0]
        if unit < least_unit:
            break
        chosen = unit, found
        optimal = TOKENS_PER_PARAMETER * found[count // 2].active_parameters / BRANCHES[-1]
        lacks_text = SMALLEST_BRANCHES[-1] * unit < MIN_TOKENS_PER_PARAMETER * first.active_parameters
        if unit_tokens <= min(optimal, most_unit) or lacks_text:
            break
    if chosen is None:
        return None
    unit = max(1, round(chosen[0] / 2 / sizes.base.training.tokens_per_step))
    first, *others = (size.hidden_size for size in chosen[1])
    rungs = (Rung(each, tuple(unit * branch for branch in BRANCHES)) for each in others)
    return Rung(first, tuple(unit * branch for branch in SMALLEST_BRANCHES)), *rungs
