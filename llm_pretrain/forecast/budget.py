"""Chooses the rungs of a ladder for a budget: the model sizes, and the number of steps of each."""

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
"""Where learning rate decays begin, in units. A unit is a number of steps, equal for all sizes, that the
budget decides. A decay that begins at k units ends at 2k units. For k = 4 this is after D tokens, so every
size has losses at D/2 and D tokens, which show how the loss falls with size."""
SMALLEST_BRANCHES = (2, 3, 4, 5)
"""Branches of the smallest size, whose tokens cost least: up to 5D/4, to show how loss falls with tokens."""
SIZE_COUNTS = (5, 4, 3)
"""Numbers of sizes, the preferred number first; fewer than three sizes determine no curve."""
WIDTH_RATIO = 1.25
"""Hidden size ÷ hidden size of the next smaller model: about 1.6 times the FLOPs per token."""
TOKENS_PER_PARAMETER = 20.0
"""Approximate D ÷ parameters (with embedding) of the middle size: compute-optimal (arXiv:2203.15556)."""
MAX_EPOCHS = 4.0
"""Most passes over the store in the longest run: further passes teach less (arXiv:2305.16264)."""
MIN_TOKENS_PER_PARAMETER = 1.0
"""Least tokens ÷ parameters of the smallest size's longest run. If `MAX_EPOCHS` passes have fewer tokens,
every size lacks text and none is the best; the ladder then spends only a part of a larger budget."""
MIN_STEPS = 450
"""Least steps of a run: in shorter runs the loss follows another curve (docs/log.md#ladders)."""
MIN_TOKENS = 3_750_000
"""Least tokens of a run. Models of every size learn to copy from their context between 2 and 5 M tokens. The
loss jumps then, and no single law fits losses from before and after the jump. By this number most models have
learnt to copy; a larger number would cost more (docs/log.md#ladders)."""
EVALUATION_COST = 1 / 3
"""Cost of an evaluated token ÷ cost of a trained token: an evaluation has no backward pass."""
FLOPS_LIMIT, SECONDS_LIMIT = 1e27, 10 * 365 * 86400.0
"""Larger budgets are taken for mistakes; `FLOPS_LIMIT` also bounds amounts of money and of tokens."""
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def read_budget(
    text: str, option: str = "--budget", *, only_time: bool = False
) -> tuple[float | None, float | None]:
    """(FLOPs, None) or (None, seconds) of a budget such as `1e16`, `90s`, `1h05m`, `1.5h` or `1d`.

    Args:
        text: The budget as the user wrote it.
        option: Name of the option, for the error message.
        only_time: Whether to refuse FLOPs.

    Raises:
        ConfigError: `text` is no budget, is not above zero, or exceeds the limit.
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
        flops_per_second: Speed of one run while runs use all slots.
        start_up: Seconds from a launch to the first step.
        slots: Number of runs that train at once.
        evaluated_tokens: Tokens of one evaluation.
    """

    flops_per_second: float
    start_up: float
    slots: int
    evaluated_tokens: int


def least_tokens(config: Config) -> int:
    """Fewest tokens of a run whose loss can follow the scaling law."""
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
    """The sizes of a ladder and their numbers of steps, equal for all sizes but the smallest, which has more.

    The middle size trains on `TOKENS_PER_PARAMETER`. If that needs more than `MAX_EPOCHS` passes over the
    text, all sizes become larger. If the shortest runs would have fewer than `least_tokens`, all become
    smaller. A larger budget gives longer runs and more sizes; each additional size doubles the least tokens.

    Args:
        sizes: Sizes of the family, with a resolved `model.vocab_size`.
        budget_flops: FLOPs of all trainings.
        unique_tokens: Tokens of the training split.

    Raises:
        ConfigError: the budget is too small, or the text too short for any ladder; says what is enough.
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
    """The rungs with most FLOPs that should end within `seconds`; if none do, the rungs with least FLOPs.

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
    """The least budget of a ladder: the shortest runs of the fewest and smallest sizes, plus 0.1 %.

    Raises:
        ConfigError: the text is too short for any ladder.
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
    """Advice if the least number of steps, not of tokens, decides how long the shortest runs are."""
    steps_decide = least_tokens(sizes.base) > MIN_TOKENS
    return ", or use a base with a smaller training.global_batch_size" if steps_decide else ""


def _flops_of_unit(flops_per_token: Sequence[float]) -> float:
    """FLOPs of a ladder of these sizes ÷ tokens of a decayed run with its branch at one unit.

    A decayed run with its branch at k units has k times as many tokens, half of them in the decay.
    """
    smallest, *others = flops_per_token

    def trained(branches: Sequence[int]) -> float:  # the stable run, then its decays
        return (max(branches) + sum(branches)) / 2

    return smallest * trained(SMALLEST_BRANCHES) + math.fsum(others) * trained(BRANCHES)


def _widening(sizes: Sizes, smallest: int, count: int) -> list[Size]:
    """`count` sizes from the `smallest`-th member on, each about `WIDTH_RATIO` times as wide as the last."""
    numbers = [smallest]
    for k in range(1, count):
        numbers.append(max(numbers[-1] + 1, round(smallest * WIDTH_RATIO**k)))
    return [sizes.size(number) for number in numbers]


def _rungs(sizes: Sizes, budget_flops: float, unique_tokens: int, count: int) -> tuple[Rung, ...] | None:
    """The rungs of `count` sizes; None if the shortest runs would have too few tokens.

    Tries larger and larger smallest sizes; the larger it is, the fewer tokens the budget pays for.
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
