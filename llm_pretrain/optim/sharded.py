"""What a rank holds of a sharded tensor (a DTensor)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:  # importing it takes a second
    from torch.distributed.tensor import DTensor


def as_sharded(tensor: Tensor) -> DTensor | None:
    """The tensor as a DTensor; None if it is not sharded."""
    return tensor if hasattr(tensor, "full_tensor") else None  # type: ignore[return-value]


def to_local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory; the tensor itself if it is not sharded."""
    sharded = as_sharded(tensor)
    return tensor if sharded is None else sharded.to_local()


def replicate_dims(sharded: DTensor) -> list[int]:
    """The dimensions of the mesh along which ranks hold the same part."""
    return [dim for dim, placement in enumerate(sharded.placements) if placement.is_replicate()]
