"""Random initial values that are a function of seed, tensor name and position alone.

So a rank that holds a part of a tensor draws only this part, without communication. Every launcher, number of
processes and mesh begins with the same bits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from hashlib import sha256

import torch
from torch import Tensor, nn

from llm_pretrain.optim.param_groups import as_sharded, to_local

BLOCK = 1 << 18
"""Elements that are drawn together. Every block has a seed of its own, so n neighbouring elements take at
most n + 2 · BLOCK draws."""


@torch.no_grad()
def materialize(model: nn.Module, device: torch.device) -> None:
    """Give the parameters and buffers of a model on the meta device memory on `device`, uninitialised.

    A sharded model gets memory only for this rank's shards. Tied parameters stay tied.
    """
    first: dict[Tensor, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(parameter, name) != name:
            tied[name] = first[parameter]
    model.to_empty(device=device)
    for name, original in tied.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, model.get_parameter(original))


@torch.no_grad()
def draw_normal(target: Tensor, std: float, *, seed: int, name: str) -> None:
    """Fill a tensor, or this rank's part of a sharded one, with normal values of mean 0.

    Args:
        target: In any floating type, on any device.
        std: Standard deviation.
        seed: The run's seed.
        name: The tensor's name in the model.
    """
    part, offsets = local_part(target)
    assert part.is_contiguous(), f"{name}: the values would be drawn into a copy"
    if part.numel():
        blocks = _Blocks(seed, name, target.numel(), std)
        for values, position in runs(part, target.shape, offsets):
            blocks.copy_to(values, position)


@torch.no_grad()
def copy_into(target: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor into `target`, which may be sharded; rows that only `target` has stay unchanged."""
    part, offsets = local_part(target)
    rows = max(0, min(len(part), len(whole) - offsets[0]))
    box = tuple(slice(start, start + size) for start, size in zip(offsets, part.shape, strict=True))
    part[:rows].copy_(whole[box])


def local_part(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's part of a tensor, and the index in each dimension at which the part begins."""
    part, sharded = to_local(tensor).detach(), as_sharded(tensor)
    if sharded is None:
        return part, (0,) * tensor.dim()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offsets = compute_local_shape_and_global_offset(
        tensor.shape, sharded.device_mesh, sharded.placements
    )
    assert part.shape == shape
    return part, tuple(offsets)


def runs(part: Tensor, shape: Sequence[int], offsets: Sequence[int]) -> Iterator[tuple[Tensor, int]]:
    """Vectors of those elements of a part that are contiguous in the whole tensor, which has this shape, and
    each vector's first index there. They are views if the part is contiguous, else copies."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    start = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    inner = len(shape)  # the dimensions from here on are whole
    while inner and part.shape[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)
    indices = itertools.product(*map(range, part.shape[:outer]))
    for values, index in zip(part.reshape(-1, math.prod(part.shape[outer:])), indices, strict=True):
        yield values, start + sum(i * stride for i, stride in zip(index, strides, strict=False))


class _Blocks:
    """The values of a tensor, drawn block by block."""

    def __init__(self, seed: int, name: str, size: int, std: float):
        self.size, self.std = size, std
        # torch's generator takes 32 bits of a seed, so a hash for each block would soon collide with another
        self.first_seed = int.from_bytes(sha256(f"{seed}/{name}".encode()).digest()[:4], "little")
        self.generator = torch.Generator("cpu")
        self.number = -1
        self.values = torch.empty(min(BLOCK, size), dtype=torch.float32)

    def copy_to(self, run: Tensor, position: int) -> None:
        """Copy the values from `position` on."""
        done = 0
        while done < len(run):
            number, begin = divmod(position + done, BLOCK)
            values = self._block(number)[begin : begin + len(run) - done]
            run[done : done + len(values)].copy_(values)
            done += len(values)

    def _block(self, number: int) -> Tensor:
        values = self.values[: self.size - number * BLOCK]
        if number != self.number:
            self.generator.manual_seed((self.first_seed + number) % (1 << 32))
            values.normal_(0.0, self.std, generator=self.generator)
            self.number = number
        return values
