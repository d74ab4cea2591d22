"""Full-precision checkpoints, from which training resumes bit for bit, and half-precision weights."""

from llm_pretrain.checkpoints.folders import committed_folders, folder_name
from llm_pretrain.checkpoints.manifest import (
    ARITHMETIC_VARIABLES,
    Manifest,
    ResumePoint,
    RunFacts,
    arithmetic_changes,
    environment,
    find_damage,
    fingerprint_differences,
    model_fingerprint,
    newest_manifest,
    read_manifest,
)
from llm_pretrain.checkpoints.opening import (
    CheckpointTensors,
    CheckpointWeights,
    OpenedModel,
    is_checkpoint,
    open_model,
)
from llm_pretrain.checkpoints.state import HostBuffers
from llm_pretrain.checkpoints.store import CheckpointStore
from llm_pretrain.checkpoints.tensor_files import read_tensors
from llm_pretrain.checkpoints.weights import (
    HeldWeights,
    best_step,
    convert_weights,
    other_content,
    save_weights,
    weights_in,
)

__all__ = [
    "ARITHMETIC_VARIABLES",
    "CheckpointStore",
    "CheckpointTensors",
    "CheckpointWeights",
    "HeldWeights",
    "HostBuffers",
    "Manifest",
    "OpenedModel",
    "ResumePoint",
    "RunFacts",
    "arithmetic_changes",
    "best_step",
    "committed_folders",
    "convert_weights",
    "environment",
    "find_damage",
    "fingerprint_differences",
    "folder_name",
    "is_checkpoint",
    "model_fingerprint",
    "newest_manifest",
    "open_model",
    "other_content",
    "read_manifest",
    "read_tensors",
    "save_weights",
    "weights_in",
]
