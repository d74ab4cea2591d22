"""Checks of the data: that each epoch holds every sample once, and that the run trained on exactly these.

The first is a count over the pure order of samples, for the steps that rows say were taken. The second
assembles the batches again from the stores and compares their digests with the rows'.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from llm_pretrain.commands._verification.checks import Check, Checks
from llm_pretrain.commands._verification.history import Attempt, Row
from llm_pretrain.commands._verification.rows import is_integer, logging_steps, pairs
from llm_pretrain.config import Config
from llm_pretrain.data import MicroBatches, train_samples

DEFAULT_TOKENS = 1 << 26
"""Positions that are assembled again unless more are asked for: some seconds' work."""
DEFAULT_SAMPLES = 1 << 23
"""Samples that are counted unless all are asked for: likewise."""
_CHUNK = 1 << 16
"""Samples that are counted at a time."""


class Samples:
    """The samples of a run, under the configuration of any of its attempts.

    What decides the order is the same in all attempts, or they could not have been resumed, save for
    changes of weights that were still to come.
    """

    def __init__(self, config: Config):
        self.config = config
        self._of: list[tuple[object, MicroBatches]] = []

    def of(self, attempt: Attempt) -> MicroBatches:
        """Those of an attempt."""
        changes = (attempt.config or self.config).data.weight_changes
        for known, samples in self._of:
            if known == changes:
                return samples
        data = replace(self.config.data, weight_changes=changes)
        samples = train_samples(replace(self.config, data=data))
        self._of.append((changes, samples))
        return samples


def check_samples(checks: Checks, attempts: list[Attempt], config: Config, wanted: str | int | None) -> None:
    """Counts epochs, and compares what was trained on.

    Args:
        checks: Takes the outcomes.
        attempts: With their rows.
        config: The newest attempt's.
        wanted: Rows to assemble again: `all`, a number of evenly chosen ones, or None for what takes seconds.
    """
    samples = Samples(config)
    with checks.check("epochs") as check:
        _check_epochs(check, attempts, samples, everything=wanted == "all")
    with checks.check("samples") as check:
        _check_digests(check, attempts, samples, wanted)


def _check_epochs(check: Check, attempts: list[Attempt], samples: Samples, *, everything: bool) -> None:
    kept = attempts[-1]
    origin = max((each.start for each in attempts if each.began_elsewhere), default=0)
    taken = steps_taken(kept, logging_steps(kept, samples.config), origin)
    if not taken:
        return check.skip("no step has been logged yet")
    order, size = samples.of(kept).order, samples.config.training.global_batch_size
    last = min(taken[-1][1] * size, taken[-1][1] * size if everything else DEFAULT_SAMPLES)
    lengths = [len(source.index) for source in samples.of(kept).assembler.sources]
    counters = [_EpochCounter(length) for length in lengths]
    check.reason = f"whether the other run took its steps up to {origin}" if origin else ""
    for start in range(0, last, _CHUNK):
        stop = min(start + _CHUNK, last)
        sources, sequences = order.samples(start, stop)
        is_taken = np.zeros(stop - start, dtype=np.bool_)
        for before, after in [(0, origin), *taken]:
            is_taken[max(before * size - start, 0) : max(after * size - start, 0)] = True
        for k, counter in enumerate(counters):
            mine = sources == k
            counter.add(sequences[mine], is_taken[mine])
    labels = [source.label for source in samples.config.data.sources]
    words = [counter.finish(check, label) for counter, label in zip(counters, labels, strict=True)]
    check.looked_at = f"{last} samples of steps up to {taken[-1][1]}: {'; '.join(words)}"
    if last < taken[-1][1] * size:
        left_out = f"the samples from {last} on, for time's sake; --samples all counts them too"
        check.reason = "; ".join(filter(None, (check.reason, left_out)))
    return None


def steps_taken(attempt: Attempt, every: int, origin: int) -> list[tuple[int, int]]:
    """(steps done before, steps done after) for each row: what the row stands for; gaps are left out."""
    taken = []
    before = origin
    for row in attempt.history:
        taken.append((predecessor(row["step"], before, attempt, every) or before, row["step"]))
        before = row["step"]
    return taken


def predecessor(step: int, before: int | None, attempt: Attempt, every: int) -> int | None:
    """The step of the row that was written before that of `step`; None where that was another run's.

    It is the last row before, or a later one that is missing now.
    """
    due = (step - 1) // every * every
    if due > attempt.start:
        return due if before is None else max(before, due)
    if before is None and attempt.start == 0:
        return 0
    return before


