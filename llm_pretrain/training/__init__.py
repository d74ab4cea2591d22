"""Everything a training run does that no launcher needs to know."""

from llm_pretrain.training.engine import (
    DDP_OPTIONS,
    Engine,
    Launcher,
    StepResult,
    mark_last,
    seed_dropout,
    settle_buckets,
)
from llm_pretrain.training.evaluation import Evaluator, zlib_bits_per_byte
from llm_pretrain.training.loop import pretrain
from llm_pretrain.training.objective import Objective, StepCounts, StepSums
from llm_pretrain.training.process import (
    check_accelerate_settings,
    check_world_size,
    default_accelerate_file,
    prepare_process,
    report_errors,
)

__all__ = [
    "DDP_OPTIONS",
    "Engine",
    "Evaluator",
    "Launcher",
    "Objective",
    "StepCounts",
    "StepResult",
    "StepSums",
    "check_accelerate_settings",
    "check_world_size",
    "default_accelerate_file",
    "mark_last",
    "prepare_process",
    "pretrain",
    "report_errors",
    "seed_dropout",
    "settle_buckets",
    "zlib_bits_per_byte",
]
