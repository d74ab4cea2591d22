"""Everything a training run does that no launcher needs to know."""

from llm_pretrain.training.accelerate_settings import check_accelerate_settings
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
from llm_pretrain.training.expert_counting import with_global_expert_counts
from llm_pretrain.training.loop import pretrain
from llm_pretrain.training.objective import Objective, StepCounts, StepSums
from llm_pretrain.training.process import (
    check_world_size,
    prepare_process,
    report_errors,
)
from llm_pretrain.training.restarts import meeting_point
from llm_pretrain.training.saving import fingerprints
from llm_pretrain.training.schedule import learning_rate
from llm_pretrain.training.run_folder import RunFolder
from llm_pretrain.training.schedule import learning_rate
from llm_pretrain.training.status import Status

__all__ = [
    "DDP_OPTIONS",
    "Engine",
    "Evaluator",
    "Launcher",
    "Objective",
    "RunFolder",
    "Status",
    "StepCounts",
    "StepResult",
    "StepSums",
    "check_accelerate_settings",
    "check_world_size",
    "fingerprints",
    "learning_rate",
    "mark_last",
    "meeting_point",
    "prepare_process",
    "pretrain",
    "report_errors",
    "seed_dropout",
    "settle_buckets",
    "with_global_expert_counts",
    "zlib_bits_per_byte",
]
