"""The types of `training.precision` and of written weights."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device_type: str, precision: str) -> AbstractContextManager[Any]:
    """A context manager for forward passes in this precision; it can be entered several times."""
    return nullcontext() if precision == "fp32" else torch.autocast(device_type, DTYPES[precision])
