"""Packed sequences in a reproducible order, assembled into micro batches for training and evaluation."""

from llm_pretrain.data.loader.assembly import Batch, padded_offsets
from llm_pretrain.data.loader.batches import (
    EvaluationBatches,
    MicroBatches,
    data_fingerprint,
    evaluation_batches,
    global_batches,
    open_stores,
    samples_by_source,
    sequences_per_epoch,
    shared_memory_problem,
    train_samples,
    weight_changes_fingerprint,
    worker_errors,
)

__all__ = [
    "Batch",
    "EvaluationBatches",
    "MicroBatches",
    "data_fingerprint",
    "evaluation_batches",
    "global_batches",
    "open_stores",
    "padded_offsets",
    "samples_by_source",
    "sequences_per_epoch",
    "shared_memory_problem",
    "train_samples",
    "weight_changes_fingerprint",
    "worker_errors",
]
