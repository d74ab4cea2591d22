"""Full-precision checkpoints to resume from, exact to the last bit, and exported half-precision weights."""

from llm_pretrain.checkpoints.averages import AVERAGE, average_name, averages
from llm_pretrain.checkpoints.conversion import convert_weights
from llm_pretrain.checkpoints.differences import fingerprint_differences
from llm_pretrain.checkpoints.environment import environment
from llm_pretrain.checkpoints.folders import committed_folders
from llm_pretrain.checkpoints.manifest import Manifest, ResumePoint, RunFacts, find_damage, read_manifest
from llm_pretrain.checkpoints.opening import OpenedModel, is_checkpoint, open_model
from llm_pretrain.checkpoints.staging import HostBuffers
from llm_pretrain.checkpoints.state import whole_state
from llm_pretrain.checkpoints.store import CheckpointStore
from llm_pretrain.checkpoints.tensor_files import read_tensors
from llm_pretrain.checkpoints.weights import best_step, save_weights

__all__ = [
    "AVERAGE",
    "CheckpointStore",
    "HostBuffers",
    "Manifest",
    "OpenedModel",
    "ResumePoint",
    "RunFacts",
    "average_name",
    "averages",
    "best_step",
    "committed_folders",
    "convert_weights",
    "environment",
    "find_damage",
    "fingerprint_differences",
    "is_checkpoint",
    "open_model",
    "read_manifest",
    "read_tensors",
    "save_weights",
    "whole_state",
]
