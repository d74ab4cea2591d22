"""Ladders of small models: families of sizes, the runs that fit a budget, and the table of their losses."""

from llm_pretrain.ladder.family import member, members, width_step
from llm_pretrain.ladder.measurements import (
    decay_run,
    measured_points,
    read_losses,
    stable_run,
    tokens_per_step,
)
from llm_pretrain.ladder.points import (
    Budget,
    Ladder,
    Point,
    Rung,
    read_ladder,
    read_plan,
    read_points,
    write_points,
)

__all__ = [
    "Budget",
    "Ladder",
    "Point",
    "Rung",
    "decay_run",
    "measured_points",
    "member",
    "members",
    "read_ladder",
    "read_losses",
    "read_plan",
    "read_points",
    "stable_run",
    "tokens_per_step",
    "width_step",
    "write_points",
]
