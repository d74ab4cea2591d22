"""The layouts of `llm-pretrain parity --layouts published`: those of a table of torchtitan's, run here.

pytorch/torchtitan#3029, comment of 2026-08-04: seed 42, deterministic, global batch 8, micro batches of one
sequence, ten steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from llm_pretrain.config import PRESETS
from llm_pretrain.errors import ConfigError


class Layout(NamedTuple):
    """A layout of the published table.

    Args:
        name: There.
        mesh: As in `distributed_of`.
        losses: After steps 1, 5 and 10, there.
    """

    name: str
    mesh: str
    losses: tuple[float, float, float]


STEPS = (1, 5, 10)
"""Steps of the table; the last one is a run's length."""
PUBLISHED = (
    Layout("single GPU", "ddp", (12.05575, 10.89670, 9.81530)),
    Layout("fsdp2", "1x2", (12.07003, 11.09161, 9.97418)),
    Layout("pp2", "1x1+pp2", (12.04905, 10.87594, 9.81217)),
    Layout("cp2", "1x1+cp2", (12.06936, 11.05554, 9.97089)),
    Layout("tp2", "1x1+tp2", (12.05239, 11.01701, 9.95286)),
    Layout("fsdp2 x tp2 x pp2", "1x2+tp2+pp2", (12.05729, 10.63687, 9.73056)),
    Layout("fsdp2 x tp2 x cp2", "1x2+cp2+tp2", (12.04102, 11.00072, 9.93129)),
    Layout("tp2 x pp2 x cp2", "1x1+cp2+tp2+pp2", (12.04419, 10.64952, 9.74151)),
    Layout("fsdp2 x pp2 x cp2", "1x2+cp2+pp2", (12.07969, 10.77366, 9.77886)),
    Layout("ep2 x fsdp2", "1x2+ep2", (12.07003, 11.10597, 9.96939)),
    Layout("ep2 x fsdp2 x tp2 x pp2", "1x2+ep2+tp2+pp2", (12.03851, 10.82012, 9.80058)),
    Layout("ep2 x fsdp2 x tp2 x cp2", "1x2+ep2+cp2+tp2", (12.05770, 11.02899, 9.92700)),
    Layout("ep2 x fsdp2 x pp2 x cp2", "1x2+ep2+cp2+pp2", (12.06318, 10.81674, 9.77785)),
    Layout("ep8 x fsdp8", "1x8+ep8", (12.03346, 10.88771, 9.86456)),
    Layout("pp4", "1x1+pp4", (12.06240, 11.10712, 9.93111)),
    Layout("pp8", "1x1+pp8", (12.04408, 10.81012, 9.81014)),
    Layout("tp4", "1x1+tp4", (12.03252, 11.02760, 9.93343)),
    Layout("cp4", "1x1+cp4", (12.07386, 11.02728, 9.94493)),
)
_SETTINGS = {
    **{"run.seed": 42, "training.global_batch_size": 8, "training.micro_batch_size": 1},
    # what eight stages, four tensor-parallel ranks and eight expert-parallel ones can divide
    **{"model.num_hidden_layers": 8, "model.num_attention_heads": 4, "model.num_key_value_heads": 4},
    # at tiny-moe's own rate eight layers train unevenly, which amplifies rounding
    **{"optimizer.learning_rate": 8e-4, "schedule.min_learning_rate": 8e-5},
}


def layout_options(arguments: argparse.Namespace, given: Sequence[str]) -> list[str]:
    """The command's options with the settings that every layout needs, which those that are given replace.

    Without a configuration, that of the preset tiny-moe.

    Raises:
        ConfigError: an option that the layouts decide.
    """
    for name in ("paths", "mesh", "world_size", "accumulation", "steps", "interrupt"):
        if getattr(arguments, name):
            raise ConfigError(
                f"--{name.replace('_', '-')}: expected none with --layouts, which decides it, found "
                f"{getattr(arguments, name)}"
            )
    file = [] if arguments.config else ["--config", str(PRESETS / "tiny-moe.yaml")]
    return [*file, *(word for key, value in _SETTINGS.items() for word in (f"--{key}", str(value))), *given]


def layout_rows(losses: Mapping[str, Sequence[float | None]]) -> list[list[str]]:
    """A row for each layout: its name, the losses here, and there.

    Args:
        losses: Mesh to the losses after `STEPS`.
    """
    rows = [["layout", *(f"step {step}" for step in STEPS), *(f"torchtitan, {step}" for step in STEPS)]]
    for layout in PUBLISHED:
        here = losses.get(layout.mesh, [None] * len(STEPS))
        shown = ["-" if loss is None else f"{loss:.8f}" for loss in here]
        rows.append([layout.name, *shown, *(f"{loss:.5f}" for loss in layout.losses)])
    rows.append(["spread", *_spreads(list(losses.values())), *_spreads([each.losses for each in PUBLISHED])])
    return rows


def _spreads(columns: Sequence[Sequence[Any]]) -> list[str]:
    """Largest minus smallest loss of each step."""
    found = []
    for values in zip(*columns, strict=True):
        known = [each for each in values if each is not None]
        found.append(f"{max(known) - min(known):.2g}" if known else "-")
    return found
