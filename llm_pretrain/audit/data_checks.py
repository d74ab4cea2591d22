"""Checks of a run's samples for `llm-pretrain verify`: how often they occur, and the rows' digests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from llm_pretrain.audit.checks import Check, Checks
from llm_pretrain.audit.history_checks import RunFiles, is_integer
from llm_pretrain.config.tree import Config
from llm_pretrain.data.loader import MicroBatches, train_samples
from llm_pretrain.runs.attempts import Attempt, owner_of
from llm_pretrain.runs.rows import Row

DEFAULT_TOKENS = 1 << 26
"""Tokens of the batches that are assembled again by default: some seconds of work."""
DEFAULT_SAMPLES = 1 << 23
"""Samples that are counted by default: some seconds of work."""
_CHUNK = 1 << 16
"""Samples that are counted at a time."""


class AttemptSamples:
    """The samples of a run, for each of its attempts.

    All attempts share the settings that determine the sample order, except for later `data.weight_changes`.
    """

    def __init__(self, config: Config):
        self.config, self._by_changes = config, dict[str, MicroBatches]()

    def of(self, attempt: Attempt) -> MicroBatches:
        """The samples of an attempt."""
        changes = (attempt.config or self.config).data.weight_changes
        if str(changes) not in self._by_changes:
            data = replace(self.config.data, weight_changes=changes)
            self._by_changes[str(changes)] = train_samples(replace(self.config, data=data))
        return self._by_changes[str(changes)]


def check_samples(checks: Checks, run: RunFiles, wanted: str | int | None) -> None:
    """Check that each epoch has every sample once, and that the run trained on exactly these samples.

    The check `epochs` counts the samples in their order, up to the last row. The check `samples` assembles
    the batches again from the stores and compares their digests with the rows' digests.

    Args:
        checks: Receives the results.
        run: The run, whose configuration and rows have been read.
        wanted: Rows to assemble again: `all`, a number of rows, or None for some seconds of work.
    """
    if not run.rows:
        for name in ("epochs", "samples"):
            checks.skip(name, "no step has been logged yet")
        return
    samples = AttemptSamples(run.config)
    checks.run("epochs", _check_epochs, run, samples.of(run.attempts[-1]), wanted == "all")
    checks.run("samples", _check_digests, run, samples, wanted)


def _check_epochs(check: Check, run: RunFiles, samples: MicroBatches, everything: bool) -> None:
    step = max(run.rows)
    taken = step * run.config.training.global_batch_size
    last = taken if everything else min(taken, DEFAULT_SAMPLES)
    labels = [source.label for source in run.config.data.sources]
    lengths = [len(source.index) for source in samples.assembler.sources]
    counters = [_EpochCounter(check, *pair) for pair in zip(labels, lengths, strict=True)]
    for start in range(0, last, _CHUNK):
        sources, sequences = samples.order.samples(start, min(start + _CHUNK, last))
        for k, counter in enumerate(counters):
            counter.add(sequences[sources == k])
    words = "; ".join(counter.finish() for counter in counters)
    check.looked_at = f"{last} samples of steps up to {step}: {words}"
    if last < taken:
        check.reason = f"the samples from {last} on, for time's sake; --samples all counts them too"


class _EpochCounter:
    """Counts one source's samples in each epoch, and reports those that do not occur exactly once.

    Args:
        check: Receives the problems.
        label: Name of the source.
        length: Number of its sequences.
    """

    def __init__(self, check: Check, label: str, length: int):
        self.check, self.label, self.length = check, label, length
        self.counts = np.zeros(length, dtype=np.uint8)
        self.drawn = self.epochs = 0
        self.result = "each once"

    def add(self, sequences: np.ndarray) -> None:
        """Add the source's next samples."""
        while len(sequences):
            now, sequences = np.split(sequences, [self.length - self.drawn])
            np.add.at(self.counts, now, 1)
            self.drawn += len(now)
            if self.drawn == self.length:
                self.epochs += 1
                often, never = int((self.counts > 1).sum()), int((self.counts == 0).sum())
                if often or never:
                    self._fail(
                        f"epoch {self.epochs}: expected each of {self.length} sequences once, found {often} "
                        f"more often and {never} never"
                    )
                self.counts[:] = 0
                self.drawn = 0

    def finish(self) -> str:
        """Check the unfinished epoch; returns the counts of all epochs as text."""
        if (often := int((self.counts > 1).sum())) > 0:
            begun = f"epoch {self.epochs + 1}, begun"
            self._fail(f"{begun}: expected no sequence twice, found {often} more often")
        whole = f"{self.epochs} whole epochs of {self.length} sequences" if self.epochs else ""
        part = f"{self.drawn} of {self.length} sequences of epoch {self.epochs + 1}" if self.drawn else ""
        return f"{self.label}: {' and '.join(filter(None, (whole, part))) or 'none'}, {self.result}"

    def _fail(self, problem: str) -> None:
        self.result = "not each once"
        self.check.fail(f"{self.label}: {problem}")


def _check_digests(check: Check, run: RunFiles, samples: AttemptSamples, wanted: str | int | None) -> None:
    rows = list(intervals(run))
    chosen = _choose_rows(len(rows), wanted, run.config, run.logging_steps(run.attempts[-1]))
    steps = unknown = 0
    for number in chosen:
        attempt, first, before, row = rows[number]
        if first is None:
            unknown += 1
            continue
        steps += row["step"] - first
        compare_row(check, samples, attempt, first, before, row)
    check.looked_at = f"{len(chosen) - unknown} of {len(rows)} rows, {steps} steps assembled again"
    if len(chosen) < len(rows):
        check.looked_at += " (evenly chosen; --samples all takes every row)"
    if unknown:
        check.reason = f"{unknown} rows that begin in another run"


def intervals(run: RunFiles) -> Iterator[tuple[Attempt, int | None, Row | None, Row]]:
    """Yield (attempt, first step counted from 0, row before that step or None, row) for each row, in order.

    The first step follows the previous row, or a row that was due but is missing. It is None if another run
    began the interval.
    """
    before: Row | None = None
    for step, row in run.rows.items():
        attempt = owner_of(step, run.attempts)
        first = before["step"] if before else 0 if run.attempts[0].start == 0 else None
        every = run.logging_steps(attempt)
        if (due := (step - 1) // every * every) > attempt.start:
            first = max(due, first or 0)
        yield attempt, first, before if before and before["step"] == first else None, row
        before = row


def _choose_rows(count: int, wanted: str | int | None, config: Config, every: int) -> list[int]:
    """Indices of the rows to check, including the first and the last."""
    if wanted is None:
        positions = config.training.tokens_per_step * every
        wanted = max(3, DEFAULT_TOKENS // positions)
    places = np.linspace(0, count - 1, count if wanted == "all" else min(int(wanted), count))
    return sorted({round(place) for place in places.tolist()})


def compare_row(
    check: Check, samples: AttemptSamples, attempt: Attempt, first: int, before: Row | None, row: Row
) -> None:
    """Compare one row with the samples of steps `first` to `row["step"] - 1`, counted from 0."""
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
    earlier, now = (
        before.get("train/tokens") if before else 0 if first == 0 else None,
        row.get("train/tokens"),
    )
    if is_integer(earlier) and now != earlier + tokens:
        check.fail(f"step {step}: expected train/tokens {earlier + tokens}, found {now!r:.40}")
