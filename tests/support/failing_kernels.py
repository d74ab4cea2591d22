"""Runs on a CPU whose kernels are checked as a GPU's are, some of them failing; called in every rank."""

from __future__ import annotations

import os
from typing import Any

from llm_pretrain.model import self_check
from llm_pretrain.model.kernels import choice as kernels
from llm_pretrain.model.kernels import layers
from llm_pretrain.training import kernel_choice

PLACES: dict[str, tuple[Any, str]] = {
    "streamed": (kernels, "streamed_experts"),
    "fused loss": (kernels, "fused_linear_cross_entropy"),
    "compile": (self_check, "compile_layer"),
    "norm": (layers, "_rms_norm_gradients"),
}
"""What a check computes with."""


def check_on_cpu(rank: int, *names: str) -> None:
    """Check the kernels of a CPU too; those named raise in one rank."""
    kernel_choice.CHECKED_DEVICES.add("cpu")
    if rank == int(os.environ.get("RANK", "0")):
        for name in names:
            setattr(*PLACES[name], failing(name))


def failing(name: str) -> Any:
    """What raises in place of a kernel."""

    def call(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("no kernel image is available\nfor execution on the device")

    return call
