"""Checks of the rows of metrics.jsonl by themselves: steps, learning rate, running sums, finite values.

What the rows say of the data is checked in `samples.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from llm_pretrain.commands._verification.checks import Check, Checks, spans
from llm_pretrain.commands._verification.history import Attempt, Row
from llm_pretrain.config import Config
from llm_pretrain.training import SPIKE_KINDS, SPIKE_REASONS, learning_rate

_ALWAYS = ("train/learning_rate", "train/loss_tokens", "train/tokens")
_NOT_JUDGED = ("no_loss_tokens", "overflow", "nonfinite_gradient", "nonfinite_loss")
_UNLESS_SKIPPED = ("train/loss", "train/grad_norm", "train/z_loss", "train/aux_loss", "train/router_z_loss")


def check_rows(checks: Checks, attempts: list[Attempt], config: Config, *, ended: int | None) -> None:
    """Checks every row that any attempt wrote, also those whose work was lost.

    Args:
        checks: Takes the outcomes.
        attempts: With their rows.
        config: The newest attempt's; stands in for that of an attempt which has none on record.
        ended: Step at which the last attempt says that it ended by itself; None where it does not say so.
    """
    with checks.check("steps") as check:
        _check_steps(check, attempts, config, ended)
    with checks.check("learning rate") as check:
        _check_learning_rate(check, attempts, config)
    with checks.check("tokens") as check:
        _check_tokens(check, attempts)
    with checks.check("finite rows") as check:
        _check_finite(check, attempts)


def is_integer(value: object) -> bool:
    """Whether it is a whole number, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_finite(value: object) -> bool:
    """Whether it is a number that a float holds; JSON's integers may be larger."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def logging_steps(attempt: Attempt, config: Config) -> int:
    """The attempt's own, or the newest attempt's."""
    return (attempt.config or config).logging.logging_steps


def _check_steps(check: Check, attempts: list[Attempt], config: Config, ended: int | None) -> None:
    total = 0
    for number, attempt in enumerate(attempts):
        every = logging_steps(attempt, config)
        who = f"attempt {attempt.number}"
        steps = [row["step"] for row in attempt.rows]
        total += len(steps)
        last = max(steps, default=attempt.start)
        if number + 1 < len(attempts) and not attempts[number + 1].began_elsewhere:
            last = max(last, attempts[number + 1].start)
        elif number + 1 == len(attempts) and ended is not None:
            last = max(last, ended)
        if attempt.began_elsewhere:
            check.reason = f"the steps before {attempt.start} are another run's"
        due = set(range((attempt.start // every + 1) * every, last + 1, every))
        if missing := sorted(due - set(steps)):
            check.fail(f"{who}: expected a row of every {_th(every)}, found none of step {spans(missing)}")
        if early := sorted({step for step in steps if step <= attempt.start}):
            check.fail(
                f"{who}: expected rows after its start at step {attempt.start}, found step {spans(early)}"
            )
        if repeated := sorted({a for a, b in pairwise(steps) if b <= a}):
            check.fail(f"{who}: expected ascending steps, found another order after step {spans(repeated)}")
        for row in attempt.rows:
            if row["step"] % every and not (row.get("train/skipped") or row.get("train/spike")):
                check.fail(
                    f"{who}: expected a row off every {_th(every)} to be skipped or a spike, found step "
                    f"{row['step']}"
                )
    kept = attempts[-1].history
    reached = f"steps up to {kept[-1]['step']}" if kept else "no steps"
    check.looked_at = f"{total} rows of {len(attempts)} attempts, {reached}"
    if total == 0 and not check.problems:
        check.skip("no step has been logged yet")


def _th(every: int) -> str:
    return "step" if every == 1 else f"{every} steps"


def _check_learning_rate(check: Check, attempts: list[Attempt], config: Config) -> None:
    compared = unknown = 0
    for attempt in attempts:
        own = attempt.config or (config if attempt is attempts[-1] else None)
        if own is None:
            unknown += len(attempt.rows)
            continue
        for row in attempt.rows:
            expected, found = learning_rate(own, row["step"] - 1), row.get("train/learning_rate")
            compared += 1
            if not isinstance(found, float | int) or found != expected:
                check.fail(
                    f"step {row['step']}: expected {expected!r}, as the schedule has it, found {found!r:.40}"
                )
    check.looked_at = f"{compared} rows equal to the schedule, bit for bit"
    if check.problems:
        check.looked_at = f"{compared} rows, {len(check.problems)} unlike the schedule"
    if unknown:
        check.reason = f"{unknown} rows of attempts whose configuration is not on record"
    if not compared:
        check.skip(check.reason or "no rows")


def _check_tokens(check: Check, attempts: list[Attempt]) -> None:
    exact = bounded = 0
    for attempt, before, row in pairs(attempts):
        tokens, own, step = row.get("train/tokens"), row.get("train/loss_tokens"), row["step"]
        if not (is_integer(tokens) and is_integer(own) and own >= 0):  # type: ignore[operator]  # an integer by then
            check.fail(
                f"step {step}: expected whole numbers of tokens, found train/tokens {tokens!r:.40}, "
                f"train/loss_tokens {own!r:.40}"
            )
            continue
        sources = [value for key, value in row.items() if key.endswith("/loss_tokens") and "/source/" in key]
        if sources and (not all(map(is_integer, sources)) or sum(sources) != own):
            check.fail(f"step {step}: expected the sources' loss tokens to add up to {own}, found {sources}")
        if before is None and attempt.start:
            continue  # what went before is another run's, or missing, which `steps` says
        earlier = before.get("train/tokens") if before else 0
        if not is_integer(earlier):
            continue  # that row has failed
        sum_here = earlier + own  # type: ignore[operator]  # integers, by the lines above
        if step == (before["step"] if before else 0) + 1:
            exact += 1
            if tokens != sum_here:
                check.fail(f"step {step}: expected train/tokens {sum_here}, the running sum, found {tokens}")
        else:
            bounded += 1
            if tokens < sum_here:  # type: ignore[operator]  # integers, by the lines above
                check.fail(f"step {step}: expected train/tokens of {sum_here} or more, found {tokens}")
    check.looked_at = f"{exact} rows add up exactly to the row before"
    if bounded:
        check.looked_at += f", {bounded} rows with steps between them rise enough (see samples)"
    if exact + bounded == 0 and not check.problems:
        check.skip("no two rows follow each other")


def pairs(attempts: list[Attempt]) -> Iterator[tuple[Attempt, Row | None, Row]]:
    """Attempt, the row before and the row, for every row of every attempt, in their order."""
    for attempt in attempts:
        before = attempt.before[-1] if attempt.before else None
        for row in attempt.rows:
            yield attempt, before, row
            before = row


def _check_verdict(check: Check, row: Row) -> None:
    """`train/skipped` and `train/spike` have values that training writes, and fit each other."""
    skipped, spike, step = row.get("train/skipped"), row.get("train/spike"), row["step"]
    if skipped is not None and skipped not in (*_NOT_JUDGED, *SPIKE_REASONS):
        check.fail(f"step {step}: expected train/skipped to be a reason, found {skipped!r:.40}")
    if spike is not None and spike not in SPIKE_KINDS:
        check.fail(
            f"step {step}: expected train/spike to be one of {', '.join(SPIKE_KINDS)}, found {spike!r:.40}"
        )
    if (spike is None and skipped in SPIKE_REASONS) or (spike is not None and skipped in _NOT_JUDGED):
        check.fail(f"step {step}: expected train/spike with a step skipped for it alone, found {spike!r:.40}")


def _check_finite(check: Check, attempts: list[Attempt]) -> None:
    rows = skipped = 0
    for _, _, row in pairs(attempts):
        rows += 1
        is_skipped = bool(row.get("train/skipped"))
        skipped += is_skipped
        _check_verdict(check, row)
        needed = (
            _ALWAYS
            if is_skipped and "train/spike" not in row
            else (*_ALWAYS, *(key for key in _UNLESS_SKIPPED if key in row))
        )
        if not is_skipped and "train/loss" not in row:
            check.fail(f"step {row['step']}: expected train/loss, found none")
        for key in needed:
            value = row.get(key)
            if not isinstance(value, int | float) or isinstance(value, bool):
                check.fail(f"step {row['step']}: expected {key} to be a number, found {value!r:.40}")
        for key, value in row.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and not is_finite(value):
                check.fail(f"step {row['step']}: expected {key} to be finite or null, found {value!r:.40}")
    for attempt in attempts:
        for step, loss in attempt.evaluations.items():
            if not is_finite(loss):
                check.fail(f"step {step}: expected eval/loss to be a finite number, found {loss!r:.40}")
    check.looked_at = f"{rows} rows, {skipped} of skipped steps, which may have nulls"
    if not rows and not check.problems:
        check.skip("no rows")
