"""Everything a training run does that no launcher needs to know."""

from llm_pretrain.training.accelerate_settings import (
    check_accelerate_settings,
    launch_settings,
    restore_launch_settings,
)
from llm_pretrain.training.background import close_channel, open_channel
from llm_pretrain.training.engine import (
    DDP_OPTIONS,
    Engine,
    Launcher,
    StepResult,
    heed_verdict,
    mark_last,
    seed_dropout,
    settle_buckets,
)
from llm_pretrain.training.evaluation import Evaluator, zlib_bits_per_byte
from llm_pretrain.training.expert_counting import with_global_expert_counts
from llm_pretrain.training.fingerprints import fingerprints
from llm_pretrain.training.objective import Objective, StepCounts, StepSums
from llm_pretrain.training.optimizers import state_tensors
from llm_pretrain.training.peers import collective_timeout
from llm_pretrain.training.pretraining import pretrain
from llm_pretrain.training.process import (
    check_world_size,
    default_accelerate_file,
    end_script,
    prepare_process,
    report_errors,
)
from llm_pretrain.training.restarts import meeting_point
from llm_pretrain.training.run_folder import RunFolder
from llm_pretrain.training.schedule import learning_rate
from llm_pretrain.training.sharding import (
    adopt_parameters,
    check_fsdp_version,
    check_strategy,
    forget_process_groups,
    layer_precision,
    release_parameters,
    shard_full_precision,
    whole_norm,
)
from llm_pretrain.training.spikes import SPIKE_KINDS, SPIKE_REASONS, Judge, SpikeHistory
from llm_pretrain.training.status import Status
from llm_pretrain.training.watchdog import watching

__all__ = [
    "DDP_OPTIONS",
    "SPIKE_KINDS",
    "SPIKE_REASONS",
    "Engine",
    "Evaluator",
    "Judge",
    "Launcher",
    "Objective",
    "RunFolder",
    "SpikeHistory",
    "Status",
    "StepCounts",
    "StepResult",
    "StepSums",
    "adopt_parameters",
    "check_accelerate_settings",
    "check_fsdp_version",
    "check_strategy",
    "check_world_size",
    "close_channel",
    "collective_timeout",
    "default_accelerate_file",
    "end_script",
    "fingerprints",
    "forget_process_groups",
    "heed_verdict",
    "launch_settings",
    "layer_precision",
    "learning_rate",
    "mark_last",
    "meeting_point",
    "open_channel",
    "prepare_process",
    "pretrain",
    "release_parameters",
    "report_errors",
    "restore_launch_settings",
    "seed_dropout",
    "settle_buckets",
    "shard_full_precision",
    "state_tensors",
    "watching",
    "whole_norm",
    "with_global_expert_counts",
    "zlib_bits_per_byte",
]
