"""Full-precision checkpoints to resume from, exact to the last bit, and exported half-precision weights."""

from llm_pretrain.checkpoints.conversion import convert_weights
from llm_pretrain.checkpoints.environment import environment
from llm_pretrain.checkpoints.manifest import ResumePoint, RunFacts
from llm_pretrain.checkpoints.opening import OpenedModel, is_checkpoint, open_model
from llm_pretrain.checkpoints.state import whole_state
from llm_pretrain.checkpoints.store import CheckpointStore
from llm_pretrain.checkpoints.weights import best_step, save_weights

__all__ = [
    "CheckpointStore",
    "OpenedModel",
    "ResumePoint",
    "RunFacts",
    "best_step",
    "convert_weights",
    "environment",
    "is_checkpoint",
    "open_model",
    "save_weights",
    "whole_state",
]
