"""Documents packed into one sequence do not influence each other, and every leak is detected.

A document's tokens and labels are replaced, and the logits, cross-entropy and gradients of the others are
compared, with random weights. The balance loss is not: it depends on all documents of a sequence by design.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.corpora import make_config, make_store
from torch import Tensor

from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.config.tree import Config
from llm_pretrain.data.assembly import Batch
from llm_pretrain.data.loader import MicroBatches, train_samples
from llm_pretrain.data.store import TokenStore
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.model.kernels.experts import experts_reference
from llm_pretrain.model.kernels.loss import IGNORE_INDEX
from llm_pretrain.model.moe import Experts
from llm_pretrain.training.model_setup import initialize_weights

DENSE = ModelConfig(
    vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
)
MOE = replace(DENSE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, n_shared_experts=1)

FLOAT64_BOUND = 1e-11
"""Relative to the largest value: some thousand roundings of float64, far below any real influence."""
QUANTITIES = ("logits", "token losses", "parameter gradients", "input gradients")
INTO = "gradient into the changed document"
SEED = 0


class Way(NamedTuple):
    """A way to compute, and how far the others' values may move, relative to the largest.

    With experts the number of tokens of an expert may change how its product rounds the other rows. So a
    mixture is compared bit for bit where every expert computes every token (the layer's definition), and in
    float64 with the kernel of training.
    """

    precision: str
    bound: float = 0.0
    by_definition: bool = False


WAYS = {
    "dense, fp32": (DENSE, Way("fp32")),
    "dense, bf16": (DENSE, Way("bf16")),
    "experts by definition, fp32": (MOE, Way("fp32", by_definition=True)),
    "experts by definition, bf16": (MOE, Way("bf16", by_definition=True)),
    "experts' kernel, float64": (MOE, Way("fp64", FLOAT64_BOUND)),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """Short documents: several fit into a sequence of 128."""
    return make_store(tmp_path_factory.mktemp("packing") / "store", documents=60, longest=8, masked=True)


def config_of(store: TokenStore, model: ModelConfig) -> Config:
    return replace(make_config(store, sequence_length=128), model=model)


class Case(NamedTuple):
    """A sequence, and the positions `start` to `stop` of the document that is changed in it."""

    sequence: int
    start: int
    stop: int


def choose_cases(samples: MicroBatches, sequences: int = 2, documents: int = 3) -> Iterator[Case]:
    """Sequences with several documents, and documents to change: the first of each, and random others."""
    index = samples.assembler.sources[0].index
    several = np.flatnonzero(np.diff(index.sequence_offsets) > documents)
    assert len(several) >= sequences
    generator = np.random.default_rng(SEED)
    for sequence in generator.permutation(several)[:sequences].tolist():
        first, last = index.sequence_offsets[sequence : sequence + 2].tolist()
        pieces = list(pairwise([0, *np.cumsum(index.piece_length[first:last]).tolist()]))
        others = (generator.permutation(len(pieces) - 1)[: documents - 1] + 1).tolist()
        for number in (0, *others):
            yield Case(sequence, *pieces[number])


def change_document(batch: Batch, case: Case, vocab_size: int) -> Batch:
    """The batch with all tokens and labels of the document replaced, but the same mask and length."""
    generator = torch.Generator().manual_seed(SEED + case.sequence)
    here = slice(case.start, case.stop)
    input_ids, labels = batch.input_ids.clone(), batch.labels.clone()
    shift = torch.randint(1, vocab_size, (case.stop - case.start,), generator=generator)
    input_ids[0, here] = (input_ids[0, here] + shift) % vocab_size
    labels[0, here] = torch.where(batch.loss_mask[0, here], input_ids[0, here].roll(-1), IGNORE_INDEX)
    return replace(batch, input_ids=input_ids, labels=labels)


@contextmanager
def experts_by_definition(model: Decoder) -> Iterator[None]:
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


def compute(model: Decoder, batch: Batch, is_other: Tensor, way: Way) -> dict[str, list[Tensor]]:
    """Logits, losses and gradients of the other documents, from two forward passes and one backward pass.

    `own` are the logits of the changed document, INTO the gradient of the others' loss with respect to its
    inputs.
    """
    model.to(torch.float64 if way.precision == "fp64" else torch.float32)
    model.zero_grad(set_to_none=True)
    inputs = batch.model_inputs()
    mask = inputs["loss_mask"] & is_other
    embedded: list[Tensor] = []

    def keep(_module: object, _inputs: object, output: Tensor) -> None:
        output.retain_grad()
        embedded.append(output)

    by_definition = experts_by_definition(model) if way.by_definition else nullcontext()
    with by_definition, torch.autocast("cpu", torch.bfloat16, enabled=way.precision == "bf16"):
        with torch.no_grad():
            logits = model(*(inputs[name] for name in ("input_ids", "position_ids", "document_ids"))).logits
        hook = model.model.embed_tokens.register_forward_hook(keep)
        output = model(**{**inputs, "loss_mask": mask})
        hook.remove()
    output.loss_sum.backward()
    gradient = embedded[0].grad
    assert gradient is not None
    return {
        "logits": [logits[is_other]],
        "own": [logits[~is_other]],
        "token losses": [output.token_losses[is_other]],
        "parameter gradients": [each.grad for each in model.parameters() if each.grad is not None],
        "input gradients": [gradient[is_other]],
        INTO: [gradient[~is_other]],
    }


def relative(left: list[Tensor], right: list[Tensor]) -> float:
    """Largest difference over the largest value; 0 only if all bits are equal, infinite for NaN."""
    if all(torch.equal(a, b) for a, b in zip(left, right, strict=True)):
        return 0.0
    pairs = [(a.double(), b.double()) for a, b in zip(left, right, strict=True) if a.numel()]
    scale = max(float(a.abs().max()) for a, _ in pairs)
    ratio = max(float((a - b).abs().max()) for a, b in pairs) / scale if scale else float("inf")
    return ratio if ratio == ratio else float("inf")


def moved(config: Config, way: Way) -> set[str]:
    """What of other documents moves beyond the bound when one is changed; its own logits must move."""
    samples = train_samples(config)
    model = Decoder(config.model).eval()
    initialize_weights(model, SEED)
    found = set()
    for case in choose_cases(samples):
        batch = samples.assembler.assemble([(0, case.sequence)], step=0, micro_batch=0, slot=0)
        is_other = torch.ones_like(batch.loss_mask)
        is_other[0, case.start : case.stop] = False
        changed = change_document(batch, case, config.model.vocab_size or 0)
        before, after = (compute(model, each, is_other, way) for each in (batch, changed))
        assert relative(before["own"], after["own"]) > 0, (
            "the change has no effect, so nothing could be found"
        )
        found |= {name for name in QUANTITIES if not relative(before[name], after[name]) <= way.bound}
        if any(side[INTO][0].any() for side in (before, after)):  # exactly 0, whatever the rounding
            found.add(INTO)
    return found


@pytest.mark.parametrize("name", WAYS)
def test_packed_documents_do_not_influence_each_other(name: str, store: TokenStore):
    model, way = WAYS[name]
    assert moved(config_of(store, model), way) == set()


def test_documents_that_are_not_isolated_influence_those_after_them(store: TokenStore):
    config = config_of(store, DENSE)
    config = replace(config, data=replace(config.data, isolate_documents=False))
    assert moved(config, Way("fp32")) == {*QUANTITIES, INTO}


def attention_crosses_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Decoder.forward
    names = ("input_ids", "position_ids", "document_ids")

    def leaking(self, *arguments, **options):
        inputs = dict(zip(names, arguments, strict=False)) | options | {"document_offsets": None}
        return forward(self, **inputs | {"document_ids": torch.zeros_like(inputs["document_ids"])})

    monkeypatch.setattr(Decoder, "forward", leaking)


def change_inputs(monkeypatch: pytest.MonkeyPatch, module: str, change: Callable[[Tensor], Tensor]) -> None:
    """Change the first input of all modules of a class, except where `forward` is replaced."""

    def hook(called, inputs):
        if type(called).__name__ == module and "forward" not in vars(called):
            return (change(inputs[0]), *inputs[1:])
        return None

    call = torch.nn.Module.__call__

    def changed(self, *inputs, **named):
        return call(self, *(hook(self, inputs) or inputs), **named)

    monkeypatch.setattr(torch.nn.Module, "__call__", changed)


LEAKS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "attention crosses documents": ("dense, fp32", attention_crosses_documents),
    "the router sees the mean of the sequence": (
        "experts by definition, fp32",
        lambda patch: change_inputs(patch, "Router", lambda hidden: hidden + hidden.mean(1, keepdim=True)),
    ),
    "the experts' kernel adds the previous token": (
        "experts' kernel, float64",
        lambda patch: change_inputs(patch, "Experts", lambda hidden: hidden + 1e-3 * hidden.roll(1, -2)),
    ),
}


@pytest.mark.parametrize("leak", LEAKS)
def test_a_document_that_sees_another_is_detected(
    leak: str, store: TokenStore, monkeypatch: pytest.MonkeyPatch
):
    name, inject = LEAKS[leak]
    inject(monkeypatch)
    model, way = WAYS[name]
    assert moved(config_of(store, model), way) == {*QUANTITIES, INTO}
