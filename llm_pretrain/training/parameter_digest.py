"""A digest of all parameters, so that two runs can be compared bit for bit without a checkpoint of each step.

For comparisons of short runs; nothing in training reads it back, and no launcher is known here.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor
from torch.nn import Module


def parameters_sha256(model: Module, *, first: bool) -> str | None:
    """SHA-256 over all parameters' bytes, in `named_parameters()` order; collective where they are sharded.

    Args:
        model: The unwrapped model that trains. Every rank calls, since a sharded parameter (one that has a
            `full_tensor()`) is put together by all of them.
        first: Whether this is rank 0, which alone hashes.

    Returns:
        64 hexadecimal digits on rank 0; None on the others, and everywhere where a back-end keeps its
        parameters in a form of its own (DeepSpeed's ZeRO-3 leaves empty ones in the module).
    """
    parameters = list(model.parameters())
    if any(hasattr(parameter, "ds_id") for parameter in parameters):
        return None
    digest = hashlib.sha256()
    for parameter in parameters:
        whole = _whole(parameter.detach())
        if first:
            digest.update(whole.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest() if first else None


def _whole(tensor: Tensor) -> Tensor:
    full_tensor = getattr(tensor, "full_tensor", None)
    return full_tensor() if callable(full_tensor) else tensor  # type: ignore[return-value]  # DTensor's
