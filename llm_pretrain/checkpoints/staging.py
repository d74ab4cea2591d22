"""Which parts of the state this rank writes, and their copies in the processor's memory.

Of tensors that all ranks hold, each is one rank's to write, balanced by size; of sharded ones each rank has
its own part. No collective: every rank knows the others' shares. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItemType


@dataclass(frozen=True)
class Piece:
    """A tensor, or a part of one.

    Args:
        name: Of the whole tensor.
        tensor: The part, as it is held here: on any device, and live unless it is a copy.
        offsets: Where the part begins in the whole, by dimension.
    """

    name: str
    tensor: Tensor
    offsets: tuple[int, ...]


def own_pieces(tensors: dict[str, Tensor], *, rank: int, world_size: int) -> list[Piece]:
    """The pieces that `rank` writes, so that all ranks together write every element once."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=rank == 0)
    pieces, loads = [], [0] * world_size
    for item in planner.create_local_plan().items:
        if item.type == WriteItemType.TENSOR:  # the same on every rank
            writer = loads.index(min(loads))
            loads[writer] += tensors[item.index.fqn].nbytes
            if writer != rank:
                continue
        part = planner.resolve_data(item)
        assert isinstance(part, Tensor)
        assert item.tensor_data is not None
        if part.numel() or item.type == WriteItemType.TENSOR:
            pieces.append(Piece(item.index.fqn, part.detach(), tuple(item.tensor_data.chunk.offsets)))
    return pieces


class HostBuffers:
    """Copies of tensors in the processor's memory, in buffers that are used again by the next copy.

    What was copied holds until the same name is copied again: wait for its writer first. A GPU's tensors
    are copied into pinned memory, which it writes to by itself.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def pieces(self, pieces: Iterable[Piece]) -> list[Piece]:
        """The same pieces with their tensors copied."""
        copies = self.tensors({f"{piece.name}{piece.offsets}": piece.tensor for piece in pieces})
        return [replace(piece, tensor=copy) for piece, copy in zip(pieces, copies.values(), strict=True)]

    def tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same tensors copied, by the same names."""
        copies = {name: self._copy(name, tensor.detach()) for name, tensor in tensors.items()}
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()  # the copies were only begun
        return copies

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[name] = buffer
        return buffer.copy_(tensor, non_blocking=True)
