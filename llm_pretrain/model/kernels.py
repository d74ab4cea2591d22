"""Which implementation runs the parts of the decoder that have several; none changes what is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Kernels:
    """Names of implementations, as in the configuration's `training` section; `auto` is the fastest.

    Args:
        experts: `auto`, `streamed`, `grouped` or `reference`.
        attention: `auto`, `sdpa`, `varlen` or `flex`.
        loss: `auto`, `full`, `fused` or `liger`.
        z_loss_coef: The objective's coefficient of the z-loss, which a loss head that computes its gradients
            in the forward pass must know.
    """

    experts: Literal["auto", "streamed", "grouped", "reference"] = "auto"
    attention: Literal["auto", "sdpa", "varlen", "flex"] = "auto"
    loss: Literal["auto", "full", "fused", "liger"] = "auto"
    z_loss_coef: float = 0.0


AUTO = Kernels()
"""The fastest of everything."""
