"""Checks of the data for `llm-pretrain verify`: samples of a run, and the isolation of packed documents."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llm_pretrain.commands._verify_history import Attempt, Row, RunFiles, is_integer, logging_steps, pairs
from llm_pretrain.commands.verify import Check, Checks
from llm_pretrain.config import Config, ModelConfig, SourceConfig, resolve_model
from llm_pretrain.data import Batch, MicroBatches, TokenStore, train_samples
from llm_pretrain.errors import DataError
from llm_pretrain.model import IGNORE_INDEX, Decoder, Experts, experts_reference
from llm_pretrain.training import initialize_weights

DEFAULT_TOKENS = 1 << 26
"""Positions that are assembled again by default: some seconds of work."""
DEFAULT_SAMPLES = 1 << 23
"""Samples that are counted by default: some seconds of work."""
_CHUNK = 1 << 16
"""Samples that are counted at a time."""


class Samples:
    """The samples of a run, for each of its attempts.

    The settings that determine the order are equal in all attempts, except for later `data.weight_changes`.
    """

    def __init__(self, config: Config):
        self.config = config
        self._of: list[tuple[object, MicroBatches]] = []

    def of(self, attempt: Attempt) -> MicroBatches:
        """The samples of an attempt."""
        changes = (attempt.config or self.config).data.weight_changes
        for known, samples in self._of:
            if known == changes:
                return samples
        data = replace(self.config.data, weight_changes=changes)
        samples = train_samples(replace(self.config, data=data))
        self._of.append((changes, samples))
        return samples


def check_samples(checks: Checks, run: RunFiles, wanted: str | int | None) -> None:
    """Check that each epoch has every sample once, and that the run trained on exactly these samples.

    The first counts the samples of the order, for the steps in the rows. The second assembles the batches
    again from the stores and compares their digests with the rows'.

    Args:
        checks: Receives the results.
        run: With its configuration and rows.
        wanted: Rows to assemble again: `all`, a number of rows, or None for some seconds of work.
    """
    samples = Samples(run.config)
    checks.run("epochs", _check_epochs, run.attempts, samples, wanted == "all")
    checks.run("samples", _check_digests, run.attempts, samples, wanted)


def _check_epochs(check: Check, attempts: list[Attempt], samples: Samples, everything: bool) -> None:
    kept = attempts[-1]
    origin = max((each.start for each in attempts if each.began_elsewhere), default=0)
    taken = steps_taken(kept, logging_steps(kept, samples.config), origin)
    if not taken:
        check.skip("no step has been logged yet")
        return
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


def steps_taken(attempt: Attempt, every: int, origin: int) -> list[tuple[int, int]]:
    """(first, last + 1) step, counted from 0, of each row's interval; missing rows leave gaps."""
    taken = []
    before = origin
    for row in attempt.history:
        taken.append((predecessor(row["step"], before, attempt, every) or before, row["step"]))
        before = row["step"]
    return taken


def predecessor(step: int, before: int | None, attempt: Attempt, every: int) -> int | None:
    """The step of the row before that of `step`, even if it is missing; None if it was another run's."""
    due = (step - 1) // every * every
    if due > attempt.start:
        return due if before is None else max(before, due)
    if before is None and attempt.start == 0:
        return 0
    return before


@dataclass
class _EpochCounter:
    """Counts one source's samples in each epoch.

    Args:
        length: Sequences of the source.
    """

    length: int

    def __post_init__(self) -> None:
        self.counts = np.zeros(self.length, dtype=np.uint8)
        self.drawn = self.epochs = 0
        self.problems: list[str] = []

    def add(self, sequences: np.ndarray, is_taken: np.ndarray) -> None:
        """Add the source's next samples, and whether the run trained on each of them."""
        while len(sequences):
            room = self.length - self.drawn
            now, kept = sequences[:room], is_taken[:room]
            np.add.at(self.counts, now[kept], 1)
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
        """Report problems to the check; returns the counts as text."""
        if (often := int((self.counts > 1).sum())) > 0:
            self.problems.append(
                f"epoch {self.epochs + 1}, begun: expected no sequence twice, found {often} more often"
            )
        for problem in self.problems:
            check.fail(f"{label}: {problem}")
        whole = f"{self.epochs} whole epochs of {self.length} sequences" if self.epochs else ""
        part = f"{self.drawn} of {self.length} sequences of epoch {self.epochs + 1}" if self.drawn else ""
        result = "not each once" if self.problems else "each once"
        return f"{label}: {' and '.join(filter(None, (whole, part))) or 'none'}, {result}"


