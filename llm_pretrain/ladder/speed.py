"""The speed of a ladder's runs on this machine, and from a time to the FLOPs of a ladder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llm_pretrain.ladder.budget import RATE_FACTORS, first_fit, least_flops, most_ladder_flops
from llm_pretrain.ladder.family import Sizes, tokens_per_step
from llm_pretrain.ladder.points import Rung
from llm_pretrain.ladder.runs import Run, best_order, check_runs, ladder_runs

EVALUATION_COST = 1 / 3
"""Of an evaluated token, in trained ones: it has no backward pass."""
LEAST_SLOPE = 0.2
"""Share of the larger measured size's time that is owed to its FLOPs at least, whatever noise says."""


@dataclass(frozen=True)
class Speed:
    """Measured time of a run with others beside it, affine in the FLOPs of a token.

    Args:
        per_token: Seconds of a token without any FLOPs.
        per_flop: Seconds of one FLOP.
        start_up: Seconds from a launch to the first step.
        slots: Runs side by side.
        evaluated_tokens: Of one evaluation.
    """

    per_token: float
    per_flop: float
    start_up: float
    slots: int
    evaluated_tokens: int = 0

    @staticmethod
    def of(measured: Mapping[float, float], start_up: float, slots: int, evaluated_tokens: int = 0) -> Speed:
        """From seconds per token by FLOPs per token, a line through the smallest and the largest size."""
        (less, fast), (more, slow) = min(measured.items()), max(measured.items())
        slope = (slow - fast) / (more - less) if more > less else slow / more
        per_flop = max(slope, LEAST_SLOPE * slow / more)
        return Speed(max(0.0, slow - per_flop * more), per_flop, start_up, slots, evaluated_tokens)

    def token_seconds(self, flops_per_token: float) -> float:
        """Of a trained token."""
        return self.per_token + self.per_flop * flops_per_token

    def seconds(self, flops_per_token: float, tokens: float, evaluations: int) -> float:
        """Of a run of this many tokens."""
        equivalent = tokens + evaluations * self.evaluated_tokens * EVALUATION_COST
        return self.start_up + equivalent * self.token_seconds(flops_per_token)


def ladder_seconds(sizes: Sizes, rungs: tuple[Rung, ...], speed: Speed) -> float:
    """Expected wall time of a ladder: the check of the rate, then all other runs."""
    tokens = tokens_per_step(sizes.base)
    check = check_runs(rungs[0], RATE_FACTORS)
    done = {run.name: run.end for run in check}
    save_steps = {rung.hidden_size: rung.save_steps for rung in rungs}

    def cost(run: Run, first: int) -> float:
        evaluations = 1 if run.begin else (run.end - first) // save_steps[run.hidden_size] + (not first)
        flops = sizes.of(run.hidden_size).flops_per_token
        return speed.seconds(flops, (run.end - first) * tokens, evaluations)

    rest = [run for run in ladder_runs(rungs, 1.0) if done.get(run.name, 0) < run.end]
    check_costs = {run.name: cost(run, run.begin) for run in check}
    rest_costs = {run.name: cost(run, max(run.begin, done.get(run.name, 0))) for run in rest}
    return best_order(check, check_costs, speed.slots)[1] + best_order(rest, rest_costs, speed.slots)[1]


def flops_within(
    sizes: Sizes, seconds: float, unique_tokens: int, speed: Speed, count: int | None = None
) -> float:
    """The most FLOPs whose ladder is expected to end within `seconds`, or the least, which takes longer.

    At most `most_ladder_flops`, which may take less.

    Raises:
        ConfigError: the store is too small.
    """
    least = least_flops(sizes, unique_tokens, count)
    most = seconds * speed.slots / speed.per_flop  # if nothing but FLOPs took time
    flops = min(most_ladder_flops(unique_tokens, count), most)
    while flops > least:  # downwards, since what fits has gaps
        rungs = first_fit(sizes, flops, unique_tokens, count)
        if rungs and ladder_seconds(sizes, rungs, speed) <= seconds:
            return flops
        flops *= 0.99
    return least
