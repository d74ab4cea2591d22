"""What two cells promise each other: which numbers are the same bits, which agree within which bound.

The contract and nothing else: it starts no run and reads no file. Where the bounds come from is in
docs/exactness.md, under "Parity"; the two are changed together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from llm_pretrain.commands._parity.cells import Cell
from llm_pretrain.config import Config

SAMPLES = ("data/batch_sha256", "train/loss_tokens")
LOSSES = ("train/loss", "train/aux_loss")
GRAD_NORM = "train/grad_norm"
DIGEST = "train/parameters_sha256"
KEYS = (*SAMPLES, *LOSSES, GRAD_NORM, DIGEST)
"""Compared at every step, in this order: what goes in before what comes out."""
REQUIRED = (*SAMPLES, "train/loss", GRAD_NORM)
"""In every row of every path. A dense model has no auxiliary loss, the trainer path no digest."""
PARAMETERS = "parameters"
"""Relative norm of the difference of the final parameters, in tables and in parity.json."""

LOSS_BOUND = {"fp32": 1e-5, "bf16": 2**-8, "fp16": 2**-11}
"""Largest relative difference of a loss between two splits of one batch, by precision. fp32: the contract.
bf16, fp16: their unit round-off u. A micro batch's weight gradients are rounded to u before they are added,
so another split moves an update by about u of itself; the losses part by u of what training has changed."""
GRAD_NORM_BOUND = {"fp32": 1e-4, "bf16": 2**-6, "fp16": 2**-9}
"""The same of the gradient norm, which a change of the parameters moves more than it moves the loss: 4u."""
PARAMETERS_BOUND = {"fp32": 1e-6}
"""The same of the final parameters; stated for fp32 and for runs of at most PARAMETERS_STEPS steps."""
PARAMETERS_STEPS = 20
FIRST_LOSS_BOUND = {"fp32": 1e-6}
"""The bound of a loss at the first step, where nothing is trained yet and only the sum's order differs."""
LOSS_STEPS, GRAD_NORM_STEPS, TRAINER_STEPS = 20, 10, 50
"""How many steps the bounds of losses and of the gradient norm hold for, from the first one that differs in
its split. A run amplifies rounding by its own sensitivity: what is 1e-7 at the first step has been seen to
be a percent of the norm after 25 steps of a run at a high learning rate, on code that computes the same."""

ROUTING = "moe/load"
"""Where each layer's tokens went, as shares: integers over integers, equal where no token went elsewhere."""
PARTED_BOUND = {"train/loss": 2**-8, "train/aux_loss": 2**-5, GRAD_NORM: 2**-2}
"""The bounds from the step on at which a token goes to another expert. Routing is discrete: where two experts
tie within rounding, another split may take the other one, and what follows is no rounding. Measured."""
LARGEST_TIE = 0.01
"""Share of a layer's choices that may change at the first such step; more are not ties but an error."""


@dataclass(frozen=True)
class Promise:
    """What one cell promises against another.

    Args:
        exact: Keys whose values are the same bits.
        within: Key to the largest relative difference; `parameters` stands for the final ones.
        note: What is not promised, and why; empty where everything is.
        parted: Replaces `within` from the first step on whose `moe/load` differs; empty: nothing does.
        first: Narrower bounds, of the first step alone.
        steps: How long `within` holds; see `by_steps`.
    """

    exact: tuple[str, ...]
    within: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    parted: Mapping[str, float] = field(default_factory=dict)
    first: Mapping[str, float] = field(default_factory=dict)
    steps: int = LOSS_STEPS


def promise(cell: Cell, reference: Cell, config: Config, steps: int) -> Promise:
    """What `cell` promises against `reference`, a cell of the same precision, after runs of `steps` steps."""
    if "trainer" in (cell.path, reference.path):
        return _trainer(cell, config)
    if cell.split == reference.split and cell.strategy == reference.strategy:
        return Promise(exact=KEYS)
    if why := _differs_by_split(cell, reference, config):
        return Promise(SAMPLES, note=why)
    return _within(cell.precision, config, steps)


def _within(precision: str, config: Config, steps: int) -> Promise:
    """Two splits or strategies over the same batches: the same sums, added in another order."""
    within = dict.fromkeys(LOSSES, LOSS_BOUND[precision]) | {GRAD_NORM: GRAD_NORM_BOUND[precision]}
    note = ""
    if precision in PARAMETERS_BOUND and steps <= PARAMETERS_STEPS:
        within[PARAMETERS] = PARAMETERS_BOUND[precision]
    elif precision in PARAMETERS_BOUND:
        note = f"parameters: promised for runs of up to {PARAMETERS_STEPS} steps, of {steps} shown only"
    first = {"train/loss": FIRST_LOSS_BOUND[precision]} if precision in FIRST_LOSS_BOUND else {}
    return Promise(SAMPLES, within, note, PARTED_BOUND if config.model.moe_layers else {}, first)


def _differs_by_split(cell: Cell, reference: Cell, config: Config) -> str:
    """Why these two splits do not even have the same objective; empty where they have."""
    model = config.model
    if has_dropout(config) and cell.micro_batch_size != reference.micro_batch_size:
        sizes = f"{cell.micro_batch_size} against {reference.micro_batch_size}"
        return f"dropout draws per micro batch, of {sizes} sequences"
    if model.moe_layers and model.router_aux_loss_scope == "micro_batch":
        return "model.router_aux_loss_scope: micro_batch depends on the split"
    return ""


def _trainer(cell: Cell, config: Config) -> Promise:
    """transformers' Trainer and model: the same objective in other code, and only where it is dense."""
    if config.model.moe_layers:
        return Promise(SAMPLES, note="transformers' auxiliary loss is another one: losses shown, not judged")
    if has_dropout(config):
        return Promise(
            SAMPLES, note="transformers draws its dropout in another way: losses shown, not judged"
        )
    if cell.precision != "fp32":
        return Promise(SAMPLES, note=f"promised in fp32, not in {cell.precision}: losses shown, not judged")
    return Promise(SAMPLES, {"train/loss": LOSS_BOUND["fp32"]}, steps=TRAINER_STEPS)


def by_steps(made: Promise, start: int = 1) -> list[tuple[int, Promise]]:
    """(first step, promise) of a promise that begins at `start`, and fades as its bounds run out."""
    if not made.within:
        return [(start, made)]
    losses = {key: bound for key, bound in made.within.items() if key != GRAD_NORM}
    parted = {key: bound for key, bound in made.parted.items() if key != GRAD_NORM}
    without_norm = replace(made, within=losses, parted=parted)
    shown = f"bounds are promised for {made.steps} steps, of the norm for {GRAD_NORM_STEPS}; later ones shown"
    faded = Promise(made.exact, note="; ".join(filter(None, [made.note, shown])))
    promises = [(start, made), (start + GRAD_NORM_STEPS, without_norm), (start + made.steps, faded)]
    if made.first:
        promises[:1] = [(start, replace(made, within={**made.within, **made.first})), (start + 1, made)]
    return promises


def has_dropout(config: Config) -> bool:
    """Whether a forward pass of training draws random numbers."""
    return bool(config.model.attention_dropout or config.model.hidden_dropout)
