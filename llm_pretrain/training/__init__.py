"""The training run that both launch paths share: step, loop, evaluation, checkpoints and metrics."""

from llm_pretrain.training.anomaly import SpikeDetector, StepMonitor
from llm_pretrain.training.checkpointing import fingerprints
from llm_pretrain.training.evaluation import Evaluator, zlib_bits_per_byte
from llm_pretrain.training.model_setup import build_model, initialize_weights
from llm_pretrain.training.run_state import RunFolder, Status, record_replay
from llm_pretrain.training.step import (
    DDP_OPTIONS,
    Engine,
    Launcher,
    Objective,
    StepMetrics,
    attach_global_expert_counts,
    dummy_batch,
    own_part,
    seed_dropout,
    warm_up_backward,
)
from llm_pretrain.training.trainer import pretrain

__all__ = [
    "DDP_OPTIONS",
    "Engine",
    "Evaluator",
    "Launcher",
    "Objective",
    "RunFolder",
    "SpikeDetector",
    "Status",
    "StepMetrics",
    "StepMonitor",
    "attach_global_expert_counts",
    "build_model",
    "dummy_batch",
    "fingerprints",
    "initialize_weights",
    "own_part",
    "pretrain",
    "record_replay",
    "seed_dropout",
    "warm_up_backward",
    "zlib_bits_per_byte",
]
