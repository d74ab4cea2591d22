"""Muon for matrices and AdamW for everything else, in one optimizer.

After github.com/KellerJordan/Muon. `torch.optim.Muon` computes the same for one two-dimensional matrix at a
time; here matrices of equal shape are multiplied together, a three-dimensional parameter is a stack of
matrices, and a parameter sharded by FSDP is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

if TYPE_CHECKING:  # importing it takes a second
    from torch.distributed.tensor import DTensor

BATCH_ELEMENTS = 1 << 24
"""Elements orthogonalised at a time, which needs four buffers of this size."""


class Muon(Optimizer):
    """Updates groups with `algorithm="muon"` by orthogonalised momentum, those with "adamw" by fused AdamW.

    A matrix W [out, in] with gradient G, at rate lr:

        B ← momentum · B + (1 - momentum) · G
        O ← orthogonalise((1 - momentum) · G + momentum · B)             (Nesterov's)
        W ← (1 - lr · weight_decay) · W - lr · sqrt(max(1, out / in)) · O

    AdamW's groups are updated by torch's fused kernel, to the bit what `torch.optim.AdamW` does.

    State by parameter: `step`, and `momentum_buffer` or `exp_avg` and `exp_avg_sq`.

    Args:
        params: Groups, each with its `algorithm` and, for Muon, `blocks`: a parameter [..., blocks · out, in]
            holds that many matrices, stacked by rows.
        lr: Learning rate of groups without one.
        momentum: Muon's momentum.
        betas, eps: AdamW's.
        weight_decay: Of both algorithms.
        in_bf16: Whether Muon may multiply in bf16 if that is faster. A run in fp32 must not: with another
            number of processes, the last bit of a sum would change how a number rounds to bf16.
        fused: Whether AdamW is torch's fused kernel. The plain one does not read `found_inf`.
    """

    # GradScaler then sets `found_inf` and calls `step`, instead of skipping the call
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
        fused: bool = True,
    ):
        self.in_bf16, self.fused = in_bf16, fused
        self._step_supports_amp_scaling = fused  # as of torch's AdamW
        defaults = {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "algorithm": "adamw", "blocks": 1})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Like torch's fused optimizers it reads two attributes that a GradScaler or the training loop may set:
        `found_inf` (a tensor; if it is not 0 nothing is updated, without waiting for the device) and
        `grad_scale` (the factor that the gradients are multiplied by).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["algorithm"] == "muon":
                self._muon(group, parameters, scale, found_inf)
            else:
                self._adamw(group, parameters, scale, found_inf)
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
            fused=self.fused,
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

    def _muon(
        self, group: dict[str, Any], parameters: list[Tensor], scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        pieces = []
        for parameter in parameters:
            state = self._state(parameter, "momentum_buffer")
            state["step"] += 1 if found_inf is None else (found_inf == 0).to(state["step"]).reshape(())
            if scale is not None:
                _gradient(parameter).div_(scale)
            pieces += _stack(parameter, state["momentum_buffer"], group["blocks"])
        for batch in _batches(pieces):
            dtype = product_dtype(batch[0].parameter.device, self.in_bf16)
            updates = [piece.momentum_update(group["momentum"], dtype, found_inf) for piece in batch]
            if float(group["lr"]) == 0.0:  # the end of a decay, or torch creating the state to load into
                continue
            for piece, update in zip(batch, orthogonalize(updates, dtype), strict=True):
                piece.apply(update, float(group["lr"]), group["weight_decay"], found_inf)

    def _state(self, parameter: Tensor, *names: str) -> dict[str, Any]:
        """The parameter's state, created as torch's AdamW creates it if there is none."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name in names:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


@dataclass(frozen=True)
class _Matrices:
    """n matrices of one parameter that are updated together: views [n, out, in].

    Args:
        parameter, momentum, gradient: This rank's part of them.
        whole: The sharded parameter, if this rank holds only some rows of its one matrix.
    """

    parameter: Tensor
    momentum: Tensor
    gradient: Tensor
    whole: Any = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(n, out, in) of the unsharded matrices."""
        whole = () if self.whole is None else (1, *self.whole.shape)
        count, rows, columns = whole or self.parameter.shape
        return count, rows, columns

    def momentum_update(self, momentum: float, dtype: torch.dtype, found_inf: Tensor | None) -> Tensor:
        """Advance the momentum and return Nesterov's update, unsharded; collective for a sharded matrix.

        A sharded update is gathered in `dtype`, that of the products, to move as few bytes as possible.
        """
        if found_inf is None:
            self.momentum.lerp_(self.gradient, 1 - momentum)
        else:
            _write(self.momentum, self.momentum.lerp(self.gradient, 1 - momentum), found_inf)
        update = self.gradient.lerp(self.momentum, momentum)
        if self.whole is None:
            return update
        return full_tensor(update[0].to(dtype), self.whole)[None]

    def apply(
        self, update: Tensor, learning_rate: float, weight_decay: float, found_inf: Tensor | None
    ) -> None:
        """Decay the parameters and move them by the orthogonalised, unsharded update [n, out, in]."""
        rows, columns = update.shape[-2:]
        # A matrix of out rows takes RMS-1 inputs to RMS-1 outputs when its singular values are near
        # sqrt(out / in); below a square one Jordan's rule leaves them at 1.
        distance = learning_rate * math.sqrt(max(1.0, rows / columns))
        if self.whole is not None:
            update = shard_like(update[0], self.whole)[None]
        decayed = 1 - learning_rate * weight_decay
        if found_inf is None:
            self.parameter.mul_(decayed).add_(update, alpha=-distance)
        else:
            _write(self.parameter, (self.parameter * decayed).add_(update, alpha=-distance), found_inf)


def _stack(parameter: Tensor, momentum: Tensor, blocks: int) -> Iterator[_Matrices]:
    """The matrices of a parameter [out, in] or [E, blocks · out, in], in one or more parts.

    Under FSDP a rank holds whole experts, which it updates without communication, or rows of a matrix.
    """
    gradient = _gradient(parameter)
    *experts, rows, columns = parameter.shape
    parts = [to_local(tensor) for tensor in (parameter, momentum, gradient)]
    whole = as_sharded(parameter)
    if whole is not None and not experts:
        yield _Matrices(*(part[None] for part in parts), whole=whole)
        return
    if not parts[0].numel():  # fewer experts than ranks
        return
    size = (rows // blocks, columns)
    views = (parts[0].view(-1, *size), parts[1].view(-1, *size), parts[2].reshape(-1, *size))
    at_a_time = max(1, BATCH_ELEMENTS // (size[0] * size[1]))
    for together in zip(*(view.split(at_a_time) for view in views), strict=True):
        yield _Matrices(*together)


def _batches(pieces: Iterable[_Matrices]) -> Iterator[list[_Matrices]]:
    """Groups of pieces with equal shape up to transposition, at most `BATCH_ELEMENTS` each, in a fixed
    order."""
    by_shape: dict[tuple[int, int], list[_Matrices]] = {}
    for piece in pieces:
        _, rows, columns = piece.shape
        by_shape.setdefault((min(rows, columns), max(rows, columns)), []).append(piece)
    for same in by_shape.values():
        batch, elements = [], 0
        for piece in same:
            size = math.prod(piece.shape)
            if batch and elements + size > BATCH_ELEMENTS:
                yield batch
                batch, elements = [], 0
            batch.append(piece)
            elements += size
        yield batch


def step_buffers(groups: Iterable[dict[str, Any]], dtype: torch.dtype) -> int:
    """Peak bytes of a step's temporary buffers, on one rank with unsharded parameters.

    Args:
        groups: An optimizer's; the parameters may be on the meta device.
        dtype: Type of the products, `product_dtype`.
    """
    most, kept, itemsize = 0, 0, dtype.itemsize
    pieces: list[_Matrices] = []
    for group in groups:
        for parameter in group["params"] if group.get("algorithm") == "muon" else ():
            *_, rows, columns = parameter.shape
            stack = parameter.detach().view(-1, rows // group["blocks"], columns)
            at_a_time = max(1, BATCH_ELEMENTS // stack[0].numel())
            pieces += [_Matrices(each, each, each) for each in stack.split(at_a_time)]
    for batch in _batches(pieces):
        elements = sum(math.prod(piece.shape) for piece in batch)
        small, large = sorted(batch[0].shape[1:])
        # Nesterov's update in fp32; x before and after an iteration, its Gram matrix and the polynomial of it
        needed = 4 * elements + itemsize * elements * 2 * (large + small) // large
        most, kept = max(most, kept + needed), itemsize * elements  # a result is alive during the next batch
    return most


def _write(target: Tensor, value: Tensor, found_inf: Tensor) -> None:
    """Set `target` to `value` unless an infinity was found, without waiting for the device."""
    target.copy_(torch.where(found_inf.to(target.device).reshape(()) == 0, value, target))


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b, c of the quintic a·X + b·XXᵀX + c·(XXᵀ)²X. It is steep at zero, so that small singular values grow
fast, and ends between 0.7 and 1.2 instead of at 1 (kellerjordan.github.io/posts/muon)."""
STEPS, EPSILON = 5, 1e-7


def product_dtype(device: torch.device, in_bf16: bool = True) -> torch.dtype:
    """Type of Muon's products: bf16 if it is allowed and faster on the device, else fp32.

    bf16 is precise enough for directions. A CPU without AVX-512 BF16 or AMX emulates it; with it the products
    are four times as fast as in fp32.
    """
    if not in_bf16:
        return torch.float32
    if device.type != "cpu":
        return torch.bfloat16
    return torch.bfloat16 if _cpu_has_bf16() else torch.float32


def _cpu_has_bf16() -> bool:
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)  # there is no public function
    return bool(supported and supported())