@dataclass
class _EpochCounter:
    """Counts one source's samples, epoch by epoch in its own order.

    Args:
        length: Sequences of the source: of every epoch.
    """

    length: int

    def __post_init__(self) -> None:
        self.counts = np.zeros(self.length, dtype=np.uint8)
        self.drawn = self.epochs = self.untaken = 0
        self.problems: list[str] = []

    def add(self, sequences: np.ndarray, is_taken: np.ndarray) -> None:
        """The source's next samples, and which of them the run has trained on."""
        while len(sequences):
            room = self.length - self.drawn
            now, kept = sequences[:room], is_taken[:room]
            np.add.at(self.counts, now[kept], 1)
            self.untaken += int((~kept).sum())
            self.drawn += len(now)
            if self.drawn == self.length:
                self._close()
            sequences, is_taken = sequences[room:], is_taken[room:]

    def _close(self) -> None:
        self.epochs += 1
        often, never = int((self.counts > 1).sum()), int((self.counts == 0).sum())
        if often or never:
            self.problems.append(
                f"epoch {self.epochs}: expected each of {self.length} sequences once, found {often} more "
                f"often and {never} never"
            )
        self.counts[:] = 0
        self.drawn = 0

    def finish(self, check: Check, label: str) -> str:
        """Report to the check; returns what was counted, in words."""
        if (often := int((self.counts > 1).sum())) > 0:
            self.problems.append(
                f"epoch {self.epochs + 1}, begun: expected no sequence twice, found {often} more often"
            )
        for problem in self.problems:
            check.fail(f"{label}: {problem}")
        whole = f"{self.epochs} whole epochs of {self.length} sequences" if self.epochs else ""
        part = f"{self.drawn} of {self.length} sequences of epoch {self.epochs + 1}" if self.drawn else ""
        verdict = "not each once" if self.problems else "each once"
        return f"{label}: {' and '.join(filter(None, (whole, part))) or 'none'}, {verdict}"


def _check_digests(check: Check, attempts: list[Attempt], samples: Samples, wanted: str | int | None) -> None:
    rows = list(pairs(attempts))
    if not rows:
        return check.skip("no step has been logged yet")
    chosen = _choose(len(rows), wanted, samples.config, logging_steps(attempts[-1], samples.config))
    steps = unknown = 0
    for number in chosen:
        attempt, before, row = rows[number]
        known = 0 if before is None and attempt.start == 0 else before["step"] if before else None
        first = predecessor(row["step"], known, attempt, logging_steps(attempt, samples.config))
        if first is None or not 0 <= first < row["step"]:
            unknown += 1
            continue
        steps += row["step"] - first
        has_before = before is not None and before["step"] == first
        _compare(check, samples, attempt, row, first, before if has_before else None)
    check.looked_at = f"{len(chosen) - unknown} of {len(rows)} rows, {steps} steps assembled again"
    if len(chosen) < len(rows):
        check.looked_at += " (evenly chosen; --samples all takes every row)"
    if unknown:
        check.reason = f"{unknown} rows that begin in another run, or whose step is out of order"
    return None


def _choose(count: int, wanted: str | int | None, config: Config, every: int) -> list[int]:
    """Numbers of the rows to look at, first and last among them."""
    if wanted is None:
        positions = config.training.global_batch_size * config.training.sequence_length * every
        wanted = max(3, DEFAULT_TOKENS // positions)
    if wanted == "all" or int(wanted) >= count:
        return list(range(count))
    return sorted({round(place) for place in np.linspace(0, count - 1, int(wanted)).tolist()})


def _compare(
    check: Check, samples: Samples, attempt: Attempt, row: Row, first: int, before: Row | None
) -> None:
    """One row against the samples of steps first … row's step - 1, counted from 0."""
    data, training = samples.of(attempt), samples.config.training
    digest, tokens, own, step = torch.zeros(8, dtype=torch.int64), 0, 0, row["step"]
    for number in range(first, step):
        begin, end = number * training.global_batch_size, (number + 1) * training.global_batch_size
        own = 0
        for slot in range(begin, end, training.micro_batch_size):
            batch = data.__getitems__(range(slot, min(slot + training.micro_batch_size, end)))
            digest += batch.digest
            own += batch.num_loss_tokens
        tokens += own
    expected = "".join(f"{int(word) & 0xFFFF_FFFF:08x}" for word in digest)
    if (found := row.get("data/batch_sha256")) != expected:
        what = f"steps {first + 1}-{step}" if step > first + 1 else f"step {step}"
        check.fail(
            f"step {step}: expected data/batch_sha256 {expected[:16]}…, of the stores' samples of {what}, "
            f"found {found!r:.19}"
        )
    if row.get("train/loss_tokens") != own:
        check.fail(
            f"step {step}: expected train/loss_tokens {own}, as in the stores, found "
            f"{row.get('train/loss_tokens')!r:.40}"
        )
    earlier = before.get("train/tokens") if before else 0 if first == 0 else None
    now = row.get("train/tokens")
    if is_integer(earlier) and is_integer(now) and now - earlier != tokens:  # type: ignore[operator]  # integers
        check.fail(f"step {step}: expected train/tokens to rise by {tokens}, found {now - earlier}")  # type: ignore[operator]  # integers
