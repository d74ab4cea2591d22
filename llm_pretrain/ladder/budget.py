"""From a budget to the rungs of a ladder: which sizes, and for how many steps each."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from llm_pretrain.config import Config
from llm_pretrain.errors import ConfigError
from llm_pretrain.ladder.family import Size, Sizes, tokens_per_step
from llm_pretrain.ladder.points import Rung
from llm_pretrain.ladder.runs import ladder_runs

DECAY_SHARE = 0.5
"""Steps of a run's decay, as a share of the run: the losses of longer decays differ little
(arXiv:2405.18392, figure 5), and each is trained once for every number of tokens."""
BRANCHES = (2, 4)
"""Where decays begin, in units: a number of steps, the same for every size, that the budget decides. A
decay that begins at k units ends at 2k, after D tokens for k = 4: every size sees D/2 and D, which tell how
the loss falls with size."""
SMALLEST_BRANCHES = (2, 3, 4, 5)
"""Those of the smallest size, whose tokens cost least: up to 5D/4, to tell how the loss falls with tokens."""
SIZE_COUNTS = (5, 4, 3)
"""Numbers of sizes, the preferred first; with fewer than three a curve over sizes is no fit."""
SIZE_RATIOS = (1.6, 1.45)
"""FLOPs per token of a size over those of the next smaller one, the preferred first."""
TOKENS_PER_PARAMETER = 20.0
"""Of the middle size at D, about; with the embedding: compute-optimal (arXiv:2203.15556)."""
MAX_EPOCHS = 4.0
"""Passes of the store in the longest run: more repetitions teach less (arXiv:2305.16264)."""
MIN_TOKENS_PER_PARAMETER = 1.0
"""Of the smallest size: with fewer in `MAX_EPOCHS` passes all sizes lack text, and no size is the best."""
MIN_STEPS = 450
"""Of a run: the losses of fewer fall in another way (docs/log.md#ladders)."""
MIN_TOKENS = 3_750_000
"""Of a run: whatever their size, models learn to copy from their context between 2 and 5 M tokens, and no one
law fits losses from before and after this jump. Most have learnt it here; later costs more
(docs/log.md#ladders)."""
RATE_FACTORS = (0.5, 1.0, 2.0)
"""On the base's learning rates, tried at the smallest size; half or double costs little (muP transfers)."""
RATE_LIMITS = (0.25, 4.0)
"""The next factor on either side, tried where an edge of `RATE_FACTORS` wins."""
RATE_GAIN = 0.03
"""Share of the loss that each factor 2 away from the base's rates must gain: seeds differ by half of it after
so few tokens, and what learns sooner at the smallest size may end higher at others (docs/log.md#ladders)."""
FLOPS_LIMIT, SECONDS_LIMIT = 1e27, 10 * 365 * 86400.0
"""Larger budgets are mistakes; more money or tokens than `FLOPS_LIMIT` too."""
_PER_DECADE = 48
"""Budgets that are tried for a message: 5 % apart."""
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class FlopsOrSeconds(NamedTuple):
    """A budget in its unit: exactly one of the two is given."""

    flops: float | None
    seconds: float | None


def read_budget(text: str, option: str = "--budget", *, only_time: bool = False) -> FlopsOrSeconds:
    """The budget in a text: `90s`, `20m`, `1h05m`, `1.5h`, `1d`, or FLOPs such as `1e16`.

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
    return FlopsOrSeconds(None, number) if is_time else FlopsOrSeconds(number, None)


def decay_of(steps: int) -> int:
    """Steps of the decay of a run of `steps` steps."""
    return max(1, round(steps * DECAY_SHARE))


def least_tokens(config: Config) -> int:
    """Tokens of the shortest run that a law holds for."""
    return max(MIN_TOKENS, MIN_STEPS * tokens_per_step(config))


def rung_of(hidden_size: int, unit: int, multiples: Sequence[int]) -> Rung:
    """The runs of a size whose decays begin at `multiples` of `unit` steps."""
    branches = tuple(unit * each for each in multiples)
    steps = tuple(round(branch / (1 - DECAY_SHARE)) for branch in branches)
    return Rung(hidden_size, steps, branches)


def ladder_flops(sizes: Sizes, rungs: tuple[Rung, ...]) -> float:
    """FLOPs of all trainings of a ladder, with the check of the rate at the smallest size."""
    runs = ladder_runs(rungs, 1.0, RATE_FACTORS)
    return sum(run.trained_steps * sizes.of(run.hidden_size).step_flops for run in runs)


def choose_rungs(
    sizes: Sizes, budget_flops: float, unique_tokens: int, count: int | None = None
) -> tuple[Rung, ...]:
    """The sizes of a ladder and their numbers of steps, the same for all but the smallest, which has more.

    Sizes are geometric in FLOPs per token, and the middle one sees `TOKENS_PER_PARAMETER`. Where that would
    be more than `MAX_EPOCHS` passes over the text, all are larger; where the shortest runs would have fewer
    than `least_tokens`, smaller, or closer together. A larger budget makes runs longer and adds sizes: each
    one that is more than the fewest asks for twice the tokens.

    Args:
        sizes: Of the family, `model.vocab_size` resolved.
        budget_flops: Of all trainings, the check of the rate at `RATE_FACTORS` included; a further one, of
            `RATE_LIMITS`, costs a few percent more.
        unique_tokens: Of the training split.
        count: Number of sizes, 3 or more; None chooses, by the length of the runs.

    Raises:
        ConfigError: the budget is too small or too large for the sizes and the store, or the store too small
            for any; it names the nearest budgets, or the store, that are enough.
    """
    most = most_ladder_flops(unique_tokens, count)
    rungs = first_fit(sizes, budget_flops, unique_tokens, count) if budget_flops <= most else None
    if rungs is None:
        budgets, fits = _fits(sizes, unique_tokens, count)
        below = next((each for each in reversed(budgets) if each < budget_flops and fits(each)), None)
        above = next((each for each in budgets if each > budget_flops and fits(each)), None)
        if below is None and above is None:
            raise _store_error(sizes, unique_tokens, count)
        bounds = [f"at most {below:.2g}"] if below else []
        bounds += [f"at least {above:.2g}"] if above else []
        # most_ladder_flops grows with the square of the text
        tokens = unique_tokens * max(1.25, math.sqrt(budget_flops / most))
        raise ConfigError(
            f"--budget: expected {' or '.join(bounds)} FLOPs for {count or SIZE_COUNTS[-1]} sizes of this "
            f"family and {unique_tokens:,} tokens of text, found {budget_flops:.2g}; "
            + (
                f"raise it{_or_smaller_steps(sizes)}"
                if above
                else f"lower it, or bring text of {tokens:,.0f} tokens"
            )
        )
    return rungs


def most_run_flops(unique_tokens: int) -> float:
    """FLOPs of a run that passes `MAX_EPOCHS` times over the text, with the most parameters that it is for.

    6 FLOPs for each parameter and token (arXiv:2001.08361), so that no model is counted.
    """
    tokens = MAX_EPOCHS * unique_tokens
    return 6 * tokens * tokens / MIN_TOKENS_PER_PARAMETER


def most_ladder_flops(unique_tokens: int, count: int | None = None) -> float:
    """The budget of a ladder whose smallest size's longest run costs `most_run_flops`."""
    relative = [SIZE_RATIOS[0] ** k for k in range(count or SIZE_COUNTS[-1])]
    return most_run_flops(unique_tokens) / SMALLEST_BRANCHES[-1] * _flops_of_unit(relative)


def least_flops(sizes: Sizes, unique_tokens: int, count: int | None = None) -> float:
    """Nearly the least budget for `count` sizes, or for the fewest.

    Raises:
        ConfigError: the store is too small for any.
    """
    if (least := _least_fit(sizes, unique_tokens, count)) is None:
        raise _store_error(sizes, unique_tokens, count)
    return least


def _fits(sizes: Sizes, unique_tokens: int, count: int | None) -> tuple[list[float], Callable[[float], bool]]:
    """Budgets of two digits, ascending, and a test of one: whether it is enough for `count` sizes.

    None counts the fewest. Where the store is small, a larger budget may fail: widths come in steps.
    """
    low = sizes.size(1).flops_per_token * least_tokens(sizes.base)  # any ladder needs more
    high = most_ladder_flops(unique_tokens, count)
    powers = range(math.floor(_PER_DECADE * math.log10(low)), math.ceil(_PER_DECADE * math.log10(high)))
    rounded = [float(f"{10 ** (power / _PER_DECADE):.1e}") for power in powers]
    budgets = [each for each in rounded if low <= each <= high]
    return budgets, lambda flops: bool(first_fit(sizes, flops, unique_tokens, count or SIZE_COUNTS[-1]))


def _least_fit(sizes: Sizes, unique_tokens: int, count: int | None) -> float | None:
    """The least budget that is enough; None where none is."""
    budgets, fits = _fits(sizes, unique_tokens, count)
    return next(filter(fits, budgets), None)


def _store_error(sizes: Sizes, unique_tokens: int, count: int | None) -> ConfigError:
    """Of a store too small for any budget."""
    tokens = tokens_per_step(sizes.base)
    needed = math.ceil(least_tokens(sizes.base) * SMALLEST_BRANCHES[-1] / BRANCHES[0] / MAX_EPOCHS)
    least = max(needed, unique_tokens)
    while _least_fit(sizes, least, count) is None:  # widths come in steps
        least = math.ceil(least * 1.01)
    return ConfigError(
        f"--input: expected a store of about {least:,} tokens for a ladder with steps "
        f"of {tokens:,} tokens, found {unique_tokens:,}; bring more text{_or_smaller_steps(sizes)}"
    )


def _or_smaller_steps(sizes: Sizes) -> str:
    """Advice where it is steps, not tokens, of which the shortest runs need more."""
    steps_decide = least_tokens(sizes.base) > MIN_TOKENS
    return ", or use a base with a smaller training.global_batch_size" if steps_decide else ""


def _flops_of_unit(flops_per_token: Sequence[float]) -> float:
    """FLOPs of a ladder of these sizes for each token of a run whose decay begins at one unit.

    A run with a branch at k units has k times as many tokens, its decay included.
    """

    def trained(branches: Sequence[int]) -> float:  # by the stable run, then by its decays
        return max(branches) * (1 - DECAY_SHARE) + sum(branches) * DECAY_SHARE

    smallest, *others = flops_per_token
    checks = SMALLEST_BRANCHES[0] * (len(RATE_FACTORS) - 1)
    return smallest * (trained(SMALLEST_BRANCHES) + checks) + math.fsum(others) * trained(BRANCHES)


def first_fit(
    sizes: Sizes, budget_flops: float, unique_tokens: int, count: int | None
) -> tuple[Rung, ...] | None:
    """The rungs with most sizes, then with the widest span, whose shortest runs are long enough."""
    for each, ratio in itertools.product(SIZE_COUNTS if count is None else (count,), SIZE_RATIOS):
        least = least_tokens(sizes.base) * (2 ** (each - SIZE_COUNTS[-1]) if count is None else 1)
        if rungs := _rungs(sizes, budget_flops, unique_tokens, each, ratio, least):
            return rungs
    return None


def _rungs(
    sizes: Sizes, budget_flops: float, unique_tokens: int, count: int, ratio: float, least: int
) -> tuple[Rung, ...] | None:
    """`count` sizes, each with about `ratio` times the FLOPs per token of the one before.

    The larger the smallest size, the fewer tokens the budget pays for: each condition below holds from some
    size on, as `Sizes.first_number` needs.

    None where the shortest runs of all sizes would have fewer than `least` tokens, or the text is too short.
    """

    def from_smallest(smallest: Size) -> list[Size]:
        found = [smallest]
        for k in range(1, count):
            above = found[-1].hidden_size // sizes.width_step
            found.append(sizes.size(sizes.nearest_number(smallest.flops_per_token * ratio**k, above)))
        return found

    def unit_tokens(smallest: Size) -> float:
        return budget_flops / _flops_of_unit([each.flops_per_token for each in from_smallest(smallest)])

    def has_too_few_tokens(smallest: Size) -> bool:
        return BRANCHES[0] * unit_tokens(smallest) < least

    def has_enough_text(smallest: Size) -> bool:
        return SMALLEST_BRANCHES[-1] * unit_tokens(smallest) <= MAX_EPOCHS * unique_tokens

    def is_large_enough(smallest: Size) -> bool:
        middle = from_smallest(smallest)[count // 2]
        most = TOKENS_PER_PARAMETER * middle.active_parameters
        return BRANCHES[-1] * unit_tokens(smallest) <= most or has_too_few_tokens(smallest)

    least_number = max(sizes.least_number, sizes.first_number(has_enough_text))
    number = max(least_number, sizes.first_number(is_large_enough))
    if has_too_few_tokens(sizes.size(number)):  # then with more tokens for each parameter
        number = max(least_number, sizes.first_number(has_too_few_tokens) - 1)
    if has_too_few_tokens(smallest := sizes.size(number)):
        return None
    unit = max(1, round(unit_tokens(smallest) * (1 - DECAY_SHARE) / tokens_per_step(sizes.base)))
    first, *others = from_smallest(smallest)
    rungs = (rung_of(each.hidden_size, unit, BRANCHES) for each in others)
    return rung_of(first.hidden_size, unit, SMALLEST_BRANCHES), *rungs
