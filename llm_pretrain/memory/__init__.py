"""Estimates of a run's memory and time, and errors when memory runs out."""

from llm_pretrain.memory.estimate import (
    CUDA_CONTEXT,
    DOCUMENT_LENGTH,
    TOLERANCE,
    MemoryEstimate,
    compute_optimal_tokens,
    estimate_memory,
    estimate_time,
    token_budget,
)
from llm_pretrain.memory.out_of_memory import (
    check_memory,
    explain_out_of_memory,
    is_out_of_memory,
    step_warnings,
)

__all__ = [
    "CUDA_CONTEXT",
    "DOCUMENT_LENGTH",
    "TOLERANCE",
    "MemoryEstimate",
    "check_memory",
    "compute_optimal_tokens",
    "estimate_memory",
    "estimate_time",
    "explain_out_of_memory",
    "is_out_of_memory",
    "step_warnings",
    "token_budget",
]
