"""Tells ties from errors if two runs choose different experts, by their routers' scores, in one process.

Shapes: G sequences of a global batch, S positions, E experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llm_pretrain.audit.comparison import LOSS_BOUND, ROUTING
from llm_pretrain.audit.variants import Variant
from llm_pretrain.config.tree import Config
from llm_pretrain.data.assembly import Batch
from llm_pretrain.data.loader import global_batches
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.model.kernels import autocast
from llm_pretrain.model.moe import Router


class Routing(NamedTuple):
    """What one layer's router did with a global batch."""

    ranking: Tensor
    """[G, S, E]: the scores by which experts are chosen."""
    chosen: Tensor
    """bool [G, S, E]."""


@dataclass(frozen=True)
class Moves:
    """Tokens' choices of experts that differ between two passes over one batch.

    Args:
        count: Number of these choices, for tokens with and without a loss.
        gap: The largest |score − score'| / score between an expert that one pass chose and one that the
            other chose instead.
    """

    count: int
    gap: float


def route(model: Decoder, batches: Sequence[Batch], precision: str) -> list[Routing]:
    """The routing of every layer with experts, by a forward pass without gradients over micro batches."""
    found: list[list[Routing]] = []

    def record(router: Router, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ranking = router.ranking(inputs[0])
        chosen = torch.zeros_like(ranking, dtype=torch.bool)
        found[-1].append(Routing(ranking, chosen.scatter(-1, output[1].view(*ranking.shape[:2], -1), True)))

    hooks: list[Any] = [
        each.register_forward_hook(record) for each in model.modules() if isinstance(each, Router)
    ]
    try:
        for batch in batches:
            found.append([])
            with torch.no_grad(), autocast("cpu", precision):
                model(**batch.model_inputs())
    finally:
        for hook in hooks:
            hook.remove()
    return [Routing(*map(torch.cat, zip(*layer, strict=True))) for layer in zip(*found, strict=True)]


def compare_routing(left: Sequence[Routing], right: Sequence[Routing]) -> Moves:
    """The choices that differ, without those that follow from a difference in an earlier layer.

    In later layers such a difference reaches its own position and, by attention, all later positions of the
    sequence.
    """
    reached = torch.zeros(left[0].chosen.shape[:2], dtype=torch.bool)
    count, gap = 0, 0.0
    for mine, others in zip(left, right, strict=True):
        lost, gained = mine.chosen & ~others.chosen, others.chosen & ~mine.chosen
        moved = lost.any(-1) & ~reached
        count += int(lost[moved].sum())
        for ranking, out, into in ((mine.ranking, lost, gained), (others.ranking, gained, lost)):
            highest = ranking.masked_fill(~out, -torch.inf).amax(-1)[moved]
            lowest = ranking.masked_fill(~into, torch.inf).amin(-1)[moved]
            gap = max([gap, *((highest - lowest) / highest.abs()).tolist()])
        reached = (reached | moved).cummax(-1).values
    return Moves(count, gap)


def loads(routing: Sequence[Routing], mask: Tensor) -> list[list[float]]:
    """`moe/load` of a global batch; `mask`, bool [G, S], marks its loss tokens."""
    counts = torch.stack([layer.chosen[mask].sum(0) for layer in routing])
    return (counts.double() / counts[0].sum()).tolist()


def global_batch(config: Config, variant: Variant, step: int) -> list[Batch]:
    """The micro batches of a step, with the variant's micro batch size, in the order of their sequences."""
    training = dataclasses.replace(config.training, micro_batch_size=variant.micro_batch_size)
    own = dataclasses.replace(config, training=training)
    loader = global_batches(own, start_step=step - 1)
    return [batch for _, batch in zip(range(own.gradient_accumulation_steps(1)), loader, strict=False)]


def find_ties(
    models: Sequence[Decoder],
    rows: Sequence[Mapping[str, Any]],
    variants: Sequence[Variant],
    config: Config,
    step: int,
) -> str:
    """Describe the choices of experts that differ between two runs at a step, if all of them are ties.

    In a tie, the relative difference of the scores is at most LOSS_BOUND of the precision: in bf16 and fp16
    the unit round-off.

    Args:
        models: Models of both runs before the step.
        rows: Rows of the step in both runs. Passes through the models must choose as the runs did.
        variants: The variant of each run.
        config: Resolved configuration of either run.
        step: The step at which choices differ.

    Returns:
        The choices in words; empty if one of them is no tie, or if the passes do not choose as the runs did.
    """
    routings = []
    for model, row, variant in zip(models, rows, variants, strict=True):
        batches = global_batch(config, variant, step)
        routing = route(model, batches, variant.precision)
        if loads(routing, torch.cat([batch.loss_mask for batch in batches])) != row[ROUTING]:
            return ""
        routings.append(routing)
    moves = compare_routing(*routings)
    if moves.count == 0 or moves.gap > LOSS_BOUND[variants[0].precision]:
        return ""
    return f"choices that differ then: {moves.count}, between scores at most {moves.gap:.2g} apart"