def _check_digests(check: Check, attempts: list[Attempt], samples: Samples, wanted: str | int | None) -> None:
    rows = list(pairs(attempts))
    if not rows:
        check.skip("no step has been logged yet")
        return
    chosen = _choose_rows(len(rows), wanted, samples.config, logging_steps(attempts[-1], samples.config))
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


def _choose_rows(count: int, wanted: str | int | None, config: Config, every: int) -> list[int]:
    """Indices of the rows to check, including the first and the last."""
    if wanted is None:
        positions = config.training.global_batch_size * config.training.sequence_length * every
        wanted = max(3, DEFAULT_TOKENS // positions)
    if wanted == "all" or int(wanted) >= count:
        return list(range(count))
    return sorted({round(place) for place in np.linspace(0, count - 1, int(wanted)).tolist()})


def _compare(
    check: Check, samples: Samples, attempt: Attempt, row: Row, first: int, before: Row | None
) -> None:
    """Compare one row with the samples of steps first … row's step - 1, counted from 0."""
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
    if is_integer(earlier) and is_integer(now) and now - earlier != tokens:
        check.fail(f"step {step}: expected train/tokens to rise by {tokens}, found {now - earlier}")


FLOAT64_BOUND = 1e-11
"""Relative to the largest value: some thousand roundings of float64, far below any real influence."""

SMALL_MODEL = ModelConfig(
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
"""The model if no configuration is given."""

QUANTITIES = ("logits", "token losses", "parameter gradients", "input gradients")

_WITHOUT_BALANCE = " (not the balance loss, which couples the documents of a sequence by design)"
_KERNEL_NOTE = (
    "experts: bit for bit where every expert computes every token; the kernel of training multiplies the "
    "rows of the tokens that chose an expert, and their number may change how the others' rows are rounded: "
    "compared in float64 within {:g} (in fp32 the others' logits move by {:.1e} of the largest)"
)


@dataclass(frozen=True)
class _Way:
    """One way to compute; with `by_definition` every expert computes every token."""

    name: str
    precision: str
    bound: float
    by_definition: bool = False


@dataclass(frozen=True)
class _Case:
    """A sequence, and the positions `start` to `stop` of the document that is changed in it."""

    sequence: int
    start: int
    stop: int


def verify_isolation(
    checks: Checks, config: Config, store: str, *, sequences: int, documents: int, seed: int, precision: str
) -> None:
    """Check that documents packed into one sequence do not influence each other.

    A document's tokens and labels are replaced, and the logits, cross-entropy and gradients of the other
    documents are compared, with random weights. They are equal bit for bit if a token's arithmetic does not
    depend on the other rows of its matrix products. With experts it does: the number of tokens of an expert
    may change how the kernel rounds. A mixture of experts is therefore checked twice: bit for bit with every
    expert computing every token (the layer's definition), and in float64 with the training kernel.

    The balance loss of a sequence depends on all its tokens by design and is not compared.

    Args:
        checks: Receives the results.
        config: Its model, packing, sequence length and `data.isolate_documents`.
        store: Folder of a token store.
        sequences: How many sequences to take, of those with several documents.
        documents: How many documents of each to change, one at a time.
        seed: Of the choice of documents, the new tokens and the weights.
        precision: `fp32` or `bf16`.

    Raises:
        DataError: a broken store.
        ConfigError: the model's vocabulary is smaller than the tokenizer's.
    """
    config = resolve_model(config, TokenStore(store).vocab_size)
    data = replace(config.data, sources=[SourceConfig(store)], weight_changes=[], num_workers=0)
    samples = train_samples(replace(config, data=data))
    cases: list[_Case] = []
    with checks.check("sequences") as check:
        cases = list(_choose_documents(samples, sequences, documents, seed))
        taken = sorted({case.sequence for case in cases})
        index = samples.assembler.sources[0].index
        check.looked_at = (
            f"{len(cases)} documents changed one at a time, in {len(taken)} of {len(index)} packed sequences "
            f"({', '.join(map(str, taken[:8]))}{', …' if len(taken) > 8 else ''})"
        )
    if not cases:
        return
    model = Decoder(config.model).eval()
    initialize_weights(model, seed)
    checks.note("compared: the others' logits, their cross-entropy and its gradients" + _WITHOUT_BALANCE)
    if config.model.moe_layers:
        way = _Way("", "fp32", 0.0)
        moved = max(_differences(model, samples, case, way, seed)["logits"] for case in cases)
        checks.note(_KERNEL_NOTE.format(FLOAT64_BOUND, moved))
    for way in _ways(config, precision):
        found = [_differences(model, samples, case, way, seed) for case in cases]
        _report(checks, way, found, isolated=config.data.isolate_documents)


def _ways(config: Config, precision: str) -> list[_Way]:
    if not config.model.moe_layers:
        return [_Way(precision, precision, 0.0)]
    return [
        _Way(f"{precision}, experts by definition", precision, 0.0, by_definition=True),
        _Way("float64, experts' kernel", "fp64", FLOAT64_BOUND),
    ]


def _choose_documents(samples: MicroBatches, sequences: int, documents: int, seed: int) -> Iterator[_Case]:
    """Sequences with several documents, and the documents to change: the first of each, and random others."""
    packed = samples.assembler.sources[0]
    counts = np.diff(packed.index.sequence_offsets)
    several = np.flatnonzero(counts > 1)
    if not len(several):
        raise DataError(
            f"{packed.store.path}: expected sequences of {samples.assembler.sequence_length} with several "
            "documents, found none; choose a larger --sequence_length, or data.packing best_fit"
        )
    generator = np.random.default_rng(seed)
    for sequence in sorted(generator.permutation(several)[:sequences].tolist()):
        first, last = packed.index.sequence_offsets[sequence : sequence + 2].tolist()
        edges = [0, *np.cumsum(packed.index.piece_length[first:last]).tolist()]
        pieces = list(pairwise(edges))
        others = (generator.permutation(len(pieces) - 1)[: documents - 1] + 1).tolist()
        for number in [0, *sorted(others)]:
            yield _Case(sequence, *pieces[number])


def _changed(batch: Batch, case: _Case, vocab_size: int, seed: int) -> Batch:
    """The batch with all tokens and labels of the document replaced, but the same mask and length."""
    generator = torch.Generator().manual_seed(seed + case.sequence)
    here = slice(case.start, case.stop)
    input_ids, labels = batch.input_ids.clone(), batch.labels.clone()
    shift = torch.randint(1, vocab_size, (case.stop - case.start,), generator=generator)
    input_ids[0, here] = (input_ids[0, here] + shift) % vocab_size
    labels[0, here] = torch.where(batch.loss_mask[0, here], input_ids[0, here].roll(-1), IGNORE_INDEX)
    return replace(batch, input_ids=input_ids, labels=labels)


def _differences(
    model: Decoder, samples: MicroBatches, case: _Case, way: _Way, seed: int
) -> dict[str, float]:
    """The relative change of each quantity of the other documents.

    `own` is the change of the changed document's own logits. `leaked` is the gradient of the others' loss
    with respect to the changed document's inputs, relative to the largest input gradient.
    """
    batch = samples.assembler.assemble([(0, case.sequence)], step=0, micro_batch=0, slot=0)
    is_other = torch.ones_like(batch.loss_mask)
    is_other[0, case.start : case.stop] = False
    before = _quantities(model, batch, is_other, way)
    vocab_size = samples.assembler.sources[0].store.vocab_size
    after = _quantities(model, _changed(batch, case, vocab_size, seed), is_other, way)
    found = {name: _relative(before[name], after[name]) for name in QUANTITIES}
    found["own"] = _relative([before["own"]], [after["own"]])
    found["leaked"] = max(
        float(side["leak"].abs().max() / side["input gradients"][0].abs().max().clamp(min=1e-300))
        for side in (before, after)
    )
    return found


def _relative(left: list[Tensor], right: list[Tensor]) -> float:
    """Largest difference over the largest value; 0 only if all bits are equal, infinite for NaN."""
    if all(torch.equal(a, b) for a, b in zip(left, right, strict=True)):
        return 0.0
    pairs = [(a.double(), b.double()) for a, b in zip(left, right, strict=True) if a.numel()]
    scale = max(float(a.abs().max()) for a, _ in pairs)
    difference = max(float((a - b).abs().max()) for a, b in pairs)
    ratio = difference / scale if scale else float("inf")
    return ratio if ratio == ratio else float("inf")


def _quantities(model: Decoder, batch: Batch, is_other: Tensor, way: _Way) -> dict[str, Any]:
    """Logits, losses and gradients of the other documents, from two forward passes and one backward pass."""
    model.to(torch.float64 if way.precision == "fp64" else torch.float32)
    model.zero_grad(set_to_none=True)
    inputs = batch.model_inputs()
    mask = inputs["loss_mask"] & is_other
    bf16 = torch.autocast("cpu", torch.bfloat16) if way.precision == "bf16" else nullcontext()
    embedded: list[Tensor] = []

    def keep(_module: object, _inputs: object, output: Tensor) -> None:
        output.retain_grad()
        embedded.append(output)

    with _experts_by_definition(model) if way.by_definition else nullcontext(), bf16:
        with torch.no_grad():
            logits = model(*(inputs[name] for name in ("input_ids", "position_ids", "document_ids"))).logits
        hook = model.model.embed_tokens.register_forward_hook(keep)
        try:
            output = model(**{**inputs, "loss_mask": mask})
        finally:
            hook.remove()
    output.loss_sum.backward()
    gradient = embedded[0].grad
    assert gradient is not None
    return {
        "logits": [logits[is_other]],
        "own": logits[~is_other],
        "token losses": [output.token_losses[is_other]],
        "parameter gradients": [p.grad for p in model.parameters() if p.grad is not None],
        "input gradients": [gradient[is_other]],
        "leak": gradient[~is_other],
    }


@contextmanager
def _experts_by_definition(model: Decoder) -> Iterator[None]:
    """Every expert computes every token, so that the shapes of all products stay the same."""
    layers = [module for module in model.modules() if isinstance(module, Experts)]

    def run(layer: Experts) -> Any:
        return lambda x, weights, chosen: experts_reference(
            x, layer.gate_up_proj, layer.down_proj, weights, chosen
        ).to(x.dtype)

    for layer in layers:
        layer.forward = run(layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _report(checks: Checks, way: _Way, found: list[dict[str, float]], *, isolated: bool) -> None:
    """Report the results of one way to compute, over all cases."""
    with checks.check(f"changed document: {way.name}") as check:
        unchanged = sum(each["own"] == 0 for each in found)
        check.looked_at = f"its own logits move, by {min(each['own'] for each in found):.1e} or more"
        if unchanged:
            check.fail(f"expected its logits to move with its tokens, found {unchanged} that did not")
    if not isolated:
        with checks.check(f"not isolated: {way.name}") as check:
            _report_coupling(check, way, found)
        return
    for name in (*QUANTITIES, "leaked"):
        what = "gradient into it" if name == "leaked" else name
        with checks.check(f"{what}: {way.name}") as check:
            _report_quantity(check, name, way, found)


def _report_quantity(check: Check, name: str, way: _Way, found: list[dict[str, float]]) -> None:
    largest = max(each[name] for each in found)
    limit = 0.0 if name == "leaked" else way.bound  # a leaked gradient is 0 whatever the rounding
    wrong = sum(not each[name] <= limit for each in found)
    if wrong:
        limits = f"at most {limit:g} of the largest value" if limit else "no difference in any bit"
        check.fail(
            f"expected {'exactly 0' if name == 'leaked' else limits}, found {largest:.1e} of the largest "
            f"value, in {wrong} of {len(found)} cases: documents of one sequence see each other"
        )
    elif name == "leaked":
        check.looked_at = "of the others' loss with respect to the changed document's inputs: exactly 0"
    elif limit:
        moved = f"differ by {largest:.1e} of the largest value; up to {limit:g} is rounding"
        check.looked_at = f"of the other documents {moved}"
    else:
        check.looked_at = "of the other documents unchanged, bit for bit"


def _report_coupling(check: Check, way: _Way, found: list[dict[str, float]]) -> None:
    moved = [name for name in QUANTITIES if any(each[name] > way.bound for each in found)]
    check.looked_at = (
        f"as data.isolate_documents: false says: {', '.join(moved) or 'nothing'} of the others move"
    )
    if not moved:
        check.fail("expected a document to move those after it, as data.isolate_documents: false says")
