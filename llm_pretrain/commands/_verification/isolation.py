"""Checks that documents packed into one sequence do not see each other: changes one, looks at the others.

Real sequences of a store, a model with random weights, forward and backward. A document's tokens and labels
are replaced by others, and everything that belongs to the other documents must stay as it was.

Bit for bit that holds wherever a token's arithmetic does not depend on how many others share its matrix
product. An expert's product has as many rows as tokens chose it, and a changed document chooses
otherwise, so that the experts' kernel may round the others' rows differently. A mixture of experts is
therefore checked twice: bit for bit with every expert computing every token (the definition of the layer),
and in float64 with the kernel of training, where rounding is far below any influence.

What is compared is the cross-entropy. The balance loss of a sequence is one number of all of its tokens,
and couples its documents by design.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llm_pretrain.commands._verification.checks import Check, Checks
from llm_pretrain.config import Config, ModelConfig, SourceConfig, resolve_model
from llm_pretrain.data import Batch, MicroBatches, TokenStore, train_samples
from llm_pretrain.errors import DataError
from llm_pretrain.model import IGNORE_INDEX, Decoder, Experts, experts_reference, initialize_weights

FLOAT64_BOUND = 1e-11
"""Of the largest value: some thousand roundings of float64, and far below what any influence would be."""

SMALL_MODEL = ModelConfig(
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
"""What is checked where no configuration names a model."""

QUANTITIES = ("logits", "token losses", "parameter gradients", "input gradients")

_WITHOUT_BALANCE = " (not the balance loss, which couples the documents of a sequence by design)"
_KERNEL_NOTE = (
    "experts: bit for bit where every expert computes every token; the kernel of training multiplies the "
    "rows of the tokens that chose an expert, and their number may change how the others' rows are rounded: "
    "compared in float64 within {:g} (in fp32 the others' logits move by {:.1e} of the largest)"
)


@dataclass(frozen=True)
class _Way:
    """One way to compute: its name, type, allowed difference, and whether experts run by their definition."""

    name: str
    precision: str
    bound: float
    by_definition: bool = False


@dataclass(frozen=True)
class _Case:
    """A sequence, and the positions `start` to `stop` of the document in it that is changed."""

    sequence: int
    start: int
    stop: int


def verify_isolation(
    checks: Checks, config: Config, store: str, *, sequences: int, documents: int, seed: int, precision: str
) -> None:
    """Checks the isolation of documents in packed sequences of `store`.

    Args:
        checks: Takes the outcomes.
        config: Its model, packing, sequence length and `data.isolate_documents`.
        store: Folder of a token store.
        sequences: How many sequences to take, of those with several documents.
        documents: How many documents of each to change, one at a time.
        seed: Chooses them, the new tokens and the weights.
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
        cases = list(_choose(samples, sequences, documents, seed))
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


def _choose(samples: MicroBatches, sequences: int, documents: int, seed: int) -> Iterator[_Case]:
    """Sequences that hold several documents, and the documents to change; the first of a sequence always."""
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
    """The batch with other tokens and labels throughout the document, its mask and length unchanged."""
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
    """By how much each quantity of the other documents changes, of its largest value; and the document's own.

    `own` is the change of the changed document's logits. `leaked` is the gradient of the others' loss with
    respect to the changed document's inputs, of the largest one: 0 where nothing flows.
    """
    batch = samples.assembler.assemble([(0, case.sequence)], step=0, micro_batch=0, slot=0)
    is_other = torch.ones_like(batch.loss_mask)
    is_other[0, case.start : case.stop] = False
    before = _quantities(model, batch, is_other, way)
    after = _quantities(model, _changed(batch, case, _vocab_size(samples), seed), is_other, way)
    found = {name: _relative(before[name], after[name]) for name in QUANTITIES}
    found["own"] = _relative([before["own"]], [after["own"]])
    found["leaked"] = max(
        float(side["leak"].abs().max() / side["input gradients"][0].abs().max().clamp(min=1e-300))
        for side in (before, after)
    )
    return found


def _vocab_size(samples: MicroBatches) -> int:
    """Ids that the store's tokenizer has."""
    return samples.assembler.sources[0].store.vocab_size


def _relative(left: list[Tensor], right: list[Tensor]) -> float:
    """Largest difference over the largest value; exactly 0 only where nothing differs, infinite for NaN."""
    if all(torch.equal(a, b) for a, b in zip(left, right, strict=True)):
        return 0.0
    pairs = [(a.double(), b.double()) for a, b in zip(left, right, strict=True) if a.numel()]
    scale = max(float(a.abs().max()) for a, _ in pairs)
    difference = max(float((a - b).abs().max()) for a, b in pairs)
    ratio = difference / scale if scale else float("inf")
    return ratio if ratio == ratio else float("inf")


def _quantities(model: Decoder, batch: Batch, is_other: Tensor, way: _Way) -> dict[str, Any]:
    """What belongs to the other documents: one forward for logits, one with backward for their loss."""
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
    """Every expert computes every token, so that all products keep their shapes."""
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
    """The outcome of one way to compute, over all cases."""
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
    limit = 0.0 if name == "leaked" else way.bound  # nothing flows, whatever the rounding
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