def orthogonalize(matrices: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Approximately the nearest semi-orthogonal matrices: same singular vectors, singular values near 1.

    Args:
        matrices: Each [n, r, c] or [n, c, r] with the same r and c, on one device; n may differ.
        dtype: Type of the products; default `product_dtype` of the device.

    Returns:
        The same shapes, in the type of the products.
    """
    dtype = dtype or product_dtype(matrices[0].device)
    upright = [matrix.shape[-2] > matrix.shape[-1] for matrix in matrices]
    wide = [each.mT if flip else each for each, flip in zip(matrices, upright, strict=True)]
    counts = [len(each) for each in wide]
    stacked = torch.empty((sum(counts), *wide[0].shape[1:]), dtype=dtype, device=wide[0].device)
    for place, each in zip(stacked.split(counts), wide, strict=True):
        place.copy_(each)
    parts = newton_schulz(stacked).split(counts)
    return [part.mT if flip else part for part, flip in zip(parts, upright, strict=True)]


def newton_schulz(x_nsl: Tensor) -> Tensor:
    """Five quintic Newton-Schulz iterations on `x_nsl`, which is overwritten.

    Shapes: n matrices, s the smaller and l the larger side.
    """
    a, b, c = COEFFICIENTS
    # the Frobenius norm bounds the spectral norm, and the iteration converges from at most 1
    norms = torch.linalg.vector_norm(x_nsl, dim=(-2, -1), keepdim=True)
    x_nsl = x_nsl.div_(norms.clamp(min=EPSILON))
    for _ in range(STEPS):
        gram_nss = torch.bmm(x_nsl, x_nsl.mT)
        polynomial_nss = torch.baddbmm(gram_nss, gram_nss, gram_nss, beta=b, alpha=c)
        x_nsl = torch.baddbmm(x_nsl, polynomial_nss, x_nsl, beta=a)
    return x_nsl


def to_local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory; the tensor itself if it is not sharded."""
    sharded = as_sharded(tensor)
    return (tensor if sharded is None else sharded.to_local()).detach()


def full_tensor(part: Tensor, like: DTensor) -> Tensor:
    """The unsharded tensor of which `part` is this rank's shard, sharded as `like`; collective."""
    return (
        type(like)
        .from_local(
            part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
        .full_tensor()
    )


def shard_like(whole: Tensor, like: DTensor) -> Tensor:
    """This rank's shard of `whole`, which every rank holds, sharded as `like`; no collective."""
    from torch.distributed.tensor import Replicate

    spread = type(like).from_local(whole, like.device_mesh, [Replicate()], run_check=False)
    return spread.redistribute(placements=like.placements).to_local()


def as_sharded(tensor: Tensor) -> DTensor | None:
    """The tensor as a DTensor; None if it is not sharded."""
    return tensor if hasattr(tensor, "full_tensor") else None  # type: ignore[return-value]
