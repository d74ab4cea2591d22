"""Ladders of small models: families of sizes, the runs that fit a budget, and the table of their losses."""

from llm_pretrain.ladder.budget import (
    EVALUATION_COST,
    FLOPS_LIMIT,
    SECONDS_LIMIT,
    SIZE_COUNTS,
    Speed,
    choose_rungs,
    ladder_flops,
    ladder_seconds,
    read_budget,
    rungs_within,
)
from llm_pretrain.ladder.compare import compare_ladders
from llm_pretrain.ladder.family import Size, Sizes, member, tokens_per_step
from llm_pretrain.ladder.measurements import (
    Progress,
    diverged_sizes,
    flops_per_second,
    measured_points,
    read_ladder,
    read_progress,
    shortcomings,
    used_flops,
)
from llm_pretrain.ladder.planning import EVALUATIONS, Choice, Forecast, best_of
from llm_pretrain.ladder.points import (
    LADDER_FILE,
    POINTS_FILE,
    RUNS_FOLDER,
    Ladder,
    Rung,
    read_unmeasured,
    write_points,
)
from llm_pretrain.ladder.report import write_ladder_report
from llm_pretrain.ladder.runs import Run, ladder_runs, longest_first, run_config, run_folder, with_store
from llm_pretrain.ladder.scaling_law import INTERVAL_LEVEL, LEAST_SIZES

__all__ = [
    "EVALUATIONS",
    "EVALUATION_COST",
    "FLOPS_LIMIT",
    "INTERVAL_LEVEL",
    "LADDER_FILE",
    "LEAST_SIZES",
    "POINTS_FILE",
    "RUNS_FOLDER",
    "SECONDS_LIMIT",
    "SIZE_COUNTS",
    "Choice",
    "Forecast",
    "Ladder",
    "Progress",
    "Run",
    "Rung",
    "Size",
    "Sizes",
    "Speed",
    "best_of",
    "choose_rungs",
    "compare_ladders",
    "diverged_sizes",
    "flops_per_second",
    "ladder_flops",
    "ladder_runs",
    "ladder_seconds",
    "longest_first",
    "measured_points",
    "member",
    "read_budget",
    "read_ladder",
    "read_progress",
    "read_unmeasured",
    "run_config",
    "run_folder",
    "rungs_within",
    "shortcomings",
    "tokens_per_step",
    "used_flops",
    "with_store",
    "write_ladder_report",
    "write_points",
]
