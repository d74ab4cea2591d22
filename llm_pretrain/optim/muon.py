"""Muon for matrices and AdamW for everything else, in one optimizer.

The source is github.com/KellerJordan/Muon. `torch.optim.Muon` computes the same updates, but for one
two-dimensional matrix at a time. Here matrices of equal shape are multiplied together, a three-dimensional
parameter is a stack of matrices, and the ranks of a process group divide the matrices among themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from heapq import heapreplace
from itertools import chain, islice, zip_longest
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from llm_pretrain.config.optimizers import Role
from llm_pretrain.config.tree import OptimizerConfig
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.optim.orthogonal import BATCH_ELEMENTS, orthogonalize, product_dtype
from llm_pretrain.optim.param_groups import Group, as_sharded, parameter_groups, replicate_dims, to_local

T = TypeVar("T")
distributed: Any = torch.distributed
"""Untyped: pyright does not see all names that torch documents as exported."""


def build(model: Decoder, config: OptimizerConfig, precision: str) -> Muon:
    """Muon for the matrices of the layers, AdamW for the rest; the arguments are those of `build_optimizer`.

    A step updates few rows of embedding and head, which have one row per token; a router has one row per
    expert. The gate and up projections of an expert share a parameter but are orthogonalised separately, like
    the two matrices of a dense layer.
    """

    def own_group(role: Role, name: str) -> Group | None:
        if role != "hidden":
            return None
        blocks = 2 if name.endswith("experts.gate_up_proj") else 1
        ratio, decay = config.muon_learning_rate / config.learning_rate, config.weight_decay
        settings = {"algorithm": "muon", "blocks": blocks, "lr_ratio": ratio, "weight_decay": decay}
        return ("muon", str(blocks)), settings

    return Muon(
        parameter_groups(model, config, own_group),
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        in_bf16=precision != "fp32",
    )


class Muon(Optimizer):
    """Updates groups with `algorithm="muon"` by orthogonalised momentum, and groups with "adamw" by AdamW.

    A matrix W [out, in] with gradient G, at rate lr:

        B ← momentum · B + (1 - momentum) · G
        O ← orthogonalise((1 - momentum) · G + momentum · B)             (Nesterov's)
        W ← (1 - lr · weight_decay) · W - lr · sqrt(max(1, out / in)) · O

    torch's fused kernel updates AdamW's groups, bit for bit as `torch.optim.AdamW` does.

    State by parameter: `step`, and `momentum_buffer` or `exp_avg` and `exp_avg_sq`.

    The ranks of the default process group divide the matrices of unsharded parameters among themselves;
    values and gradients of these parameters must be equal on all ranks. The matrices of a sharded parameter
    are divided among the ranks that hold a part of it, in all replicas.

    Args:
        params: Groups, each with its `algorithm` and, for Muon, `blocks`: a parameter [..., blocks · out, in]
            holds that many matrices, stacked by rows.
        lr: Learning rate of groups without one.
        momentum: Muon's momentum.
        betas, eps: AdamW's.
        weight_decay: Weight decay of both algorithms.
        in_bf16: Whether Muon may multiply in bf16 if that is faster. A run in fp32 must not: with another
            number of processes, the last bit of a sum would change how a number rounds to bf16.
    """

    # with this flag GradScaler sets `found_inf` and calls `step`, instead of skipping the call
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        lr: float,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        in_bf16: bool = True,
    ):
        self.in_bf16 = in_bf16
        defaults = {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "algorithm": "adamw", "blocks": 1})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; collective if Muon's rate is not 0.

        Like torch's fused optimizers, this reads two attributes that a GradScaler or the training loop may
        set. `found_inf` is a tensor: if it is not 0, nothing is updated, without waiting for the device.
        `grad_scale` is the factor that the gradients are multiplied by.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        matrices: list[_Matrices] = []
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["algorithm"] == "muon":
                matrices += self._matrices(group, parameters, scale, found_inf)
            else:
                self._adamw(group, parameters, scale, found_inf)
        self._muon(matrices, found_inf)
        return loss

    def _adamw(
        self, group: dict[str, Any], parameters: list[Tensor], scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        states = [self._state(parameter, "exp_avg", "exp_avg_sq") for parameter in parameters]
        adamw(
            parameters,
            [_gradient(parameter) for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            grad_scale=scale,
            found_inf=found_inf,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _matrices(
        self, group: dict[str, Any], parameters: list[Tensor], scale: Tensor | None, found_inf: Tensor | None
    ) -> Iterator[_Matrices]:
        """The matrices of a group's parameters, with their gradients unscaled and their steps counted."""
        replicas = _if_several()
        for parameter in parameters:
            state = self._state(parameter, "momentum_buffer")
            state["step"] += 1 if found_inf is None else (found_inf == 0).to(state["step"]).reshape(())
            if scale is not None:
                _gradient(parameter).div_(scale)
            yield from _stack(parameter, state["momentum_buffer"], group, replicas)

    def _muon(self, matrices: list[_Matrices], found_inf: Tensor | None) -> None:
        alike: dict[Any, list[_Matrices]] = {}
        for each in matrices:
            if each.learning_rate == 0.0:  # a decay's end, or torch creates state to load into
                each.advance(found_inf)
            else:
                alike.setdefault((each.shards, each.replicas), []).append(each)
        for (shards, replicas), same in alike.items():
            dtype = product_dtype(same[0].parameter.device, self.in_bf16)
            if shards is None and replicas is None:
                _update_alone(same, dtype, found_inf)
                continue
            for buckets in _rounds(same, _size(shards) * _size(replicas)):
                if shards is None:
                    _update_replicated(buckets, replicas, dtype, found_inf)
                else:
                    _update_sharded(buckets, shards, replicas, dtype, found_inf)

    def _state(self, parameter: Tensor, *names: str) -> dict[str, Any]:
        """The parameter's state, created as torch's AdamW creates it if there is none."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name in names:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


@dataclass(slots=True)
class _Matrices:
    """n matrices of one parameter, or this rank's rows of the parameter's only matrix: views [n, rows, in].

    Args:
        parameter, momentum, gradient: This rank's part of each.
        group: The optimizer's, with the settings.
        out: Rows of a whole matrix.
        shards: The process group whose ranks each hold `_held` rows; None if each rank holds all rows.
        replicas: The process group whose ranks hold the same rows. The ranks of both groups divide the work.
    """

    parameter: Tensor
    momentum: Tensor
    gradient: Tensor
    group: dict[str, Any]
    out: int
    shards: Any = None
    replicas: Any = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(n, out, in) of the whole matrices."""
        return len(self.parameter), self.out, self.parameter.shape[-1]

    @property
    def elements(self) -> int:
        """Number of elements of the whole matrices."""
        return math.prod(self.shape)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the group."""
        return float(self.group["lr"])

    def split(self, counts: Iterable[int]) -> Iterator[_Matrices]:
        """Consecutive parts with these numbers of matrices."""
        parts = [tensor.split([*counts]) for tensor in (self.parameter, self.momentum, self.gradient)]
        for parameter, momentum, gradient in zip(*parts, strict=True):
            yield replace(self, parameter=parameter, momentum=momentum, gradient=gradient)

    def advance(self, found_inf: Tensor | None) -> None:
        """Move the momentum towards the gradient."""
        weight = 1 - self.group["momentum"]
        if found_inf is None:
            self.momentum.lerp_(self.gradient, weight)
        else:
            _write(self.momentum, self.momentum.lerp(self.gradient, weight), found_inf)

    def nesterov(self) -> Tensor:
        """Nesterov's update, after `advance`."""
        return self.gradient.lerp(self.momentum, self.group["momentum"])

    def apply(self, update: Tensor, found_inf: Tensor | None) -> None:
        """Decay the parameters and move them by this rank's part of the orthogonalised update."""
        # A matrix maps inputs of RMS 1 to outputs of RMS 1 when its singular values are near sqrt(out / in).
        # If out is less than in, Jordan's rule leaves the singular values at 1.
        learning_rate = self.learning_rate
        distance = learning_rate * math.sqrt(max(1.0, self.out / update.shape[-1]))
        decayed = 1 - learning_rate * self.group["weight_decay"]
        if found_inf is None:
            self.parameter.mul_(decayed).add_(update, alpha=-distance)
        else:
            _write(self.parameter, (self.parameter * decayed).add_(update, alpha=-distance), found_inf)


_Batch = list[_Matrices]
"""Matrices of one group and of equal shape up to transposition, orthogonalised together."""
_Bucket = Sequence[_Batch]
"""What a rank orthogonalises between two exchanges."""


def _stack(
    parameter: Tensor, momentum: Tensor, group: dict[str, Any], everybody: Any = None
) -> Iterator[_Matrices]:
    """The matrices of a parameter [out, in] or [E, blocks · out, in], in one or more parts.

    Under FSDP a rank holds rows of a matrix, or whole experts, which it shares only with its replicas.

    Args:
        parameter, momentum: With the gradient.
        group: The optimizer's.
        everybody: The group of the ranks that hold an unsharded parameter; None for a single rank.
    """
    *experts, rows, columns = parameter.shape
    own, own_momentum, gradient = (to_local(each) for each in (parameter, momentum, _gradient(parameter)))
    sharded = as_sharded(parameter)
    replicas = everybody if sharded is None else _replicas(sharded)
    if sharded is not None and not experts and (shards := _if_several(sharded.device_mesh.get_group(-1))):
        assert sharded.placements[-1].is_shard(0)
        assert group["blocks"] == 1
        yield _Matrices(own[None], own_momentum[None], gradient[None], group, rows, shards, replicas)
        return
    if not own.numel():  # fewer experts than ranks
        return
    size = (rows // group["blocks"], columns)
    views = (own.view(-1, *size), own_momentum.view(-1, *size), gradient.reshape(-1, *size))
    at_a_time = max(1, BATCH_ELEMENTS // (size[0] * size[1]))
    for view, of_momentum, of_gradient in zip(*(each.split(at_a_time) for each in views), strict=True):
        yield _Matrices(view, of_momentum, of_gradient, group, size[0], replicas=replicas)


def _batches(matrices: Iterable[_Matrices]) -> Iterator[_Batch]:
    """Batches of matrices of one group and shape, at most `BATCH_ELEMENTS` each, in a fixed order."""
    by_shape: dict[tuple[int, ...], list[_Matrices]] = {}
    for each in matrices:
        _, rows, columns = each.shape
        key = (id(each.group), min(rows, columns), max(rows, columns))
        by_shape.setdefault(key, []).append(each)
    for same in by_shape.values():
        yield from _packed(same, lambda each: each.elements)


def _packed(items: Iterable[T], elements: Callable[[T], int]) -> Iterator[list[T]]:
    """Consecutive items in lists of at most `BATCH_ELEMENTS` together, or of one larger item."""
    packed: list[T] = []
    total = 0
    for item in items:
        size = elements(item)
        if packed and total + size > BATCH_ELEMENTS:
            yield packed
            packed, total = [], 0
        packed.append(item)
        total += size
    if packed:
        yield packed


@cache
def owners(shapes: tuple[tuple[int, int, int], ...], ranks: int) -> list[dict[int, int]]:
    """For each stack (n, out, in), how many of its matrices each rank orthogonalises.

    A matrix goes to the rank with the least work so far. So two ranks' work differs by at most a matrix.
    """
    by_work = [(0, rank) for rank in range(ranks)]
    counts: list[dict[int, int]] = []
    for n, *sides in shapes:
        counts.append({})
        work = _work(*sides)
        for _ in range(n):
            so_far, rank = by_work[0]
            heapreplace(by_work, (so_far + work, rank))
            counts[-1][rank] = counts[-1].get(rank, 0) + 1
    return counts


def _work(rows: int, columns: int) -> int:
    """A number proportional to the operations that a matrix takes."""
    small, large = sorted((rows, columns))
    return small * small * (2 * large + small)


def _rounds(matrices: list[_Matrices], ranks: int) -> Iterator[list[_Bucket]]:
    """Rounds with one bucket per rank; a rank orthogonalises its bucket between the round's exchanges.

    The matrices that take the most work come first, so that the buckets of a round take about the same time.
    """
    matrices = sorted(matrices, key=lambda each: _work(*each.shape[1:]), reverse=True)
    by_owner: list[list[_Matrices]] = [[] for _ in range(ranks)]
    for each, counts in zip(matrices, owners(tuple(each.shape for each in matrices), ranks), strict=True):
        for owner, part in zip(counts, each.split(counts.values()), strict=True):
            by_owner[owner].append(part)
    in_buckets = (
        _packed(_batches(own), lambda batch: sum(each.elements for each in batch)) for own in by_owner
    )
    for buckets in zip_longest(*in_buckets, fillvalue=()):
        yield list(buckets)


def _update_alone(matrices: list[_Matrices], dtype: torch.dtype, found_inf: Tensor | None) -> None:
    for batch in _batches(matrices):
        for each in batch:
            each.advance(found_inf)
        updates = [each.nesterov() for each in batch]
        for each, update in zip(batch, orthogonalize(updates, dtype), strict=True):
            each.apply(update, found_inf)


def _update_replicated(
    buckets: Sequence[_Bucket], ranks: Any, dtype: torch.dtype, found_inf: Tensor | None
) -> None:
    """Update matrices that every rank holds, in a round: each bucket's owner broadcasts its results."""
    rank = distributed.get_rank(ranks)
    members = [[*chain(*bucket)] for bucket in buckets]
    for each in chain(*members):
        each.advance(found_inf)
    device = next(chain(*members)).parameter.device
    own_flat, own_updates = _buffer([each.shape for each in members[rank]], dtype, device)
    places = iter(own_updates)
    for batch in buckets[rank]:
        for update in orthogonalize([each.nesterov() for each in batch], dtype):
            next(places).copy_(update)
    for owner, of_owner in enumerate(members):
        flat, updates = own_flat, own_updates
        if owner != rank:
            flat, updates = _buffer([each.shape for each in of_owner], dtype, device)
        if of_owner:
            distributed.broadcast(flat, group=ranks, group_src=owner)
        for each, update in zip(of_owner, updates, strict=True):
            each.apply(update, found_inf)


def _update_sharded(
    buckets: Sequence[_Bucket], shards: Any, replicas: Any, dtype: torch.dtype, found_inf: Tensor | None
) -> None:
    """Update matrices whose rows are sharded, in a round: each replica orthogonalises some of them, and each
    of its ranks broadcasts its rows to the ranks with the same rows."""
    size, own = distributed.get_world_size(shards), distributed.get_rank(replicas) if replicas else 0
    by_replica = [buckets[begin : begin + size] for begin in range(0, len(buckets), size)]
    members = [[*chain(*chain(*of_replica))] for of_replica in by_replica]
    for each in chain(*members):
        each.advance(found_inf)
    device = next(chain(*members)).parameter.device
    own_rows, own_updates = _orthogonal_rows(by_replica[own], shards, dtype, device)
    for replica, of_replica in enumerate(members):
        rows, updates = own_rows, own_updates
        if replica != own:
            rows, updates = _buffer([each.parameter.shape for each in of_replica], dtype, device)
        if replicas is not None and rows.numel():
            distributed.broadcast(rows, group=replicas, group_src=replica)
        for each, update in zip(of_replica, updates, strict=True):
            each.apply(update, found_inf)


def _orthogonal_rows(
    buckets: Sequence[_Bucket], shards: Any, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """Orthogonalise a replica's buckets: rows go to the owner of their matrix and come back. Returns a buffer
    of this rank's orthogonalised rows, and a view of it for each matrix."""
    rank, size = distributed.get_rank(shards), distributed.get_world_size(shards)
    members = [*chain(*chain(*buckets))]
    rows, row_updates = _buffer([each.parameter.shape for each in members], dtype, device)
    for each, update in zip(members, row_updates, strict=True):
        update.copy_(each.nesterov())
    own = [*chain(*buckets[rank])]
    held_shapes = [
        [(1, _held(each.out, holder, size), each.shape[-1]) for each in own] for holder in range(size)
    ]
    received, parts = _buffer([*chain(*held_shapes)], dtype, device)
    by_owner = [sum(each.parameter.numel() for each in chain(*bucket)) for bucket in buckets]
    by_holder = [sum(map(math.prod, of_holder)) for of_holder in held_shapes]
    distributed.all_to_all_single(received, rows, by_holder, by_owner, group=shards)
    by_matrix = iter([parts[index :: len(own)] for index in range(len(own))])  # the rows from each holder
    for batch in buckets[rank]:
        held = [*islice(by_matrix, len(batch))]
        wholes = [torch.cat(each, dim=1) for each in held]
        for places, update in zip(held, orthogonalize(wholes, dtype), strict=True):
            for place, new in zip(places, update.split([each.shape[1] for each in places], 1), strict=True):
                place.copy_(new)
    distributed.all_to_all_single(rows, received, by_owner, by_holder, group=shards)  # rows go back
    return rows, row_updates


def _buffer(
    shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """An uninitialised buffer, and views of it of these shapes, one after another."""
    sizes = [math.prod(shape) for shape in shapes]
    flat = torch.empty(sum(sizes), dtype=dtype, device=device)
    return flat, [part.view(*shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]


def _held(rows: int, rank: int, ranks: int) -> int:
    """How many rows of a sharded matrix a rank holds, as DTensor cuts them; the last ranks may hold none."""
    share = -(-rows // ranks)
    return max(0, min(share, rows - rank * share))


def _replicas(sharded: Any) -> Any:
    """The process group whose ranks hold the same part of a sharded tensor; None if no other rank does."""
    dims = replicate_dims(sharded)
    return _if_several(sharded.device_mesh.get_group(dims[0])) if dims else None


def _size(ranks: Any) -> int:
    return 1 if ranks is None else distributed.get_world_size(ranks)


def _if_several(ranks: Any = None) -> Any:
    """A process group (default: the default group, if there is one) if it has several ranks, else None."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    ranks = ranks or distributed.group.WORLD
    return ranks if distributed.get_world_size(ranks) > 1 else None


def _write(target: Tensor, value: Tensor, found_inf: Tensor) -> None:
    """Set `target` to `value` unless an infinity was found, without waiting for the device."""
    target.copy_(torch.where(found_inf.to(target.device).reshape(()) == 0, value, target))


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
